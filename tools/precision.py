# SPDX-License-Identifier: Apache-2.0
"""What a fold costs: the error of V (or K) that the rounding of the stored row will cause, predicted and measured.

V = K W multiplies whatever noise K carries by the spectrum of W. If channel j of K carries independent noise of
variance n_j, the error of V has energy sum_j n_j |W[j, :]|^2 (cache-math.md sections 2 and 3), so the relative error
of V is the root of that over E|v|^2. Only second moments of K and V are needed, never a d x d matrix.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import log, sqrt
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

from .fold import Attention, Fold, fold_layer, stored
from .gguf_file import ModelData, read_gguf

# Unit roundoff of what a cache row, or a product of it, is stored in.
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# Rounding to nearest is uniform within half a spacing: variance (2 u 2^e)^2 / 12 for a value m 2^e, 1 <= m < 2, that
# is u^2 / (3 m^2) of its energy. With log m uniform, E[1 / m^2] = 3 / (8 ln 2): noise in u^2 of the channel's energy.
ROUNDING = 1 / (8 * log(2))


@dataclass(frozen=True)
class Moments:
    """Second moments of a layer's projections over the tokens of a text.

    Attributes:
        row: E[k_j^2] of each channel of the stored row [e_in].
        result: E|v|^2 of what is computed from it, summed over its channels.
    """

    row: np.ndarray
    result: float


def isotropic_moments(model: ModelData, fold: Fold) -> Moments:
    """Moments without any text: the norm's output before gamma and beta is taken to be white.

    Real activations are not, so this is a guess within a small factor; a text is better.
    """
    gamma = model.tensor(f"blk.{fold.layer}.attn_norm.weight").values().astype(np.float64)
    beta = model.tensors.get(f"blk.{fold.layer}.attn_norm.bias")
    shift = np.zeros_like(gamma) if beta is None else beta.values().astype(np.float64)

    def energy(w: np.ndarray) -> np.ndarray:
        squares: np.ndarray = gamma**2 @ w**2 + (shift @ w) ** 2
        return squares

    return Moments(energy(fold.w_in), float(energy(fold.w_out).sum()))


def predicted_error(fold: Fold, moments: Moments, type_name: str) -> float:
    """Return the expected relative error of the folded projection, sqrt(E|v^ - v|^2 / E|v|^2).

    Args:
        fold: the fold and its projections.
        moments: of the layer, see Moments.
        type_name: element type of the stored row, a key of ROUNDOFF.
    """
    if moments.result == 0:
        return 0.0  # nothing to get wrong: the projection is zero
    d, e = fold.w_in.shape
    # In float32 everything between x and V rounds: the row, W, and sums of d and of e products, whose partial sums
    # have half the energy of the whole on average. Kept in parts by a vector unit, they round less than this says.
    arithmetic = (2 + (d + e) / 2) * ROUNDOFF["f32"] ** 2
    stored_row = ROUNDOFF[type_name] ** 2 if type_name != "f32" else 0.0
    noise = moments.row * ROUNDING * (stored_row + arithmetic)
    return sqrt(float(noise @ (fold.weight**2).sum(axis=1)) / moments.result)


def predicted_errors(fold: Fold, moments: Moments) -> dict[str, float]:
    """`predicted_error` for every element type."""
    return {name: predicted_error(fold, moments, name) for name in ROUNDOFF}


def rounded(values: np.ndarray, type_name: str) -> np.ndarray:
    """The float32 values after a round trip through an element type."""
    kind = GGMLQuantizationType[type_name.upper()]
    return quants.dequantize(quants.quantize(values.astype(np.float32), kind), kind)


def measure_error_of_v(path: str | os.PathLike[str], ids: np.ndarray, mode: str = "k") -> dict[str, np.ndarray]:
    """Return the measured counterpart of `predicted_error` on a text, for every element type.

    The real rows of mode "k" (or "v") are computed in float32 from the model's own activations, rounded to the type,
    multiplied by the stored float32 fold, and compared with the projection in float64.

    Args:
        path: a GGUF file, folded or not.
        ids: token ids int32 [n], n at most the model's context.

    Returns:
        Type name -> relative error of each layer, float64 [n_layers].
    """
    from slimrt import _core

    model = read_gguf(Path(path))
    attention = Attention.of(model)
    attention.require(mode)
    engine = _core.Engine(str(path), n_ctx=len(ids), cache="kv", cache_type_k="f32", cache_type_v="f32")
    inputs = engine.attention_inputs(np.asarray(ids, np.int32))
    errors = {name: np.zeros(attention.n_layers) for name in ROUNDOFF}
    for layer in range(attention.n_layers):
        fold = fold_layer(model, attention, mode, layer)
        weight, row = stored(fold).T, inputs[layer] @ fold.w_in.astype(np.float32)
        exact = inputs[layer].astype(np.float64) @ fold.w_out
        for name in ROUNDOFF:
            off = np.linalg.norm(rounded(row, name) @ weight - exact)
            errors[name][layer] = off / np.linalg.norm(exact)
    return errors
