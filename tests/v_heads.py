# SPDX-License-Identifier: Apache-2.0
"""Modes k and k+r some of whose heads, the last ones, keep V beside K: files that say so, folds, and the reference.

A row is [k of the other heads | v of those]; V of the others comes from it as it comes from k elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFValueType

from folds import Tensors, fold_kr
from reference import Cache, Reference
from reference_modes import (
    Array,
    Mode,
    Planes,
    Positions,
    Rows,
    Types,
    attend_heads,
    by_head,
    keys,
    planes_kr,
    planes_n,
    plus,
    read_keys,
    read_values,
    times,
)
from slimrt.modelfile.gguf import Tensor, array, read_gguf, write_gguf


def v_heads(m: Reference) -> int:
    """Half of the KV heads."""
    return m.w.n_kv_heads // 2


def slim(m: Reference) -> int:
    """Columns of the others."""
    return (m.w.n_kv_heads - v_heads(m)) * m.dk


def mixed(m: Reference) -> Reference:
    """A model whose layers project what a row is where others project k."""
    first = slim(m)
    layers = [replace(one, wk=np.concatenate([one.wk[:first], one.wv[first:]])) for one in m.w.layers]
    return Reference(replace(m.w, layers=layers))


def write(path: Path, out: Path, mode: str, tensors: Tensors | None = None) -> Path:
    """The model in a file that says how many KV heads of each layer keep V in this mode, perhaps with folds."""
    model = read_gguf(str(path))
    n = model.size("block_count")
    heads = [v_heads(Reference(path))] * n
    fields = {
        "slimrt.cache.modes": array([mode] * n, GGUFValueType.STRING),
        "slimrt.cache.v_heads": array(heads, GGUFValueType.UINT32),
    }
    folded = (Tensor.of(name, values) for name, values in (tensors or {}).items())
    write_gguf(out, model.with_metadata(fields).with_tensors(*folded), show_progress=False)
    return out


def folds(path: Path, mode: str, dtype: str | None, rank: int) -> Tensors:
    """Tensors of all layers."""
    model, made = Reference(path), Tensors()
    rows = mixed(model)
    for i, layer in enumerate(rows.w.layers):
        if mode == "k+r":
            made |= fold_kr(model, i, dtype, rank, of=layer.wk, columns=slim(model))
            continue
        w = np.linalg.lstsq(layer.wk.T, layer.wv[: slim(model)].T, rcond=None)[0]
        made[f"blk.{i}.attn_kv.weight"] = np.ascontiguousarray(w.T, np.float32)
    return made


def _kept(m: Reference, i: int, x: Array, positions: Positions) -> Rows:
    """Planes of the heads that keep V: V without its bias, K as queries meet it, its bias where that matters."""
    layer, first = m.w.layers[i], slim(m)
    k = m.norm_heads(plus(x @ layer.wk.T, layer.bk if m.w.layers[i].rope else None), layer.k_norm)
    k = m.rotate(k, m.w.n_kv_heads, positions, i).reshape(len(x), -1)
    return {"v": (x @ layer.wv.T)[:, first:], "k_v": k[:, first:]}


def _attend(m: Reference, i: int, q: Array, rows: Rows, scaled: Array, values: Array, positions: Positions):
    """scaled: k of slim heads; values: their V."""
    group, n = m.w.n_heads // m.w.n_kv_heads, m.w.n_kv_heads - v_heads(m)
    padded = np.pad(scaled, ((0, 0), (0, m.w.n_kv_heads * m.dk - scaled.shape[1])))
    k = np.concatenate([read_keys(m, i, padded, rows)[:, :n], rows["k_v"].reshape(len(padded), -1, m.dk)], axis=1)
    v = np.concatenate([values, rows["v"]], axis=1)
    assert group * n < m.w.n_heads
    return attend_heads(m, i, q, k, by_head(m, v), positions)


def store_k_v(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    kept, first = _kept(m, i, x, positions), slim(m)
    rows = keys(m, i, x)
    rows["k"] = rows["k"][:, :first]
    exact = m.narrow and (cache.length == 0 or len(x) > m.dk)
    row = np.concatenate([rows["k"], kept["v"]], axis=1)
    own = (x @ m.w.layers[i].wv.T)[:, :first] if exact else row @ m.held(m.folded(i, "attn_kv.weight"))
    return rows | kept | {"own v": own}


def attend_k_v(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    n = len(rows["k"]) - len(rows["own v"])
    stored = np.concatenate([rows["k"], rows["v"]], axis=1)[:n] @ m.held(m.folded(i, "attn_kv.weight"))
    values = np.concatenate([stored, rows["own v"]])
    return _attend(m, i, q, rows, rows["k"], values, positions)


def store_kr_v(m: Reference, i: int, x: Array, positions: Positions, cache: Cache) -> Rows:
    layer, first, kept = m.w.layers[i], slim(m), _kept(m, i, x, positions)
    rows = keys(m, i, x) | kept
    rows["k"] = rows["k"][:, :first]
    if (scale := m.folded(i, "attn_kr_row.scale")) is not None:
        rows["k"] = rows["k"] / scale
    row = np.concatenate([cache.stored("k", rows["k"]), cache.stored("v", rows["v"])], axis=1)
    known = {"k": row}
    if (w_x := m.folded(i, "attn_kr_x.weight")) is not None:
        rows["r"] = x @ w_x + row @ m.folded(i, "attn_kr_k.weight")
        known["r"] = cache.stored("r", rows["r"])
    exact = cache.length == 0 or len(x) > m.dk
    return rows | {"own v": (x @ layer.wv.T)[:, :first] if exact else read_values(m, i, known)}


def attend_kr_v(m: Reference, i: int, q: Array, rows: Rows, positions: Positions, absorbed: bool):
    n = len(rows["k"]) - len(rows["own v"])
    known = {"k": np.concatenate([rows["k"], rows["v"]], axis=1)[:n]}
    if "r" in rows:
        known["r"] = rows["r"][:n]
    values = np.concatenate([read_values(m, i, known), rows["own v"]])
    return _attend(m, i, q, rows, times(rows["k"], m.folded(i, "attn_kr_row.scale")), values, positions)


def _planes(m: Reference, types: Types, k_heads: int) -> Planes:
    return {"k": (types[0], k_heads), "v": (types[0], v_heads(m)), "k_v": (types[0], v_heads(m))}


def planes_k_v(m: Reference, types: Types) -> Planes:
    return _planes(m, types, m.w.n_kv_heads - v_heads(m)) | planes_n(m, types)


def planes_kr_v(m: Reference, types: Types) -> Planes:
    found = planes_kr(m, types)
    few = types[0] in ("q4", "q3", "q2")
    return found | _planes(m, types, m.w.n_kv_heads - v_heads(m) if few else 1)


MODES = {"k": Mode(store_k_v, attend_k_v, planes_k_v), "k+r": Mode(store_kr_v, attend_kr_v, planes_kr_v)}
