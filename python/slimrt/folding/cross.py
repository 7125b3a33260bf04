# SPDX-License-Identifier: Apache-2.0
"""Cross-attention offline: the folds of modes k and e1, and what rounding makes of them (docs/cache-math.md).

k: V_N = K_N W_K,N^-1 W_V,N. e1: K_N = K_1 W_K,1^-1 W_K,N and V_N = K_1 W_K,1^-1 W_V,N. Exact in exact arithmetic; the
rounding of the stored row comes out amplified by the inverse (section 2), which is why it is predicted here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slimrt.errors import CacheUnsupportedError
from slimrt.folding import noise
from slimrt.folding.attention import Attention, LayerWeights, projections
from slimrt.folding.calibrate import white_inputs
from slimrt.folding.exact import condition, fold_matrix
from slimrt.folding.planes import Plane
from slimrt.modelfile.gguf import ModelData
from slimrt.modes import CROSS_FOLDED
from slimrt.plumbing import progress as bars


@dataclass(frozen=True)
class Product:
    """What a row is multiplied by: name of the tensor after the layer's prefix, weight [e_in, e_out] float64, and the
    projection of the encoder's output that it stands for [d, e_out]."""

    name: str
    weight: np.ndarray
    w_out: np.ndarray


@dataclass(frozen=True)
class CrossFold:
    """One layer's cross-attention folded.

    Attributes:
        cond: of the projection that is inverted.
        w_in: what makes the row of the encoder's output [d, e_in], float64.
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
        """By full name, float32 [e_out, e_in]; never a smaller type, as `exact.stored`."""
        prefix = self.weights.attention.prefix(self.layer)
        return {prefix + one.name: np.ascontiguousarray(one.weight.T, np.float32) for one in self.products}

    @cached_property
    def _inputs(self) -> np.ndarray:
        return white_inputs(self.weights)[1]

    @cached_property
    def _rows(self) -> np.ndarray:
        """What would be stored of some encoder states, float32 [n, e_in]."""
        return self._inputs @ self.w_in.astype(np.float32)

    def error(self, type_name: str) -> float:
        """Expected relative error of what is computed from rows of this type: the larger of K's and V's.

        The last norm's output before gain and shift is taken to be white, as `calibrate.white_inputs` does.
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
    """Raises CacheUnsupportedError unless folding for the mode is exact here; ValueError for one that needs no fold."""
    if mode not in CROSS_FOLDED:
        raise ValueError(f"cross-attention mode {mode!r} needs no fold; those that do: {', '.join(CROSS_FOLDED)}")
    if reason := attention.refusal(mode):
        raise CacheUnsupportedError(
            f"cross-attention cache mode '{mode}' is not possible: {reason}. Modes that work here: "
            f"{', '.join(attention.legal())}"
        )


def folds(model: ModelData, mode: str, layers: Collection[int] | None = None) -> Iterator[CrossFold]:
    """Fold the cross-attention of a decoder's layers, one after another; layers: which (None: all).

    Raises:
        UnsupportedError: the model has no encoder. ValueError, CacheUnsupportedError: as `require_cross`, or a
            projection to invert is singular.
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
            parts[0] = np.eye(attention.kv_width)  # its own K: what is stored
        products = zip(CROSS_FOLDED[mode], parts, wanted, strict=True)
        yield CrossFold(LayerWeights(model, attention, layer), cond, w_in, tuple(Product(*one) for one in products))


def fold_cross(model: ModelData, mode: str, layers: Sequence[int], *, progress: bool = True) -> dict[str, np.ndarray]:
    """Return what a cross-attention mode needs beyond a plain GGUF's own tensors, by name, float32 [e_out, e_in].

    Errors as `folds`. progress: show a bar on stderr, when that is a terminal.
    """
    made: dict[str, np.ndarray] = {}
    with bars.bar(bars.wanted(None) and progress, len(layers), "folding", "layer") as update:
        for done, fold in enumerate(folds(model, mode, layers)):
            made |= fold.tensors
            update(done + 1, len(layers))
    return made
