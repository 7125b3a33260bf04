# SPDX-License-Identifier: Apache-2.0
"""Slim attention offline: V from K, or K from V, in float64 (Graef and Wasielewski, "Slim attention", section 2).

Row vectors, as in the paper: x [d], W_K [d, e_k], W_V [d, e_v]; K = x W_K and V = x W_V without their biases.
GGUF stores each transposed, [out, in], with the columns of K in the file's own order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slimrt import progress as bars
from slimrt.errors import CacheUnsupportedError, ModelFormatError, UnsupportedError

from .families import FAMILIES
from .gguf_file import ModelData, Tensor, read_gguf

MODES = ("kv", "k", "v", "x")
FOLDED = {"k": "attn_kv.weight", "v": "attn_vk.weight"}  # mode -> the tensor it needs in each layer
_WITHOUT_ROPE = frozenset(family.arch for family in FAMILIES.values() if not family.rope)


@dataclass(frozen=True)
class Attention:
    """The shape of a model's attention layers, and which cache modes are exact for it."""

    d: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: bool

    @classmethod
    def of(cls, model: ModelData) -> Attention:
        """Read from metadata. UnsupportedError for an architecture that slimrt does not run."""
        known = sorted({family.arch for family in FAMILIES.values()})
        if model.arch not in known:
            raise UnsupportedError(f"architecture '{model.arch}' is not supported; supported are: {', '.join(known)}")
        d, n_heads = model.size("embedding_length"), model.size("attention.head_count")
        return cls(
            d=d,
            n_layers=model.size("block_count"),
            n_heads=n_heads,
            n_kv_heads=model.size("attention.head_count_kv", n_heads),
            head_dim=model.size("attention.key_length", d // n_heads),
            rope=model.arch not in _WITHOUT_ROPE,
        )

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    def refusal(self, mode: str) -> str:
        """Why a mode is not exact here, as the runtime says it; empty when it is (cache-math.md, section 1)."""
        if mode in ("v", "x") and self.rope:
            return "the model has rotary positions, which turn K after the projection"
        if mode == "v" and self.n_heads != self.n_kv_heads:
            return f"{self.n_kv_heads} KV heads serve {self.n_heads} query heads; V-only needs multi-head attention"
        if mode in FOLDED and self.kv_width < self.d:
            one, other = ("K", "V") if mode == "k" else ("V", "K")
            return (
                f"{one} is {self.kv_width} wide ({self.n_kv_heads} KV heads, {self.n_heads} query heads) and the "
                f"layer's input {self.d}, so {other} cannot be computed from it"
            )
        return ""

    def refuse(self, mode: str, layer: int, reason: str) -> CacheUnsupportedError:
        """The error that names the layer, the reason and the modes that would work."""
        legal = [other for other in MODES if other != mode and not self.refusal(other)]
        return CacheUnsupportedError(
            f"cache mode '{mode}' is not possible in layer {layer}: {reason}. Modes that work here: {', '.join(legal)}"
        )

    def require(self, mode: str) -> None:
        """Raise CacheUnsupportedError unless the mode is exact for this attention; ValueError for no mode at all."""
        if mode not in MODES:
            raise ValueError(f"unknown cache mode {mode!r}; the modes are: {', '.join(MODES)}")
        if reason := self.refusal(mode):
            raise self.refuse(mode, 0, reason)


def projections(model: ModelData, attention: Attention, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return W_K [d, e_k] and W_V [d, e_v] of a layer, float64, as they will run (after any quantisation).

    Raises:
        ModelFormatError: a tensor is missing, of a wrong shape, or holds NaN or infinity.
    """
    prefix, kv = f"blk.{layer}.", attention.kv_width
    if f"{prefix}attn_qkv.weight" in model.tensors:
        qkv = _matrix(model, f"{prefix}attn_qkv.weight", (attention.q_width + 2 * kv, attention.d))
        return qkv[-2 * kv : -kv].T, qkv[-kv:].T
    shape = (kv, attention.d)
    return _matrix(model, f"{prefix}attn_k.weight", shape).T, _matrix(model, f"{prefix}attn_v.weight", shape).T


def _matrix(model: ModelData, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = model.tensor(name)
    if tensor.shape != shape:
        raise ModelFormatError(f"tensor '{name}' is {list(tensor.shape)}, expected {list(shape)}")
    values = tensor.values().astype(np.float64)
    if not np.isfinite(values).all():
        raise ModelFormatError(f"tensor '{name}' holds values that are not finite; the model is damaged")
    return values


@dataclass(frozen=True)
class Fold:
    """What computes one projection from the other.

    Attributes:
        layer: which.
        weight: W [e_in, e_out] with W_in W = W_out, float64.
        cond: largest over smallest singular value of W_in.
        w_in, w_out: the projections, [d, e_in] and [d, e_out], float64.
    """

    layer: int
    weight: np.ndarray
    cond: float
    w_in: np.ndarray
    w_out: np.ndarray


def fold_matrix(w_in: np.ndarray, w_out: np.ndarray) -> tuple[np.ndarray, float]:
    """Return W with w_in @ W = w_out, and the condition number of w_in.

    The inverse for a square w_in, W_in^T (W_in W_in^T)^-1 W_out for a wide one; that through W_in^T = Q R, since the
    product would square the condition. One elimination gives the inverse too, whose norm is the condition's other
    half; a singular value decomposition says no more and takes many times as long.

    Args:
        w_in: [d, e], e >= d.  w_out: [d, e_out].

    Returns:
        W [e, e_out] float64, and the condition: infinite when w_in has not rank d, and W is then of no use.
    """
    d, e = w_in.shape
    q, square = None, w_in
    if e > d:
        q, r = np.linalg.qr(w_in.T)
        square = r.T
    try:
        solved = np.linalg.solve(square, np.concatenate([w_out, np.eye(d)], axis=1))
    except np.linalg.LinAlgError:
        return np.zeros((e, w_out.shape[1])), float("inf")
    weight, inverse = np.split(solved, [w_out.shape[1]], axis=1)
    cond = _spectral_norm(square) * _spectral_norm(inverse)
    if not cond * e * np.finfo(np.float64).eps < 1:
        return np.zeros((e, w_out.shape[1])), float("inf")
    return weight if q is None else q @ weight, cond


def _spectral_norm(matrix: np.ndarray) -> float:
    """The largest singular value, by subspace iteration."""
    basis = np.random.default_rng(0).normal(size=(matrix.shape[1], 8))
    for _ in range(16):
        basis, _ = np.linalg.qr(matrix.T @ (matrix @ basis))
    return float(np.linalg.norm(matrix @ basis, 2))


def fold_layer(model: ModelData, attention: Attention, mode: str, layer: int) -> Fold:
    """Fold one layer for mode "k" (V from K) or "v" (K from V).

    Raises:
        CacheUnsupportedError: the projection to fold is singular.
        ModelFormatError: a tensor is missing or not finite.
    """
    w_k, w_v = projections(model, attention, layer)
    w_in, w_out = (w_k, w_v) if mode == "k" else (w_v, w_k)
    weight, cond = fold_matrix(w_in, w_out)
    if not np.isfinite(cond):
        raise attention.refuse(mode, layer, f"W_{mode.upper()} is singular, so {mode.upper()} has lost a part of x")
    return Fold(layer, weight, cond, w_in, w_out)


def fold_layers(path: str | os.PathLike[str], mode: str, *, progress: bool = True) -> dict[str, np.ndarray]:
    """Return what cache mode "k" or "v" needs beyond a plain GGUF's own tensors, to load it without converting.

    Args:
        path: a GGUF file.
        mode: "k" or "v".
        progress: show a bar on stderr, when that is a terminal.

    Returns:
        "blk.N.attn_kv.weight" float32 [e_v, e_k] with V = K @ it.T for mode "k"; "blk.N.attn_vk.weight" float32
        [e_k, e_v] with K = V @ it.T for mode "v". Folded in float64, one layer in memory at a time.

    Raises:
        ValueError: another mode.
        CacheUnsupportedError: the mode is not exact for this model; names the layer, the reason, and legal modes.
        ModelFormatError, UnsupportedError, OSError: the file is broken or of an unknown architecture.
    """
    if mode not in FOLDED:
        raise ValueError(f"cache mode {mode!r} needs no fold; those that do: {', '.join(FOLDED)}")
    model = read_gguf(Path(path))
    attention = Attention.of(model)
    attention.require(mode)
    folded: dict[str, np.ndarray] = {}

    def keep(fold: Fold) -> None:
        folded[f"blk.{fold.layer}.{FOLDED[mode]}"] = stored(fold)

    each_fold(model, attention, mode, keep, show_progress=bars.wanted(None) and progress)
    return folded


def each_fold(
    model: ModelData, attention: Attention, mode: str, use: Callable[[Fold], None], *, show_progress: bool
) -> None:
    """Call `use` with the fold of each layer in turn, so that only one is in memory."""
    with bars.bar(show_progress, attention.n_layers, "folding", "layer") as update:
        for layer in range(attention.n_layers):
            use(fold_layer(model, attention, mode, layer))
            update(layer + 1, attention.n_layers)


def stored(fold: Fold) -> np.ndarray:
    """A fold's weight as it is stored: float32 [e_out, e_in].

    Never a smaller type: W has the inverse's large entries, and its rounding is amplified as K's is (cache-math.md
    section 2, rule 3: W in bf16 costs 11 % of V, in f16 with scales 1.4 %, in f32 2e-6).
    """
    return np.ascontiguousarray(fold.weight.T, np.float32)


def fold_value_bias(model: ModelData, attention: Attention) -> ModelData:
    """Move each layer's V bias into the output bias: c' = b_V W_O + c, b_V = 0.

    Softmax weights sum to 1, so every query head adds its own KV head's b_V whatever it attends to; without it V is
    linear in x, which every mode but "kv" needs (cache-math.md section 1, "Biases").
    """
    changed: list[Tensor] = []
    kv = attention.kv_width
    for layer in range(attention.n_layers):
        prefix = f"blk.{layer}."
        fused = model.tensors.get(f"{prefix}attn_qkv.bias")
        bias = fused or model.tensors.get(f"{prefix}attn_v.bias")
        if bias is None:
            continue
        values = bias.values().copy()
        b_v = values[-kv:].astype(np.float64)
        if not b_v.any():
            continue
        values[-kv:] = 0
        group = attention.n_heads // attention.n_kv_heads
        per_query_head = b_v.reshape(attention.n_kv_heads, -1).repeat(group, axis=0).ravel()
        w_o = _matrix(model, f"{prefix}attn_output.weight", (attention.d, attention.q_width))
        old = model.tensors.get(f"{prefix}attn_output.bias")
        moved = w_o @ per_query_head + (0 if old is None else old.values().astype(np.float64))
        changed += [Tensor.of(bias.name, values), Tensor.of(f"{prefix}attn_output.bias", moved)]
    return model.with_tensors(*changed)
