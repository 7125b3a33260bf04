# SPDX-License-Identifier: Apache-2.0
"""How each cache mode reads keys and values back in one layer: its tensors, its expected noise, and its rounding.

k^ is a stored row as it reads back (docs/cache-math.md). Modes k and k+r are in slim.py and conditioned.py, lowrank in
lowrank.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slimrt.folding import noise
from slimrt.folding.exact import FOLDED, Fold, condition, folded, stored
from slimrt.folding.planes import Plane, bytes_per_token, planes, static_scales
from slimrt.folding.weights import LayerWeights
from slimrt.folding.wiener import Products, products
from slimrt.folding.window import KeyNoise, Window

_FULL_WEIGHTS = ("f32", "f16", "bf16")  # row types with which folds stay in float32 (docs/cache-math.md section 2)


@dataclass(frozen=True)
class Sample:
    """A layer and the inputs that it is folded for.

    Attributes:
        weights: the layer's.
        moment: S = E[x^T x] float64 [d, d].
        windows: parts of a text on which rounding and attention are measured.
        v_heads: how many KV heads, the last ones, store V in modes k and k+r; the others are slim heads.
    """

    weights: LayerWeights
    moment: np.ndarray
    windows: list[Window]
    v_heads: int = 0

    @property
    def slim(self) -> int:
        """Columns of K, and of V, of the slim heads."""
        attention = self.weights.attention
        return attention.kv_width - self.v_heads * attention.head_dim

    def row_of(self, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """[K of slim heads | V of the others], from K and V or from their projections [..., e]."""
        return k if not self.v_heads else np.concatenate([k[..., : self.slim], v[..., self.slim :]], axis=-1)

    @cached_property
    def w_row(self) -> np.ndarray:
        """The projection from x to that row [d, e]."""
        return self.row_of(self.weights.w_k, self.weights.w_v)

    @property
    def w_computed(self) -> np.ndarray:
        """W_V of the slim heads [d, slim]."""
        return self.weights.w_v[:, : self.slim]

    @cached_property
    def x(self) -> np.ndarray:
        """Inputs of all windows, float32 [n, d]."""
        return np.concatenate([window.x for window in self.windows])

    @cached_property
    def k(self) -> np.ndarray:
        """K without bias, before norm and rotation, float32 [n, e_k]."""
        return np.concatenate([window.k for window in self.windows])

    @cached_property
    def v(self) -> np.ndarray:
        """V without bias, float32 [n, e_v]."""
        return np.concatenate([window.v for window in self.windows])

    @cached_property
    def v_from_k(self) -> Fold:
        """The exact fold of mode k. CacheUnsupportedError: W_K is singular."""
        return folded(self.weights.attention, "k", self.weights.layer, self.w_row, self.w_computed)

    @cached_property
    def k_from_v(self) -> Fold:
        """The exact fold of mode v. CacheUnsupportedError: W_V is singular."""
        return folded(self.weights.attention, "v", self.weights.layer, self.weights.w_k, self.weights.w_v)

    @cached_property
    def cond(self) -> float:
        """Condition number of the projection that V is computed from, W_K; infinite if it is rank-deficient."""
        return condition(self.w_row)

    @cached_property
    def rotated_cond(self) -> float:
        """Condition number of W_K's rotated columns. CacheUnsupportedError: they are not independent."""
        weights, a = self.weights, self.weights.attention
        cond = condition(weights.w_k[:, a.rotated])
        if not np.isfinite(cond):
            raise a.refuse("xr", weights.layer, "the rotated columns of W_K are not independent")
        return cond

    @cached_property
    def products(self) -> Products:
        """`wiener.products` of the row and the V computed from it, for folds of several types."""
        return products(self.moment, self.w_row, self.w_computed)

    @cached_property
    def value_energy(self) -> float:
        """E|v|^2 = tr(W_V^T S W_V)."""
        w_v = self.weights.w_v
        return float(np.einsum("ij,ij->", w_v, self.moment @ w_v))

    @cached_property
    def output_energy(self) -> float:
        """Sum of squares of attention's exact output over the windows."""
        return sum(window.output_energy for window in self.windows)


