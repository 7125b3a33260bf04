# SPDX-License-Identifier: Apache-2.0
"""A transformer in NumPy float64: the specification of what slimrt computes, in plain loops and without its code.

Covers decoders without experts, of every family that slimrt reads, and what every cache mode stores and reads back
(docs/cache-math.md). Row vectors: a weight is [out, in] as in the file, so x W is written `x @ w.T`.

    model = Reference("model.gguf")            # or a Hugging Face directory
    model.logits(ids)                          # [n, vocab], everything exact
    model.logits_cached(ids, n_prefill=32, mode="k", dtype="f16")   # rows rounded as they are stored

What a cache mode stores and how it is read back stands in reference_modes.py, number formats in reference_formats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import erf, pi, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference_experts import Beside, Experts
from reference_formats import Array, rounded
from reference_latent import Latent, queries
from reference_modes import BLOCK, CACHE_MODES, Planes, Rows, Types, aged, as_half, in_parts, plus
from reference_rope import Rope


# ---------------------------------------------------------------- the parts of a layer
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight + bias


def softmax(scores: Array, sink: float = -np.inf) -> Array:
    """sink: a score beside them whose weight is left out."""
    high = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    p = np.exp(scores - high)
    return p / (p.sum(axis=-1, keepdims=True) + np.exp(sink - high))


def capped(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "clamped_swish": lambda x: np.minimum(x, 7) / (1 + np.exp(-1.702 * np.minimum(x, 7))),
}


def gated(kind: str, gate: Array, up: Array) -> Array:
    """What an activation of the gate lets through: of gpt-oss's one more than its factor, which is clamped."""
    return ACTIVATIONS[kind](gate) * (np.clip(up, -7, 7) + 1 if kind == "clamped_swish" else up)


# ---------------------------------------------------------------- the model
@dataclass
class Layer:
    """One layer's weights, [out, in]; None where the model has none."""

    wq: Array
    wk: Array
    wv: Array
    wo: Array
    up: Array | None = None
    down: Array | None = None
    experts: Experts | None = None  # in place of up, down and gate, or
    beside: Beside | None = None  # beside them
    gate: Array | None = None
    attn_norm: Array | None = None  # of the input
    attn_norm_b: Array | None = None
    attn_post_norm: Array | None = None  # of the output
    q_norm: Array | None = None  # before RoPE: of the whole row, or of each head if it is as long as one
    k_norm: Array | None = None
    bq: Array | None = None
    bk: Array | None = None
    bv: Array | None = None
    bo: Array | None = None
    ffn_norm: Array | None = None
    ffn_norm_b: Array | None = None
    ffn_post_norm: Array | None = None
    up_b: Array | None = None
    down_b: Array | None = None
    gate_b: Array | None = None
    attn_sub_norm: Array | None = None  # of what W_O and down read
    ffn_sub_norm: Array | None = None
    sinks: Array | None = None  # of each head: a score that has no value
    n_kv_heads: int = 0  # 0: as many as the model says
    norms_v: bool = False  # each head of V, without a weight
    v_is_k: bool = False  # V is K before its norm's weight and RoPE
    scale: float = 1.0  # of the layer's output
    embd: Array | None = None  # an embedding of its own, [vocab, width]
    embd_proj: Array | None = None  # what makes the model's embedding as wide as that
    embd_proj_norm: Array | None = None
    embd_gate: Array | None = None
    embd_out: Array | None = None
    embd_post_norm: Array | None = None
    rope: Rope | None = None
    window: int = 0  # 0: none; else position i sees j > i - window
    latent: Latent | None = None  # of latent attention, whose wq reads q's own latent where it has one


