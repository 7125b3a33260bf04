# SPDX-License-Identifier: Apache-2.0
"""Folds of modes k+r, xr and lowrank for tests, in a few lines of NumPy from docs/cache-math.md; nothing of slimrt.

They need not be the best ones: whatever the tensors are, the engine must compute with them what the reference does.
"""

from __future__ import annotations

import numpy as np

from reference import Reference
from reference_formats import SCALED, rounded
from reference_modes import planes_kr, plus

Tensors = dict[str, np.ndarray]


def inputs(model: Reference, seed: int) -> np.ndarray:
    """Correlated inputs of a layer, [n, d]."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(model.d_model, model.d_model)) * np.geomspace(2, 0.05, model.d_model)
    return random.normal(size=(6 * model.d_model, model.d_model)) @ mixing / np.sqrt(model.d_model)


def fold_kr(
    model: Reference,
    i: int,
    dtype: str | None,
    rank: int,
    *,
    half: bool = False,
    of: np.ndarray | None = None,
    columns: int | None = None,
) -> Tensors:
    """Tensors of mode k+r for one layer, [out, in] as in the file. dtype None: for rows that are not rounded, without
    the noise N: then W is W_K^-1 W_V where K is as wide as the input. half: W' as float16 with scales. of: what makes
    rows (W_K), of which the first `columns` are K's and V's that is computed (all)."""
    layer, x = model.w.layers[i], inputs(model, i)
    w_v = layer.wv[:columns]
    k, v = x @ (layer.wk if of is None else of).T, x @ w_v.T
    tensors: Tensors = {}
    if dtype in SCALED:
        tensors["attn_kr_row.scale"] = np.abs(k).max(axis=0).astype(np.float32)[:columns]
        k[:, :columns] /= tensors["attn_kr_row.scale"]
    known = rounded(k, *planes_kr(model, (dtype, None))["k"])
    noise = np.diag(np.mean((known - k) ** 2, axis=0))
    w = np.linalg.lstsq(np.concatenate([k / np.sqrt(len(k)), np.sqrt(noise)]),
                        np.concatenate([v / np.sqrt(len(k)), 0 * noise[:, : v.shape[1]]]), rcond=None)[0]  # fmt: skip
    tensors["attn_kr_v.weight"] = w.T.astype(np.float32)
    if half:
        scale = np.abs(w).max(axis=0)
        tensors["attn_kr_v.scale"] = scale.astype(np.float32)
        tensors["attn_kr_v.weight"] = (w / scale).T.astype(np.float16)
        w = tensors["attn_kr_v.weight"].astype(np.float64).T * tensors["attn_kr_v.scale"]
    if rank:
        left = v - known @ w
        basis = np.linalg.eigh(left.T @ left)[1][:, ::-1][:, :rank]
        sigma = np.maximum(np.abs(left @ basis).max(axis=0), 1e-3 * np.abs(v).max())
        tensors["attn_kr_x.weight"] = (w_v.T @ basis / sigma).T.astype(np.float32)
        tensors["attn_kr_k.weight"] = -(w @ basis / sigma).T.astype(np.float32)
        tensors["attn_kr_out.weight"] = (basis * sigma).astype(np.float32)
    return {f"blk.{i}.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def fold_xr(model: Reference, i: int, dtype: str | None) -> Tensors:
    """Tensors of mode xr for one layer."""
    layer, x = model.w.layers[i], inputs(model, i)
    n_rot = 2 * len(layer.rope.inv_freq)
    rotated = layer.wk.reshape(model.w.n_kv_heads, model.dk, -1)[:, :n_rot].reshape(-1, model.d_model).T
    rest = np.linalg.qr(rotated, mode="complete")[0][:, rotated.shape[1] :]
    basis = np.concatenate([rotated, rest], axis=1)
    tensors: Tensors = {}
    if dtype in SCALED:
        tensors["attn_xr_row.scale"] = np.abs(x @ basis).max(axis=0).astype(np.float32)
        basis = basis / tensors["attn_xr_row.scale"]
    tensors["attn_xr_in.weight"] = basis.T
    inverse = np.linalg.inv(basis.astype(np.float32).astype(np.float64))
    tensors["attn_xr_k.weight"], tensors["attn_xr_v.weight"] = (inverse @ layer.wk.T).T, (inverse @ layer.wv.T).T
    return {f"blk.{i}.{name}": np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def fold_lowrank(model: Reference, i: int, heads: int) -> Tensors:
    """Tensors of mode lowrank for one layer: TALE's factors of V, of so many KV heads together, for these inputs; and
    what K tells of V."""
    layer, x = model.w.layers[i], inputs(model, i)
    v = (x @ layer.wv.T).reshape(-1, model.w.n_kv_heads // heads, heads * model.dv)
    k = model.norm_heads(plus(x @ layer.wk.T, layer.bk), layer.k_norm).reshape(v.shape)
    latent, expand, predict = [], [], []
    for group in range(v.shape[1]):
        _, s, vt = np.linalg.svd(v[:, group] / np.sqrt(len(v)), full_matrices=False)
        gram = k[:, group].T @ k[:, group]
        noise = 0.1 * np.diag(np.diag(gram))  # what is less amplifies the rounding of float32
        predict.append(np.linalg.solve(gram + noise, k[:, group].T @ v[:, group]).T)
        latent.append(vt / np.sqrt(s)[:, None])
        expand.append((np.sqrt(s)[:, None] * vt).T)
    tensors = {"attn_v_latent.weight": np.concatenate(latent), "attn_v_expand.weight": np.concatenate(expand),
               "attn_v_predict.weight": np.concatenate(predict)}  # fmt: skip
    return {f"blk.{i}.{name}": np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def as_converted(tensors: Tensors, dtype: str, residual: str) -> Tensors:
    """The tensors of k+r and xr in the types that conversions usually choose, W' of k+r with its scales."""
    plain = ("f32", "f16", "bf16")
    coarse = dtype not in plain
    known = coarse and residual not in plain
    halved = {
        "attn_kr_k": known,
        "attn_kr_out": known,
        "attn_kr_x": known and residual in ("q4", "q3", "q2"),
        "attn_xr_in": dtype != "f32",
        "attn_xr_k": dtype != "f32",
        "attn_xr_v": dtype != "f32",
    }
    made: Tensors = {}
    for name, tensor in tensors.items():
        layer, part = name.removesuffix(".weight").rsplit(".", 1)
        if part == "attn_kr_v" and coarse:
            scale = np.abs(tensor).max(axis=1)
            made |= {f"{layer}.attn_kr_v.scale": scale, name: (tensor / scale[:, None]).astype(np.float16)}
        else:
            made[name] = tensor.astype(np.float16) if halved.get(part) else tensor
    return made


def usual_heads(n_kv_heads: int) -> int:
    """The most KV heads, up to four, that make whole groups."""
    return next(heads for heads in (4, 3, 2, 1) if n_kv_heads % heads == 0)


def fold_all(model: Reference, modes: list[str], dtype: str | None, rank: int = 8, *, half: bool = False) -> Tensors:
    """For the layers in modes k+r, xr and lowrank."""
    made: Tensors = {}
    for i, mode in enumerate(modes):
        made |= fold_kr(model, i, dtype, rank, half=half) if mode == "k+r" else {}
        made |= fold_xr(model, i, dtype) if mode == "xr" else {}
        made |= fold_lowrank(model, i, usual_heads(model.w.n_kv_heads)) if mode == "lowrank" else {}
    return made
