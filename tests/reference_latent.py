# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA; DeepSeek-AI, "DeepSeek-V2", section 2.1) in plain float64 loops, for reference.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from reference_formats import Array
from reference_modes import CACHE_MODES, Mode, Positions, Rows

if TYPE_CHECKING:
    from reference import Cache, Layer, Reference


@dataclass
class Latent:
    """Of a layer. Beside the latent stand columns that rotate, and are every head's."""

    down: Array  # [latent + rotating, d]
    norm: Array  # [latent]
    up_k: Array  # [heads, columns of K that do not rotate, latent]
    up_v: Array  # [heads, columns of V, latent]
    eps: float
    q_down: Array | None = None  # q too is made of a latent, of its own
    q_norm: Array | None = None

    @property
    def width(self) -> int:
        return len(self.norm)

    @property
    def plain(self) -> int:
        return self.up_k.shape[1]

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of K and of V."""
        return self.plain + len(self.down) - self.width, self.up_v.shape[1]

    def normed(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight


def rotated_end(m: Reference, i: int, heads: Array, first: int, positions: Positions) -> Array:
    """heads [n, heads, dim], of each the columns from `first` on rotated."""
    return np.concatenate([heads[..., :first], m.w.layers[i].rope(heads[..., first:], positions)], axis=-1)


def queries(m: Reference, layer: Layer, x: Array, positions: Positions, i: int) -> Array:
    """[n, heads, dim]."""
    latent = layer.latent
    if latent.q_down is not None:
        x = latent.normed(x @ latent.q_down.T, latent.q_norm)
    return rotated_end(m, i, (x @ layer.wq.T).reshape(len(x), m.w.n_heads, -1), latent.plain, positions)


def store(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """The normed latent, and the rotated columns that all heads share."""
    latent = m.w.layers[i].latent
    row = x @ latent.down.T
    row[:, : latent.width] = latent.normed(row[:, : latent.width], latent.norm)
    return {"latent": rotated_end(m, i, row[:, None], latent.width, positions)[:, 0]}


def attend(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool) -> Callable[[int], Array]:
    latent, row = m.w.layers[i].latent, rows["latent"]
    of_latent, rotating = row[:, : latent.width], row[:, latent.width :]

    def read(head: int) -> Array:
        plain, turned = q[:, head, : latent.plain], q[:, head, latent.plain :]
        up_k, up_v = latent.up_k[head], latent.up_v[head]
        if absorbed:
            wide = np.concatenate([plain @ up_k, turned], axis=1)
            return (m.weights(wide @ row.T, positions, head, i) @ of_latent) @ up_v.T
        k = np.concatenate([of_latent @ up_k.T, rotating], axis=1)
        return m.weights(q[:, head] @ k.T, positions, head, i) @ (of_latent @ up_v.T)

    return read


def store_heads(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """K and V of all heads, as the chunks of a long prompt keep them for each other."""
    latent, row = m.w.layers[i].latent, store(m, i, x, positions, cache)["latent"]
    of_latent, rotating = row[:, : latent.width], row[:, latent.width :]
    k = np.concatenate([np.concatenate([of_latent @ up.T, rotating], axis=1) for up in latent.up_k], axis=1)
    return {"k": k, "v": of_latent @ latent.up_v.reshape(-1, latent.width).T}


CACHE_MODES["latent"] = Mode(store, attend, lambda m, types: {"latent": (types[0], 1)})


def latent_of_gguf(part: dict[str, Array], key: Callable[..., Any], meta: Mapping[str, Any]) -> Latent | None:
    """Of a layer's tensors by GGUF name, of which q and what stands for K and V is set; key(name): of the metadata."""
    if "attn_kv_a_mqa.weight" not in part:
        return None
    n_heads, width, eps = key("attention.head_count"), key("attention.kv_lora_rank"), "attention.layer_norm_rms_epsilon"
    if "attn_kv_b.weight" in part:
        v = key("attention.value_length", key("embedding_length") // n_heads)
        up = part["attn_kv_b.weight"].reshape(n_heads, -1, width)
        up_k, up_v = up[:, :-v], up[:, -v:]
    else:
        up_k, up_v = part["attn_k_b.weight"].swapaxes(1, 2), part["attn_v_b.weight"]
    if "attn_q_b.weight" in part:
        part["attn_q.weight"] = part["attn_q_b.weight"]
    part |= {"attn_k.weight": up_k.reshape(-1, width), "attn_v.weight": up_v.reshape(-1, width)}
    return Latent(
        part["attn_kv_a_mqa.weight"],
        part["attn_kv_a_norm.weight"],
        up_k,
        up_v,
        meta.get("slimrt.latent_norm_epsilon", key(eps)),
        part.get("attn_q_a.weight"),
        part.get("attn_q_a_norm.weight"),
    )


def score_scale(key: Callable[..., Any]) -> float:
    """Under YaRN scores grow with the context, and what rotates does not."""
    dim = key("attention.key_length_mla", key("attention.key_length"))
    grown = 1 + key("rope.scaling.yarn_log_multiplier", 0.0) * log(key("rope.scaling.factor", 1.0))
    return grown**2 / sqrt(dim)
