# SPDX-License-Identifier: Apache-2.0
"""What each cache mode stores and how it reads it back, in float64 (docs/cache-math.md, sections 1, 3 and 4).

store(model, layer, x, positions, cache) -> planes [n, width] of the step's tokens, exact
attend(model, layer, q, planes, positions, absorbed) -> a function: head -> [n, dv]
planes(model, types) -> name -> (type, parts of a row with a scale of their own)
levels(types) of modes whose rows age: what they become; Cache.settle() stores anew what has aged
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reference_formats import SCALED, Array, rounded, rounded_by_channel

if TYPE_CHECKING:
    from reference import Cache, Reference

Positions = NDArray[np.int64]
Rows = dict[str, Array]
Types = tuple[str | None, str | None]
Planes = dict[str, tuple[str | None, int]]


def as_half(rows: Rows) -> Rows:
    return {name: rounded(row, "f16") for name, row in rows.items()}


@dataclass(frozen=True)
class Mode:
    store: Callable[[Reference, int, Array, Positions, Cache], Rows]
    attend: Callable[[Reference, int, Array, Rows, Positions, bool], Callable[[int], Array]]
    planes: Callable[[Reference, Types], Planes]
    v_bias_stored: bool = False  # else V's bias is added after the softmax
    levels: Callable[[Types], Levels] | None = None
    told: Callable[[Reference, int], Callable[[Array], Array]] | None = None  # what K tells of V, where levels ask it
    in_chunks: Callable[[Reference, int, Rows], Rows] = lambda m, i, rows: as_half(
        rows
    )  # a prompt's rows as chunks after theirs see them


def plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def times(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x * scale


def by_head(m: Reference, x: Array) -> Array:
    """[n, kv heads * dim] -> [n, kv heads, dim]."""
    return x.reshape(len(x), m.n_kv_heads, -1)


def in_parts(x: Array, weight: Array) -> Array:
    """x [n, width] -> [n, parts, as long as the weight]."""
    return x.reshape(len(x), -1, len(weight))


# ---------------------------------------------------------------- kv
def store_heads(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """k and v with their biases, k normed and rotated; v may be normed too."""
    layer = m.w.layers[i]
    raw, v = m.clamp(plus(x @ layer.wk.T, layer.bk)), m.clamp(plus(x @ layer.wv.T, layer.bv))
    k = m.rotate(m.norm_heads(raw, layer.k_norm), m.n_kv_heads, positions, i)
    return {"k": k.reshape(len(x), -1), "v": unit(m, i, v)}


def unit(m: Reference, i: int, v: Array) -> Array:
    layer = m.w.layers[i]
    return m.norm_heads(v, np.ones(len(layer.k_norm))) if layer.norms_v and layer.k_norm is not None else v


def store_kv(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """Where V is K before its norm's weight and RoPE, that alone."""
    rows = store_heads(m, i, x, positions, cache)
    return {"kv": rows["v"]} if m.w.layers[i].v_is_k else rows