class Reader(ABC):
    """One mode with its element types, folded for one layer.

    Attributes:
        planes: the stored planes, in order.
        value_noise: noise variance in each channel of V [e_v].
        value_missed: the systematic error of V: v - v^ = x value_missed apart from noise [d, e_v]; None: none.
        tensors: those needed in addition to the model's own, by name after "blk.N.", float32 or float16.
        cond: condition number of the matrix that is inverted; None: none is.
        rank, residual_type: of mode "k+r".
    """

    mode: str
    planes: list[Plane]
    value_noise: np.ndarray
    value_missed: np.ndarray | None = None
    tensors: dict[str, np.ndarray]
    cond: float | None = None
    rank: int = 0
    residual_type: str = ""

    def __init__(self, sample: Sample, type_name: str):
        self.sample, self.type = sample, type_name
        self.planes = planes(sample.weights.attention, self.mode, type_name, v_heads=sample.v_heads)
        self.tensors = {}

    @abstractmethod
    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Keys (after norm and RoPE) and values, float32 [n, e], computed from the rounded rows."""

    @abstractmethod
    def key_noise(self, window: Window) -> KeyNoise:
        """Expected noise of the window's keys."""

    @property
    def long_bytes(self) -> float:
        """Bytes per token of a long context; if rows age, the mean over levels."""
        return bytes_per_token(self.planes)

    def fold_error(self) -> float:
        """Expected relative error of what is computed from stored rows: of V, in mode "v" of K."""
        return self.value_error()

    def value_error(self) -> float:
        """Expected sqrt(E|v^ - v|^2 / E|v|^2), from S and N."""
        wanted, error = self.sample.value_energy, float(self.value_noise.sum())
        if (missed := self.value_missed) is not None:
            error += float(np.einsum("ij,ij->", missed, self.sample.moment @ missed))
        return float(np.sqrt(error / wanted)) if wanted else 0.0

    def output_error(self) -> float:
        """Expected relative error of attention's output, to first order, over the sample."""
        wanted = self.sample.output_energy
        return float(np.sqrt((self.score_error + self.value_part) / wanted)) if wanted else 0.0

    @cached_property
    def value_part(self) -> float:
        """The part of output_error due to errors of V, as a sum of squares."""
        error = 0.0
        for window in self.sample.windows:
            missed = None if self.value_missed is None else window.x @ self.value_missed.astype(np.float32)
            error += window.from_values(self.value_noise, missed)
        return error

    @cached_property
    def score_error(self) -> float:
        """The part of output_error due to errors of the scores, as a sum of squares."""
        return sum(window.from_scores(self.key_noise(window)) for window in self.sample.windows)

    def _squares(self, rows: np.ndarray, plane: Plane) -> np.ndarray:
        return noise.squares(rows, plane, self.sample.weights.attention.d)


class KvReader(Reader):
    """Mode kv: K after norm and RoPE, and V."""

    mode = "kv"

    def __init__(self, sample: Sample, type_name: str):
        super().__init__(sample, type_name)
        self.value_noise = noise.of_plane(sample.v, self.planes[1], sample.weights.attention.d)

    def key_noise(self, window: Window) -> KeyNoise:
        return KeyNoise(self._squares(window.keys, self.planes[0]))

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.planes
        return k.round(window.keys), v.round(window.v)


class VReader(Reader):
    """Mode v: V alone; K = V W with the exact fold W."""

    mode = "v"

    def __init__(self, sample: Sample, type_name: str):
        super().__init__(sample, type_name)
        weights, fold = sample.weights, sample.k_from_v
        self.cond, self.tensors = fold.cond, {FOLDED["v"]: stored(fold)}
        self.value_noise = noise.of_plane(sample.v, self.planes[0], weights.attention.d)
        self.weight = fold.weight

    def fold_error(self) -> float:
        wanted, depth = noise.energy(self.sample.k), self.sample.weights.attention.d
        error = float(noise.of_product(self.sample.v, self.planes[0], depth, self.weight, wanted).sum())
        return float(np.sqrt(error / wanted.sum())) if wanted.any() else 0.0

    def key_noise(self, window: Window) -> KeyNoise:
        row = self._squares(window.v, self.planes[0])
        return KeyNoise(np.zeros(window.k.shape), row, self.weight, repeats=True)

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        row = self.planes[0].round(window.v)
        return window.as_keys(row @ self.tensors[FOLDED["v"]].T), row


