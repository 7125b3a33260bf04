# SPDX-License-Identifier: Apache-2.0
"""Folding cross-attention for modes k and e1, and predicting their error (docs/cache-math.md).

In layer N, mode k: V_N = K_N W_K,N^-1 W_V,N. Mode e1: K_N = K_1 W_K,1^-1 W_K,N and V_N = K_1 W_K,1^-1 W_V,N. Both are
exact in exact arithmetic; the inverse amplifies the rounding of stored rows (section 2), by an amount predicted here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slimrt.errors import CacheUnsupportedError
from slimrt.folding import noise
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import white_inputs
from slimrt.folding.exact import condition, fold_matrix
from slimrt.folding.planes import Plane
from slimrt.folding.weights import LayerWeights, projections
from slimrt.modelfile.gguf import ModelData
from slimrt.modes import CROSS_FOLDED
from slimrt.plumbing import progress as bars


@dataclass(frozen=True)
class Product:
    """A folded weight: name of its tensor after the layer's prefix, weight [e_in, e_out] float64, and w_out [d, e_out],
    the projection of the encoder's output that a row times the weight gives."""

    name: str
    weight: np.ndarray
    w_out: np.ndarray


@dataclass(frozen=True)
class CrossFold:
    """One layer's cross-attention folded.

    Attributes:
        cond: condition of the projection that is inverted.
        w_in: the projection of the encoder's output that is stored [d, e_in], float64.
    """

    weights: LayerWeights
    cond: float
    w_in: np.ndarray
    products: tuple[Product, ...]

    @property
    def layer(self) -> int:
        return self.weights.layer

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Full name -> float32 [e_out, e_in]; never a smaller type, for the reason given in `exact.stored`."""
        prefix = self.weights.attention.prefix(self.layer)
        return {prefix + one.name: np.ascontiguousarray(one.weight.T, np.float32) for one in self.products}

    @cached_property
    def _inputs(self) -> np.ndarray:
        return white_inputs(self.weights)[1]

    @cached_property
    def _rows(self) -> np.ndarray:
        """Rows of random encoder states before rounding, float32 [n, e_in]."""
        return self._inputs @ self.w_in.astype(np.float32)

    def error(self, type_name: str) -> float:
        """Expected relative error of what is computed from rows of this type: the larger of K's and V's.

        The output of the encoder's last norm is assumed to be white before weight and bias (`calibrate.white_inputs`).
        """
        attention = self.weights.attention
        plane = Plane(attention.kv_width, attention.n_kv_heads, type_name)
        errors = []
        for one in self.products:
            wanted = noise.energy(self._inputs @ one.w_out)
            error = noise.of_product(self._rows, plane, attention.d, one.weight, wanted).sum()
            errors.append(float(np.sqrt(error / wanted.sum())) if wanted.any() else 0.0)
        return max(errors)


def require_cross(attention: Attention, mode: str) -> None:
    """Raises CacheUnsupportedError unless folding for the mode is exact here; ValueError if it needs no folding."""
    if mode not in CROSS_FOLDED:
        raise ValueError(f"cross-attention mode {mode!r} needs no fold; those that do: {', '.join(CROSS_FOLDED)}")
    if reason := attention.refusal(mode):
        raise CacheUnsupportedError(
            f"cross-attention cache mode '{mode}' is not possible: {reason}. Modes that work here: "
            f"{', '.join(attention.legal())}"
        )


def folds(model: ModelData, mode: str, layers: Collection[int] | None = None) -> Iterator[CrossFold]:
    """Fold the cross-attention of a decoder's layers, one at a time. layers: their indices; None: all.

    Raises:
        UnsupportedError: the model has no encoder. ValueError, CacheUnsupportedError: as `require_cross`, or a
            projection to be inverted is singular.
        ModelFormatError: a tensor is missing or not finite.
    """
    attention = Attention.cross(model)
    require_cross(attention, mode)
    first = projections(model, attention, 0)[0] if mode == "e1" else None
    for layer in range(attention.n_layers) if layers is None else sorted(layers):
        w_k, w_v = projections(model, attention, layer)
        w_in = w_k if first is None else first
        wanted = [w_v] if mode == "k" else [w_k, w_v]
        weight, cond = fold_matrix(w_in, np.concatenate(wanted, axis=1))
        if not np.isfinite(cond):
            raise CacheUnsupportedError(
                f"cross-attention cache mode '{mode}' is not possible in layer {layer}: the W_K it inverts is singular "
                f"(condition {condition(w_in):.3g}), so K has lost a part of the encoder's output: use kv or e"
            )
        parts = np.split(weight, len(wanted), axis=1)
        if mode == "e1" and layer == 0:
            parts[0] = np.eye(attention.kv_width)  # layer 0 reads its own K, which is stored
        products = zip(CROSS_FOLDED[mode], parts, wanted, strict=True)
        yield CrossFold(LayerWeights(model, attention, layer), cond, w_in, tuple(Product(*one) for one in products))


def fold_cross(model: ModelData, mode: str, layers: Sequence[int], *, progress: bool = True) -> dict[str, np.ndarray]:
    """Return the tensors that a cross-attention mode needs in addition to the model's own: name -> float32 [e_out,
    e_in].

    Errors as `folds`. progress: show a bar on stderr if that is a terminal.
    """
    made: dict[str, np.ndarray] = {}
    with bars.bar(bars.wanted(None) and progress, len(layers), "folding", "layer") as update:
        for done, fold in enumerate(folds(model, mode, layers)):
            made |= fold.tensors
            update(done + 1, len(layers))
    return made