def attend_rows(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    return attend_heads(m, i, q, by_head(m, rows["k"]), by_head(m, rows["v"]), positions)


def attend_kv(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    if (layer := m.w.layers[i]).v_is_k:
        rows = {"k": (in_parts(rows["kv"], layer.k_norm) * layer.k_norm).reshape(rows["kv"].shape), "v": rows["kv"]}
        rows["k"] = m.rotate(rows["k"], m.n_kv_heads, np.arange(len(rows["k"])), i)
    return attend_rows(m, i, q, rows, positions, absorbed)


def attend_heads(m: Reference, i: int, q: Array, k: Array, v: Array, positions: Positions):
    """k and v [T, kv heads, dim]."""
    group = m.w.n_heads // k.shape[1]
    return lambda head: m.weights(q[:, head] @ k[:, head // group].T, positions, head, i) @ v[:, head // group]


# ---------------------------------------------------------------- rows that age: kivi, lowrank
RECENT, BLOCK = 128, 32  # tokens


@dataclass(frozen=True)
class Level:
    """Rows of some age: types of K and V, the part of V's columns that is kept, the share of rows that have aged."""

    k: str | None
    v: str | None
    part: float = 1.0
    share: float = 0.0
    rows: int = 0


@dataclass(frozen=True)
class Levels:
    """Oldest first. Class 0 is of rows as they were written, the last class is the oldest level."""

    of: tuple[Level, ...]
    sinks: int
    recent: int
    predicts: bool = False

    @property
    def last(self) -> int:
        return len(self.of)

    def level(self, c: int) -> Level:
        return self.of[self.last - c]

    def begin(self, c: int, length: int) -> int:
        """Where the region of class c begins: of the whole blocks that are no longer recent the newest shares."""
        if c == self.last:
            return min(self.sinks, length)
        aged = max(0, length - self.sinks - self.recent) // BLOCK
        kept = sum(self.level(i + 1).share for i in range(c))
        blocks = sum(self.level(i + 1).rows for i in range(c)) // BLOCK
        return min(self.sinks, length) + max(0, floor(aged * (1 - kept) + 1e-9) - blocks) * BLOCK


def levels_of(types: Types, sinks: int, recent: int) -> Levels:
    """From such as ("q2/q4@0.5+q4*0.1+sinks=4", ...), or one level of both types; sinks, recent: where it is silent."""
    if types[0] is None or types[0] != types[1]:
        return Levels((Level(*types),), sinks, recent)
    of, predicts = [], False
    for part in types[0].split("+"):
        if part.startswith("sinks="):
            sinks = int(part[6:])
        elif part.startswith("recent="):
            recent = int(part[7:])
        elif part == "predict":
            predicts = True
        elif part == "none":
            of.append(Level(None, None, 0.0))
        else:
            k, v, kept, share = re.fullmatch(r"([^/@*]+)(?:/([^@*]+))?(?:@([^*]+))?(?:\*(.+))?", part).groups()
            rows = int(share) if share and float(share) > 1 else 0
            of.append(Level(k, v or k, float(kept or 1), 0.0 if rows else float(share or 0.1 * bool(of)), rows))
    return Levels(tuple(of), sinks, recent, predicts)


def as_written(type_name: str | None) -> str | None:
    """Types with few bits are for rows that have aged."""
    return type_name if type_name in (None, "f32", "bf16") else "f16"


def aged(cache: Cache, rows: Rows, level: Level) -> Rows:
    """Rows of whole blocks in a level: K with scales for each channel of a block, of V each head's first columns."""
    if level.part == 0:
        return {"k": np.nan * rows["k"], "v": 0 * rows["v"]}
    k = rounded_by_channel(rows["k"], level.k, BLOCK) if level.k in SCALED else rounded(rows["k"], level.k)
    heads = cache.planes["v"][1]
    told = cache.told(k) if cache.levels and cache.levels.predicts else 0 * rows["v"]
    v = (rows["v"] - told).reshape(len(k), heads, -1)
    kept = max(1, floor(level.part * v.shape[2] + 0.5))
    first = rounded(v[..., :kept].reshape(len(k), -1), level.v, heads).reshape(len(k), heads, -1)
    return {"k": k, "v": told + np.concatenate([first, 0 * v[..., kept:]], axis=2).reshape(len(k), -1)}


def planes_aging(v_heads: Callable[[Reference], int], levels: Callable[[Types], Levels]):
    """As rows are written: in the types of the newest level, or 16 bits."""

    def planes(m: Reference, types: Types) -> Planes:
        newest = levels(types).of[-1]
        return {"k": (as_written(newest.k), m.n_kv_heads), "v": (as_written(newest.v), v_heads(m))}

    return planes


def kivi_levels(types: Types) -> Levels:
    return levels_of(types, 0, RECENT)


def lowrank_levels(types: Types) -> Levels:
    return levels_of(types, 4, 0)


def latent_groups(m: Reference) -> int:
    """Heads of V's latent."""
    return m.n_kv_heads * m.dv // m.folded(0, "attn_v_latent.weight").shape[0]


def per_group(x: Array, weight: Array) -> Array:
    """x [n, groups * width] times each group's own part [width, out] of a weight [width, groups * out]."""
    groups = x.shape[1] // len(weight)
    x, parts = x.reshape(len(x), groups, -1), weight.reshape(len(weight), groups, -1)
    return np.einsum("ngi,igo->ngo", x, parts).reshape(len(x), -1)


def store_lowrank(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """k before RoPE, biased and normed; the latent of v without its bias."""
    layer = m.w.layers[i]
    k = m.norm_heads(plus(x @ layer.wk.T, layer.bk), layer.k_norm)
    return {"k": k, "v": per_group(x @ layer.wv.T, m.folded(i, "attn_v_latent.weight"))}


def chunks_lowrank(m: Reference, i: int, rows: Rows) -> Rows:
    """Of the latent the values are kept."""
    latent, expand = (m.folded(i, f"attn_v_{name}.weight") for name in ("latent", "expand"))
    return {"k": rounded(rows["k"], "f16"), "v": per_group(rounded(per_group(rows["v"], expand), "f16"), latent)}


def told_lowrank(m: Reference, i: int) -> Callable[[Array], Array]:
    """What keys as they are stored tell of the latent."""
    predict, latent = (m.folded(i, f"attn_v_{name}.weight") for name in ("predict", "latent"))
    return lambda k: per_group(per_group(k, predict), latent)


def attend_lowrank(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    """Of the latent of a head's group: summed and made into v once, or v of each row."""
    k = m.rotate(rows["k"], m.n_kv_heads, np.arange(len(rows["k"])), i)
    expand = by_head(m, m.folded(i, "attn_v_expand.weight"))  # [columns of a latent, kv heads, dv]
    latents = rows["v"].reshape(len(k), latent_groups(m), -1)
    group, shared = m.w.n_heads // m.n_kv_heads, m.n_kv_heads // latent_groups(m)

    def read(head: int) -> Array:
        p = m.weights(q[:, head] @ k[:, head // group].T, positions, head, i)
        latent, w = latents[:, head // group // shared], expand[:, head // group]
        return (p @ latent) @ w if absorbed else p @ (latent @ w)

    return read


# ---------------------------------------------------------------- k
def store_k(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """k before its bias, its norm and RoPE; beside it 1 / rms of k, or of each head, where it is normed. The step's own
    values are exact where all rows are made anew (nothing is stored, or many queries), which W_KV in f32 is, too."""
    rows = keys(m, i, x)
    exact = m.narrow and (cache.length == 0 or len(x) > m.dk)
    return rows | {"own v": x @ m.w.layers[i].wv.T if exact else rows["k"] @ m.held(m.w_kv(i))}


def keys(m: Reference, i: int, x: Array) -> Rows:
    layer = m.w.layers[i]
    k = x @ layer.wk.T
    return {"k": k} if layer.k_norm is None else {"k": k, "n": inverse_rms(m, k, layer.k_norm)}


def inverse_rms(m: Reference, k: Array, weight: Array) -> Array:
    return 1 / np.sqrt(np.mean(in_parts(k, weight) ** 2, axis=-1) + m.w.eps)


def read_keys(m: Reference, i: int, k: Array, rows: Rows) -> Array:
    """k of all rows as scores read it, [T, kv heads, dim]. Its bias, without RoPE or a cap, shifts all scores of a
    query alike: left out."""
    layer = m.w.layers[i]
    if layer.k_norm is not None:
        k = (in_parts(k, layer.k_norm) * rows["n"][..., None] * layer.k_norm).reshape(k.shape)
    bias = layer.bk if layer.rope or m.w.score_cap else None
    return m.rotate(plus(k, bias), m.n_kv_heads, np.arange(len(k)), i)


def attend_k(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    stored = rows["k"][: len(rows["k"]) - len(rows["own v"])] @ m.held(m.w_kv(i))
    values = np.concatenate([stored, rows["own v"]])
    return attend_heads(m, i, q, read_keys(m, i, rows["k"], rows), by_head(m, values), positions)


# ---------------------------------------------------------------- k+r
def store_kr(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """k / s, and the residual of V that k, as it will be read back, does not predict. The step's own values are exact
    where all rows are made anew (nothing is stored, or many queries), else they are read as later ones will."""
    layer = m.w.layers[i]
    k = x @ layer.wk.T
    scale = m.folded(i, "attn_kr_row.scale")
    rows = {"k": k if scale is None else k / scale}
    known = {"k": cache.stored("k", rows["k"])}
    if (w_x := m.folded(i, "attn_kr_x.weight")) is not None:
        rows["r"] = x @ w_x + known["k"] @ m.folded(i, "attn_kr_k.weight")
        known["r"] = cache.stored("r", rows["r"])
    if layer.k_norm is not None:
        rows["n"] = inverse_rms(m, k, layer.k_norm)
    exact = cache.length == 0 or len(x) > m.dk
    return rows | {"own v": x @ layer.wv.T if exact else read_values(m, i, known)}


def read_values(m: Reference, i: int, rows: Rows) -> Array:
    v = times(rows["k"] @ m.folded(i, "attn_kr_v.weight"), m.folded(i, "attn_kr_v.scale"))
    return v + rows["r"] @ m.folded(i, "attn_kr_out.weight") if "r" in rows else v


def attend_kr(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    k = read_keys(m, i, times(rows["k"], m.folded(i, "attn_kr_row.scale")), rows)
    n_stored = len(k) - len(rows["own v"])
    stored = read_values(m, i, {name: rows[name][:n_stored] for name in ("k", "r") if name in rows})
    return attend_heads(m, i, q, k, by_head(m, np.concatenate([stored, rows["own v"]])), positions)


# ---------------------------------------------------------------- v
def store_v(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """v before its bias."""
    return {"v": x @ m.w.layers[i].wv.T}


def attend_v(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    assert m.w.layers[i].rope is None, "scores come from V: nothing to rotate"
    row, group = rows["v"], m.w.n_heads // m.n_kv_heads
    w_vk, v = by_head(m, m.w_vk(i)), by_head(m, row)

    def read(head: int) -> Array:
        w = w_vk[:, head // group]
        scores = (q[:, head] @ w.T) @ row.T if absorbed else q[:, head] @ (row @ w).T
        return m.weights(scores, positions, head, i) @ v[:, head // group]

    return read


# ---------------------------------------------------------------- x
def store_x(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """The normed input of the layer."""
    return {"x": x}


def attend_x(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    assert m.w.layers[i].rope is None, "an absorbed W_K cannot be rotated"
    row, layer, group = rows["x"], m.w.layers[i], m.w.n_heads // m.n_kv_heads
    w_k = layer.wk.reshape(m.n_kv_heads, m.dk, -1)
    w_v = layer.wv.reshape(m.n_kv_heads, m.dv, -1)

    def read(head: int) -> Array:
        wk, wv = w_k[head // group], w_v[head // group]
        scores = (q[:, head] @ wk) @ row.T if absorbed else q[:, head] @ (row @ wk.T).T
        p = m.weights(scores, positions, head, i)
        return (p @ row) @ wv.T if absorbed else p @ (row @ wv.T)

    return read


# ---------------------------------------------------------------- xr
def store_xr(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    """The normed input in the basis of the rotated columns of W_K and what they do not span, by channel scales."""
    return {"x": x @ m.folded(i, "attn_xr_in.weight")}


def attend_xr(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    """Rotated columns are read from the row, the others and V through it."""
    row, layer = rows["x"], m.w.layers[i]
    n_rot = 2 * len(m.w.layers[i].rope.inv_freq)
    k = by_head(m, row @ m.folded(i, "attn_xr_k.weight"))
    rotated = times(row, m.folded(i, "attn_xr_row.scale"))[:, : m.n_kv_heads * n_rot]
    k[:, :, :n_rot] = by_head(m, rotated)
    if layer.bk is not None:
        k = k + layer.bk.reshape(m.n_kv_heads, -1)
    k = m.w.layers[i].rope(k, np.arange(len(row)))
    return attend_heads(m, i, q, k, by_head(m, row @ m.folded(i, "attn_xr_v.weight")), positions)


# ---------------------------------------------------------------- all of them
def planes_kv(m: Reference, types: Types) -> Planes:
    if m.at.v_is_k:
        return {"kv": (types[0], m.n_kv_heads)}
    return {"k": (types[0], m.n_kv_heads), "v": (types[1], m.n_kv_heads)}


def planes_k(m: Reference, types: Types) -> Planes:
    return {"k": (types[0], m.n_kv_heads)} | planes_n(m, types)


def planes_n(m: Reference, types: Types) -> Planes:
    return {"n": (None if types[0] is None else "f32", norms(m))} if norms(m) else {}


def norms(m: Reference, kept: int = 0) -> int:
    """Numbers that stand beside a row of k for its norm: one of the row, or one of each head but those that keep V."""
    layer = m.w.layers[0]
    whole = layer.k_norm is not None and len(layer.k_norm) == len(layer.wk)
    return 0 if layer.k_norm is None else 1 if whole else len(layer.wk) // len(layer.k_norm) - kept


def planes_kr(m: Reference, types: Types) -> Planes:
    """Static scales even out the channels: one scale a row. q4 has groups of 32 in each head."""
    residual = {"r": (types[1], 1)} if m.folded(0, "attn_kr_x.weight") is not None else {}
    return {"k": (types[0], m.n_kv_heads if types[0] in ("q4", "q3", "q2") else 1)} | residual | planes_n(m, types)


def planes_x(m: Reference, types: Types) -> Planes:
    return {"x": (types[0], m.w.n_heads if m.d_model % m.w.n_heads == 0 else 1)}


CACHE_MODES: dict[str, Mode] = {
    "kv": Mode(store_kv, attend_kv, planes_kv, v_bias_stored=True),
    "k": Mode(store_k, attend_k, planes_k),
    "k+r": Mode(store_kr, attend_kr, planes_kr),
    "v": Mode(store_v, attend_v, lambda m, types: {"v": (types[1], m.n_kv_heads)}),
    "x": Mode(store_x, attend_x, planes_x),
    "xr": Mode(store_xr, attend_xr, lambda m, types: {"x": (types[0], 1)}),
    "kivi": Mode(
        store_heads,
        attend_rows,
        planes_aging(lambda m: m.n_kv_heads, kivi_levels),
        v_bias_stored=True,
        levels=kivi_levels,
    ),
    "lowrank": Mode(
        store_lowrank,
        attend_lowrank,
        planes_aging(latent_groups, lowrank_levels),
        levels=lowrank_levels,
        told=told_lowrank,
        in_chunks=chunks_lowrank,
    ),
}