class XReader(Reader):
    """Mode x: the layer's input."""

    mode = "x"

    def __init__(self, sample: Sample, type_name: str):
        super().__init__(sample, type_name)
        weights, d = sample.weights, sample.weights.attention.d
        variance = noise.energy(self.planes[0].round(sample.x) - sample.x)
        variance += noise.energy(sample.x) * noise.of_sum(d)
        self.value_noise = variance @ weights.w_v**2

    def key_noise(self, window: Window) -> KeyNoise:
        row = np.square(self.planes[0].round(window.x) - window.x)
        sums = np.square(window.k) * noise.of_sum(self.sample.weights.attention.d)
        return KeyNoise(sums, row, window.weights.w_k, repeats=True)

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        row, weights = self.planes[0].round(window.x), window.weights
        return window.as_keys(row @ weights.w_k.astype(np.float32)), row @ weights.w_v.astype(np.float32)


class XrReader(Reader):
    """Mode xr: the rotated columns of K and the rest of the input: row' = x A / s, A = [W_K,rot | T].

    T is an orthonormal basis of the complement of W_K,rot's columns, so A is as well conditioned as W_K,rot, which is
    tall. The inverse is that of the stored A, after rounding: storing A in float16 causes no error other than that of
    the rotated keys.
    """

    mode = "xr"

    def __init__(self, sample: Sample, type_name: str, *, half: bool):
        super().__init__(sample, type_name)
        weights, a = sample.weights, sample.weights.attention
        basis = rotated_and_rest(weights)
        scales = static_scales(sample.x @ basis.astype(np.float32), type_name)
        self.scales = np.ones(a.d) if scales is None else scales
        kind = np.float16 if half and type_name != "f32" else np.float32
        stored_in = (basis / self.scales).astype(kind)
        self.cond = sample.rotated_cond
        read = np.linalg.solve(stored_in.astype(np.float64), np.concatenate([weights.w_k, weights.w_v], axis=1))
        reads_k, reads_v = np.split(read, 2, axis=1)
        self.tensors = {
            "attn_xr_in.weight": np.ascontiguousarray(stored_in.T),
            "attn_xr_k.weight": np.ascontiguousarray(reads_k.T, kind),
            "attn_xr_v.weight": np.ascontiguousarray(reads_v.T, kind),
        }
        if scales is not None:
            self.tensors["attn_xr_row.scale"] = scales.astype(np.float32)
        rows = self._rows(sample.x)
        variance = noise.of_plane(rows, self.planes[0], a.d)
        of_weights = noise.of_float("f16" if kind is np.float16 else "f32") + noise.of_sum(a.d)
        through = variance + noise.energy(rows) * of_weights
        self.value_noise = through @ reads_v**2
        self._rest = np.where(a.rotated, 0, reads_k)

    def key_noise(self, window: Window) -> KeyNoise:
        a, row = window.weights.attention, self._squares(self._rows(window.x), self.planes[0])
        turned = np.zeros(window.k.shape)
        turned[:, a.rotated] = (row * self.scales**2)[:, : a.rotated_width]
        return KeyNoise(window.key_noise(turned).channels, row, self._rest)

    def _rows(self, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors["attn_xr_in.weight"].T.astype(np.float32)

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        a, row = window.weights.attention, self.planes[0].round(self._rows(window.x))
        k = row @ self.tensors["attn_xr_k.weight"].T.astype(np.float32)
        k[:, a.rotated] = row[:, : a.rotated_width] * self.scales[: a.rotated_width].astype(np.float32)
        return window.as_keys(k), row @ self.tensors["attn_xr_v.weight"].T.astype(np.float32)


def rotated_and_rest(weights: LayerWeights) -> np.ndarray:
    """A = [W_K,rot | T], float64 [d, d]."""
    a = weights.attention
    turned = weights.w_k[:, a.rotated]
    q, _ = np.linalg.qr(turned, mode="complete")
    return np.concatenate([turned, q[:, turned.shape[1] :]], axis=1)


def half_weights(type_name: str) -> bool:
    """Whether folded weights may be stored in float16 with rows of this type."""
    return type_name not in _FULL_WEIGHTS
