# SPDX-License-Identifier: Apache-2.0
"""Sharing K and V among heads and layers (MLKV, Zuhri et al., 2024, section 3; heads alone: GQA, Ainslie et al., 2023).

The feed-forward networks become wider by the parameters that merging saves, so that the total stays the same. The
result does not compute what the source does until it is trained further (training/uptrain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from slimrt.converter.quantize import stored_as
from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import ModelData, Tensor, boolean, uint32
from slimrt.modelfile.sharing import NOT_UPTRAINED, OWNERS, sharing_fields, spread_owners
from slimrt.plumbing.arguments import whole

MERGES, STAGES = ("uniform", "reference"), ("unrotated", "rotated")
_ARCHITECTURES = ("gptneox", "llama")
_WARNING = (
    "layers and heads share K and V now and were not trained to: the model is not usable before it is trained further "
    "(training/uptrain.py)"
)


@dataclass(frozen=True)
class Heads:
    """How many layers and heads have K and V of their own.

    Attributes:
        n_layers, n_heads: numbers of layers and query heads. d, head_dim: widths. biased: K and V have biases.
        owners: number of layers with K and V. before, after: number of KV heads in each of them.
    """

    n_layers: int
    n_heads: int
    d: int
    head_dim: int
    biased: bool
    owners: int
    before: int
    after: int

    @property
    def lost(self) -> int:
        """Number of parameters of K and V that sharing saves."""
        return (self.before * self.n_layers - self.after * self.owners) * 2 * self.head_dim * (self.d + self.biased)

    def wider(self, matrices: int) -> int:
        """Units that each layer's feed-forward network, with this many matrices, gains for them; rounded as in the
        paper's models."""
        return round(self.lost // self.n_layers / self.d) // matrices


def heads_of(model: ModelData, kv_layers: int | None, kv_heads: int | None) -> Heads:
    """The sizes for sharing with `kv_layers` layers and `kv_heads` heads that have K and V; None: unchanged.

    Raises:
        UnsupportedError: another architecture, experts, or a model that shares already.
        ValueError: more layers or heads than there are, or a number of heads that does not divide theirs.
    """
    if model.arch not in _ARCHITECTURES:
        raise UnsupportedError(
            f"sharing K and V is for architectures {' and '.join(_ARCHITECTURES)}, not for '{model.arch}'"
        )
    if model.size("expert_count", 0):
        raise UnsupportedError("sharing K and V widens feed-forward networks, which are experts here")
    if OWNERS in model.metadata:
        raise UnsupportedError("layers of this model share K and V already: convert the model it was made from")
    n_layers, n_heads = model.size("block_count"), model.size("attention.head_count")
    d, before = model.size("embedding_length"), model.size("attention.head_count_kv", n_heads)
    owners = n_layers if kv_layers is None else whole("kv_layers", kv_layers)
    after = before if kv_heads is None else whole("kv_heads", kv_heads)
    if not 1 <= owners <= n_layers:
        raise ValueError(f"kv_layers must be from 1 to {n_layers}, the model's layers, got {kv_layers}")
    if not 1 <= after <= before or before % after:
        raise ValueError(f"kv_heads must divide {before}, the model's heads of K and V, got {kv_heads}")
    biased = not {"blk.0.attn_qkv.bias", "blk.0.attn_k.bias"}.isdisjoint(model.tensors)
    return Heads(n_layers, n_heads, d, model.size("attention.key_length", d // n_heads), biased, owners, before, after)


def share(
    model: ModelData, kv_layers: int | None, kv_heads: int | None, merge: str = "uniform", keys: str = "unrotated"
) -> tuple[ModelData, list[str]]:
    """Return the model with K and V in `kv_layers` layers only, and `kv_heads` heads there, and warnings.

    Args:
        kv_layers, kv_heads: None: unchanged.
        merge: how the layers of a group are merged, and how new feed-forward units are initialised. "uniform": mean of
            the layers; units with zero output weights. "reference", as the published converter: a running average of
            each layer with the result so far (weights of three layers: 1/4, 1/4, 1/2); copies of the first units.
        keys: which K of the owner readers use: "unrotated": before RoPE, as published; "rotated": after RoPE, so that
            scores depend on relative positions.

    Raises:
        UnsupportedError, ValueError: as `heads_of`; or an unknown merge or stage of keys.
    """
    if merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; there are: {', '.join(MERGES)}")
    if keys not in STAGES:
        raise ValueError(f"unknown shared keys {keys!r}; there are: {', '.join(STAGES)}")
    heads = heads_of(model, kv_layers, kv_heads)
    if heads.lost == 0:
        return model, []
    owners = spread_owners(heads.n_layers, heads.owners)
    weights = _weights(merge)
    made = [tensor for layer in range(heads.n_layers) for tensor in _queries(model, heads, layer)]
    for owner in sorted(set(owners)):
        group = [layer for layer, reads in enumerate(owners) if reads == owner]
        made += _keys_and_values(model, heads, group, weights(len(group)))
    widened, warnings = _widened(model, heads, zero=merge == "uniform")
    replaced = {f"blk.{i}.attn_{part}.{kind}" for i in range(heads.n_layers) for part in ("qkv", "k", "v")
                for kind in ("weight", "bias")}  # fmt: skip
    kept = {name: tensor for name, tensor in model.tensors.items() if name not in replaced}
    n_ff = model.size("feed_forward_length") + heads.wider(_matrices(model))
    fields = {
        f"{model.arch}.attention.head_count_kv": uint32(heads.after),
        f"{model.arch}.feed_forward_length": uint32(n_ff),
        NOT_UPTRAINED: boolean(True),
    }
    shared = ModelData(model.metadata | fields | sharing_fields(owners, keys), kept)
    return shared.with_tensors(*made, *widened), [*warnings, _WARNING]


def _weights(merge: str) -> Callable[[int], Sequence[float]]:
    """Function from the number of layers in a group to their weights in the merge."""
    if merge == "uniform":
        return lambda n: [1 / n] * n
    return lambda n: [2.0 ** -(n - 1), *(2.0 ** (i - n) for i in range(1, n))]


def _part(model: ModelData, heads: Heads, layer: int, part: str, kind: str) -> np.ndarray:
    """Rows of W_Q, W_K or W_V, or of its bias, float32 [out, ...]."""
    fused = model.tensors.get(f"blk.{layer}.attn_qkv.{kind}")
    if fused is None:
        return model.tensor(f"blk.{layer}.attn_{part}.{kind}").values()
    q, kv = heads.n_heads * heads.head_dim, heads.before * heads.head_dim
    return np.split(fused.values(), [q, q + kv])["qkv".index(part)]


def _like(model: ModelData, layer: int, part: str, kind: str) -> Tensor:
    """The tensor that contains a part ("q", "k" or "v"), for its type and shape."""
    fused = f"blk.{layer}.attn_qkv.{kind}"
    return model.tensors[fused] if fused in model.tensors else model.tensor(f"blk.{layer}.attn_{part}.{kind}")


def _kinds(heads: Heads) -> tuple[str, ...]:
    return ("weight", "bias") if heads.biased else ("weight",)


def _queries(model: ModelData, heads: Heads, layer: int) -> list[Tensor]:
    """W_Q (and its bias) split from a fused tensor; [] if it is a tensor of its own already."""
    if f"blk.{layer}.attn_qkv.weight" not in model.tensors:
        return []
    rows = heads.n_heads * heads.head_dim
    return [
        _later(f"blk.{layer}.attn_q.{kind}", rows, _like(model, layer, "q", kind),
               partial(_part, model, heads, layer, "q", kind))
        for kind in _kinds(heads)
    ]  # fmt: skip


def _keys_and_values(model: ModelData, heads: Heads, group: list[int], weights: Sequence[float]) -> list[Tensor]:
    """W_K and W_V of a group's owner: means of neighbouring heads, then of layers."""

    def merged(part: str, kind: str) -> np.ndarray:
        total = np.float64(0.0)
        for layer, weight in zip(group, weights, strict=True):
            rows = _part(model, heads, layer, part, kind).astype(np.float64)
            grouped = rows.reshape(heads.after, heads.before // heads.after, heads.head_dim, *rows.shape[1:])
            total = total + weight * grouped.mean(axis=1)
        return total.reshape(heads.after * heads.head_dim, *total.shape[2:]).astype(np.float32)

    rows = heads.after * heads.head_dim
    return [
        _later(f"blk.{group[0]}.attn_{part}.{kind}", rows, _like(model, group[0], part, kind),
               partial(merged, part, kind))
        for part in "kv"
        for kind in _kinds(heads)
    ]  # fmt: skip


def _later(name: str, rows: int, like: Tensor, values: Callable[[], np.ndarray]) -> Tensor:
    """A tensor with `rows` rows, computed when it is written, in the type of another."""
    return stored_as(name, (rows, *like.shape[1:]), like.type, values)


def _matrices(model: ModelData) -> int:
    """Number of matrices of a feed-forward network: 3 if gated, else 2."""
    return 3 if "blk.0.ffn_gate.weight" in model.tensors else 2


def _widened(model: ModelData, heads: Heads, *, zero: bool) -> tuple[list[Tensor], list[str]]:
    """The feed-forward networks with additional units, copies of the first, and warnings. zero: the output weights of
    the new units are 0, so that the network computes the same as before; they can learn since their inputs are not."""
    old = model.size("feed_forward_length")
    index = np.append(np.arange(old), np.arange(heads.wider(_matrices(model))) % old)
    made, warnings = [], []
    for layer in range(heads.n_layers):
        for name in ("ffn_gate.weight", "ffn_gate.bias", "ffn_up.weight", "ffn_up.bias"):
            if (tensor := model.tensors.get(f"blk.{layer}.{name}")) is not None:
                made.append(_later(tensor.name, len(index), tensor, partial(_rows, tensor, index)))
        down = model.tensor(f"blk.{layer}.ffn_down.weight")
        columns = partial(_columns, down, index, old if zero else len(index))
        wider = stored_as(down.name, (down.shape[0], len(index)), down.type, columns)
        if wider.type != down.type:
            warnings.append(f"{down.name} becomes {wider.type.name.lower()}: {len(index)} columns fill no whole blocks")
        made.append(wider)
    return made, warnings


def _rows(tensor: Tensor, index: np.ndarray) -> np.ndarray:
    rows: np.ndarray = tensor.values()[index]
    return rows


def _columns(tensor: Tensor, index: np.ndarray, alive: int) -> np.ndarray:
    values: np.ndarray = tensor.values()[:, index]
    values[:, alive:] = 0
    return values
