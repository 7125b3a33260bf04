# SPDX-License-Identifier: Apache-2.0
"""The exact folds of slim attention: V from K, or K from V (Graef and Wasielewski, "Slim attention", section 2).

Computed in float64, and exact in exact arithmetic; precision.py measures the effect of rounding, wiener.py has a fold
that allows for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slimrt import modes
from slimrt.folding.attention import Attention
from slimrt.folding.weights import projections
from slimrt.modelfile.gguf import ModelData

FOLDED = {mode: modes.FOLDED[mode] for mode in modes.INVERTED}  # mode -> the tensor it needs in each layer


@dataclass(frozen=True)
class Fold:
    """A matrix that computes one projection from the other.

    Attributes:
        layer: index of the layer.
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

    W = W_in^-1 W_out if w_in is square, W_in^T (W_in W_in^T)^-1 W_out if it is wide; the latter by W_in^T = Q R, since
    forming the product would square the condition. One LU factorisation also gives the inverse, whose norm is needed
    for the condition number; a singular value decomposition would take many times as long.

    Args:
        w_in: [d, e], e >= d.  w_out: [d, e_out].

    Returns:
        W [e, e_out] float64, and the condition number; infinite if w_in has a rank below d, and W is then 0.
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


def condition(w: np.ndarray) -> float:
    """Condition number of a matrix of any shape: largest over smallest singular value; infinite if rank-deficient."""
    tall = w if w.shape[0] >= w.shape[1] else w.T
    square: np.ndarray = np.asarray(np.linalg.qr(tall, mode="r")) if tall.shape[0] > tall.shape[1] else tall
    return fold_matrix(square, square[:, :0])[1]


def _spectral_norm(matrix: np.ndarray) -> float:
    """The largest singular value, by subspace iteration."""
    basis = np.random.default_rng(0).normal(size=(matrix.shape[1], 8))
    for _ in range(16):
        basis, _ = np.linalg.qr(matrix.T @ (matrix @ basis))
    return float(np.linalg.norm(matrix @ basis, 2))


def fold_layer(model: ModelData, attention: Attention, mode: str, layer: int) -> Fold:
    """Fold one layer for mode "k" (V from K) or "v" (K from V).

    Raises:
        CacheUnsupportedError: the projection to be inverted is singular.
        ModelFormatError: a tensor is missing or not finite.
    """
    return folded(attention, mode, layer, *projections(model, attention, layer))


def folded(attention: Attention, mode: str, layer: int, w_k: np.ndarray, w_v: np.ndarray) -> Fold:
    """`fold_layer` for projections that are already in memory."""
    w_in, w_out = (w_k, w_v) if mode == "k" else (w_v, w_k)
    weight, cond = fold_matrix(w_in, w_out)
    if not np.isfinite(cond):
        raise attention.refuse(mode, layer, f"W_{mode.upper()} is singular, so {mode.upper()} has lost a part of x")
    return Fold(layer, weight, cond, w_in, w_out)


def stored(fold: Fold) -> np.ndarray:
    """A fold's weight as it is stored: float32 [e_out, e_in].

    Never a smaller type: W has large entries from the inverse, so its rounding matters as much as that of K
    (docs/cache-math.md section 2, rule 3: the error of V is 11 % with W in bf16, 1.4 % in f16 with scales, 2e-6 in
    f32). The engine holds it in f16 with scales where rows have 8 bits or fewer, which lose thirty times as much.
    """
    return np.ascontiguousarray(fold.weight.T, np.float32)