@dataclass
class Weights:
    """A whole model, as read by reference_files.py."""

    n_heads: int
    n_kv_heads: int
    eps: float
    activation: str
    embed: Array
    layers: list[Layer]
    norm: Array
    head: Array
    norm_b: Array | None = None
    head_b: Array | None = None
    parallel: bool = False  # attention and FFN read the same x
    positions: Array | None = None  # learned positions
    embed_norm: Array | None = None  # of the embedding
    embed_norm_b: Array | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and FFN add
    score_scale: float = 0.0  # 0: by the width of a head
    logit_scale: float = 1.0
    clamp: float = 0.0  # of q, k and v; 0: none
    qk_layer_norm: bool = False  # else RMS norm
    slopes: Array | None = None  # ALiBi, of each head
    query_growth: float = 0.0  # q of position p times 1 + this ln(1 + p // query_growth_length)
    query_growth_length: int = 1
    score_cap: float = 0.0  # s becomes cap * tanh(s / cap); 0: it does not
    logit_cap: float = 0.0
    owners: list[int] | None = None  # the layer whose rows each layer reads; None: its own


class Reference:
    """A model that computes. `wkv_dtype`: how the derived matrices W_KV and W_VK are stored (None: exact). `folds`:
    what modes k+r and xr need, as the file would hold it ("blk.0.attn_kr_v.weight": [out, in]). `owners`: the layer
    whose rows each layer reads with queries of its own (None: its own)."""

    def __init__(
        self,
        path: str | Path | Weights,
        n_ctx: int = 0,
        wkv_dtype: str | None = None,
        folds: dict[str, NDArray[np.floating]] | None = None,
        owners: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(path, Weights):
            from reference_files import load

            path = load(path, n_ctx)
        self.w = path
        self.wkv_dtype = wkv_dtype
        first = self.w.layers[0]
        self.d_model = self.w.embed.shape[1]
        self.dk, self.dv = (len(weight) // self.w.n_kv_heads for weight in (first.wk, first.wv))
        self.baseline = "kv"
        if first.latent is not None:
            (self.dk, self.dv), self.baseline = first.latent.head_dims, "latent"
        self._derived: dict[tuple[str, int], Array] = {}
        self._folds = folds or {}
        self.owners = list(owners or self.w.owners or range(len(self.w.layers)))
        self.sinks: Array | None = None  # of the layer that reads
        self.at: Layer = first  # whose rows are at work
        self.row_type: str | None = None  # of these rows, or of their K

    @property
    def n_kv_heads(self) -> int:
        """Of the layer whose rows are at work."""
        return self.at.n_kv_heads or self.w.n_kv_heads

    @property
    def narrow(self) -> bool:
        """Whether rows at work have 8 bits or fewer."""
        return self.row_type not in (None, "f32", "f16", "bf16")

    # ------------------------------------------------ derived weights
    def w_kv(self, i: int) -> Array:
        """V = K W_KV, [d_k, d_v] over all heads: the inverse of W_K, or its right inverse (e > d), times W_V."""
        return self._derive("kv", i, self.w.layers[i].wk.T, self.w.layers[i].wv.T)

    def held(self, w_kv: Array) -> Array:
        """W_KV as it is held for rows of the type at work: of 8 bits and fewer in f16, each column divided by its
        largest magnitude."""
        if not self.narrow:
            return w_kv
        scale = np.abs(w_kv).max(axis=0).astype(np.float32)
        return (w_kv.astype(np.float32) / scale).astype(np.float16) * scale.astype(np.float64)

    def w_vk(self, i: int) -> Array:
        """K = V W_VK."""
        return self._derive("vk", i, self.w.layers[i].wv.T, self.w.layers[i].wk.T)

    def _derive(self, name: str, i: int, stored: Array, wanted: Array) -> Array:
        if (name, i) not in self._derived:
            d, e = stored.shape
            assert e >= d, "not recoverable: the stored row is shorter than the input"
            inverse = np.linalg.inv(stored) if e == d else stored.T @ np.linalg.inv(stored @ stored.T)
            self._derived[name, i] = rounded(inverse @ wanted, self.wkv_dtype)
        return self._derived[name, i]

    def folded(self, i: int, suffix: str) -> Array | None:
        """A tensor of `folds` as row vectors multiply with it, [in, out]; a vector as it is; None: there is none."""
        tensor = self._folds.get(f"blk.{i}.{suffix}")
        return None if tensor is None else np.asarray(tensor, np.float64).T

    # ------------------------------------------------ running
    def logits(self, ids: Sequence[int]) -> Array:
        """All tokens at once, nothing cached: [n, vocab]."""
        return self.append(ids, self.new_cache(self.baseline, None))

    def logits_cached(
        self,
        ids: Sequence[int],
        n_prefill: int,
        mode: str | Sequence[str] = "kv",
        dtype: str | tuple[str, str] | None = None,
        n_batch: int = 0,
        absorbed: bool = True,
    ) -> Array:
        """n_prefill tokens (in chunks of n_batch, if given), then one at a time; every append reads earlier ones
        as they were stored. dtype: of the stored rows, or (type of k, type of v; in mode k+r of the residual)."""
        cache = self.new_cache(mode, dtype, absorbed)
        chunk = n_batch or max(n_prefill, 1)
        parts = [self.append(ids[i : min(i + chunk, n_prefill)], cache) for i in range(0, n_prefill, chunk)]
        parts += [self.append([token], cache) for token in ids[n_prefill:]]
        return np.concatenate(parts)

    def new_cache(
        self, mode: str | Sequence[str], dtype: str | tuple[str, str] | None, absorbed: bool = True
    ) -> list[Cache]:
        n = len(self.w.layers)
        modes = [mode] * n if isinstance(mode, str) else list(mode)
        types = (dtype, dtype) if dtype is None or isinstance(dtype, str) else dtype
        caches = []
        for layer, m in zip(self.w.layers, modes, strict=True):
            self.at = layer
            caches.append(Cache(m, types, CACHE_MODES[m].planes(self, types), absorbed))
        for i, cache in enumerate(caches):
            cache.told = CACHE_MODES[cache.mode].told and CACHE_MODES[cache.mode].told(self, i)
        return caches

    def append(self, ids: Sequence[int], caches: list[Cache], n_batch: int = 0) -> Array:
        """n_batch: a longer prompt of rows that age goes layer by layer, so many tokens at a time. Rows are kept in
        float16 for the chunks after their own, and for what they age to."""
        ids = np.asarray(ids, np.int64)
        positions = caches[0].length + np.arange(len(ids))
        x = self.norm(self.w.embed[ids] * self.w.embed_scale, self.w.embed_norm, self.w.embed_norm_b)
        if self.w.positions is not None:
            x = x + self.w.positions[positions]
        embedding = x
        for i, layer in enumerate(self.w.layers):
            normed = self.norm(x, layer.attn_norm, layer.attn_norm_b)
            heads = self._attention(i, normed, positions, caches, n_batch)
            attended = plus(self.norm(heads, layer.attn_sub_norm) @ layer.wo.T, layer.bo)
            attended = self.norm(attended, layer.attn_post_norm) * self.w.residual_scale
            state = x if self.w.parallel else x + attended
            of_ffn = self._ffn(layer, self.norm(state, layer.ffn_norm, layer.ffn_norm_b), state)
            x = x + attended + self.norm(of_ffn, layer.ffn_post_norm) * self.w.residual_scale
            x = (x + self._of_layer_embedding(layer, ids, embedding, x)) * layer.scale
        for cache in caches:
            cache.settle()
        states = self.norm(x, self.w.norm, self.w.norm_b) * self.w.logit_scale
        return capped(plus(states @ self.w.head.T, self.w.head_b), self.w.logit_cap)

    def _of_layer_embedding(self, layer: Layer, ids: NDArray[np.int64], embedding: Array, x: Array) -> Array:
        """What a layer makes of an embedding of its own; 0 without one."""
        if layer.embd is None:
            return np.zeros_like(x)
        own = self.norm(embedding @ layer.embd_proj.T / sqrt(self.d_model), layer.embd_proj_norm)
        own = (own + layer.embd[ids] * sqrt(layer.embd.shape[1])) / sqrt(2)
        gate = ACTIVATIONS[self.w.activation](x @ layer.embd_gate.T)
        return self.norm((gate * own) @ layer.embd_out.T, layer.embd_post_norm)

    def norm(self, x: Array, weight: Array | None, bias: Array | None = None) -> Array:
        if weight is None:
            return x
        return rms_norm(x, weight, self.w.eps) if bias is None else layer_norm(x, weight, bias, self.w.eps)

    def clamp(self, x: Array) -> Array:
        return np.clip(x, -self.w.clamp, self.w.clamp) if self.w.clamp else x

    def norm_heads(self, x: Array, weight: Array | None) -> Array:
        """x [n, width], each part by itself that is as long as the weight."""
        if weight is None:
            return x
        parts = in_parts(x, weight)
        if self.w.qk_layer_norm:
            return layer_norm(parts, weight, np.zeros(len(weight)), self.w.eps).reshape(x.shape)
        return rms_norm(parts, weight, self.w.eps).reshape(x.shape)

    def _ffn(self, layer: Layer, x: Array, state: Array) -> Array:
        """state: x before its norm."""
        kind, beside = self.w.activation, layer.beside
        if layer.experts is not None and beside is None:
            return layer.experts(partial(gated, kind), x)
        assert layer.up is not None and layer.down is not None
        up = plus(x @ layer.up.T, layer.up_b)
        hidden = ACTIVATIONS[kind](up) if layer.gate is None else gated(kind, plus(x @ layer.gate.T, layer.gate_b), up)
        out = plus(self.norm(hidden, layer.ffn_sub_norm) @ layer.down.T, layer.down_b)
        if beside is None:
            return out
        routed = self.norm(state, beside.router_norm) / sqrt(self.d_model)
        of_experts = layer.experts(partial(gated, kind), self.norm(state, beside.norm), routed)
        return self.norm(out, beside.dense_post_norm) + self.norm(of_experts, beside.post_norm)

    # ------------------------------------------------ attention
    def _attention(
        self, i: int, x: Array, positions: NDArray[np.int64], caches: list[Cache], n_batch: int = 0
    ) -> Array:
        """[n, d_model] -> [n, n_heads * dv]. Rows of the owner: the step's exact, earlier ones as stored."""
        owner = self.owners[i]
        cache, layer = caches[owner], self.w.layers[i]
        self.sinks, self.at, self.row_type = layer.sinks, self.w.layers[owner], cache.types and cache.types[0]
        mode = CACHE_MODES[cache.mode]
        chunk = n_batch if n_batch and (len(x) > n_batch or len(x) > BLOCK and cache.length) else 0
        if owner == i:
            cache.extend(
                mode.store(self, i, x, positions, cache), partial(mode.in_chunks, self, owner) if chunk else None
            )
        if layer.latent is not None:
            q = queries(self, layer, x, positions, i)
        else:
            q = self.norm_heads(self.clamp(plus(x @ layer.wq.T, layer.bq)), layer.q_norm)
            q = self.rotate(q, self.w.n_heads, positions, i)
        q = q * (1 + self.w.query_growth * np.log1p(positions // self.w.query_growth_length))[:, None, None]
        out = []
        for first in range(0, len(x), chunk or len(x)):
            some = slice(first, first + (chunk or len(x)))
            read = mode.attend(self, owner, q[some], cache.seen_by(positions[some]), positions[some], cache.absorbed)
            out.append(np.stack([read(head) for head in range(self.w.n_heads)], axis=1))
        out = np.concatenate(out)
        if not mode.v_bias_stored and (bias := self.w.layers[owner].bv) is not None:  # softmax weights sum to 1
            out = out + np.repeat(bias.reshape(self.n_kv_heads, -1), self.w.n_heads // self.n_kv_heads, axis=0)
        return out.reshape(len(x), -1)

    def rotate(self, x: Array, n_heads: int, positions: NDArray[np.int64], i: int) -> Array:
        """[n, heads * dim] -> [n, heads, dim], rotated where layer i has RoPE."""
        rope = self.w.layers[i].rope
        heads = x.reshape(len(x), n_heads, -1)
        return heads if rope is None else rope(heads, positions)

    def weights(self, scores: Array, positions: NDArray[np.int64], head: int, i: int) -> Array:
        """Causal softmax of one head's scores [n, T] in layer i."""
        window = self.w.layers[i].window
        seen = np.arange(scores.shape[1])[None, :] <= positions[:, None]
        if window:
            seen &= np.arange(scores.shape[1])[None, :] > positions[:, None] - window
        scores = capped(scores * (self.w.score_scale or 1 / sqrt(self.dk)), self.w.score_cap)
        if self.w.slopes is not None:
            scores = scores + self.w.slopes[head] * (np.arange(scores.shape[1])[None, :] - positions[:, None])
        scores = np.where(seen & ~np.isnan(scores), scores, -np.inf)  # NaN: forgotten
        return softmax(scores, -np.inf if self.sinks is None else self.sinks[head])


class Cache:
    """One layer's rows, as stored."""

    def __init__(self, mode: str, types: Types, planes: Planes, absorbed: bool) -> None:
        self.mode, self.types, self.planes, self.absorbed = mode, types, planes, absorbed
        self.rows: dict[str, Array] = {}
        self.seen: dict[str, Array] = {}  # by the step's queries: rows as stored, then its own in full
        self.kept: dict[str, Array] = {}  # the same, as later chunks of the step see them
        self.length = 0
        levels = CACHE_MODES[mode].levels
        self.levels = levels and levels(types)
        self.ends = [self.levels.sinks] * (self.levels.last + 1) if self.levels else []  # of the regions that have aged

    def stored(self, name: str, row: Array) -> Array:
        """A plane's rows as they will be read back."""
        return rounded(row, *self.planes[name])

    def extend(self, fresh: Rows, in_chunks: Callable[[Rows], Rows] | None = None) -> None:
        """What the step's queries see, of a chunk of it and of those after it, then what later steps will."""
        before, kept, stored = self.rows, fresh, fresh
        if in_chunks:
            before, kept, stored = in_chunks(self.rows) if self.rows else {}, in_chunks(fresh), as_half(fresh)
        self.seen, self.kept = (
            {name: np.concatenate([before[name], row]) if name in before else row for name, row in rows.items()}
            for rows in (fresh, kept)
        )
        self.append(stored)

    def seen_by(self, positions: NDArray[np.int64]) -> Rows:
        """By queries that are a chunk of the step."""
        first, end = positions[0], positions[-1] + 1
        return {name: np.concatenate([self.kept[name][:first], row[first:end]]) for name, row in self.seen.items()}

    def append(self, fresh: dict[str, Array]) -> None:
        """What is no plane was for the step alone."""
        for name in self.planes:
            row = self.stored(name, fresh[name])
            self.rows[name] = np.concatenate([self.rows[name], row]) if name in self.rows else row
        self.length += len(row)

    def settle(self) -> None:
        """What has aged is stored anew, the oldest first: from whatever it has been stored as before."""
        for c in range(len(self.ends) - 1, 0, -1):
            end = max(self.ends[c], self.levels.begin(c - 1, self.length))
            rows = slice(max(self.ends[c], self.levels.begin(c, self.length)), end)
            if rows.start < end:
                stored = aged(self, {name: row[rows] for name, row in self.rows.items()}, self.levels.level(c))
                for name, row in stored.items():
                    self.rows[name][rows] = row
            self.ends[c] = end

    def truncate(self, length: int) -> None:
        """Of a block of aged rows that is cut, the rest counts as just written: rows as they were read back."""
        self.rows = {name: rows[:length] for name, rows in self.rows.items()}
        self.length = length
        if not self.ends or length >= self.ends[1]:
            return
        sinks = self.levels.sinks
        whole = sinks + max(0, length - sinks) // BLOCK * BLOCK
        for name, row in self.rows.items():
            row[whole:] = self.stored(name, row[whole:])
        self.ends[1:] = [min(end, whole) for end in self.ends[1:]]
