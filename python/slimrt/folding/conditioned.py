# SPDX-License-Identifier: Apache-2.0
"""Mode k+r in one layer: K, a prediction of V from the rounded K, and a residual in a few directions."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np

from slimrt.errors import CacheUnsupportedError
from slimrt.folding import noise
from slimrt.folding.planes import Plane, planes, static_scales
from slimrt.folding.readback import Reader, Sample, half_weights
from slimrt.folding.slim import SlimRow
from slimrt.folding.wiener import Products, error_covariance, half_rows, leading, wiener
from slimrt.folding.window import KeyNoise, Window

# Float16 tensors of the residual may add this much to the noise variance that rounding the residual causes.
_HALVED = 0.01


class _Half(NamedTuple):
    """A tensor in float16, and the noise variance of each of its rows' products that this adds."""

    tensor: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(cls, tensor: np.ndarray, factors: np.ndarray) -> _Half:
        """factors: what the tensor [m, e] is multiplied with [n, e]."""
        with np.errstate(over="ignore", invalid="ignore"):  # past float16 the noise is infinite, or NaN
            half = tensor.astype(np.float16)
            return cls(half, noise.energy(factors @ (half - tensor).T))


class Conditioned:
    """The conditioned fold of a layer for one element type of K, for every rank up to max_rank.

    k' = k / s is stored and reads back as k^. v is predicted as k^ W', where W' is the Wiener filter after its own
    rounding, so that the residual corrects that too. The rest is stored in the directions B in which it is largest:
    rho' = (x W_V - k^ W') B / sigma. Channels of rho' share a scale, hence sigma: with a common step t, the error
    sum sigma_i^2 t^2 is least when all |rho'_i| reach the same maximum (see `planes.static_scales`), which their root
    mean square approximates.

    Args:
        sample: the layer and its text.
        type_name: element type of K's plane.
        half: if type_name has 8 bits or fewer, store W' in float16 with one scale per row, and tensors of the residual
            in float16 where that adds little noise.
        max_rank: number of directions to prepare.
        known: `Sample.products`, if they are at hand.
    """

    def __init__(self, sample: Sample, type_name: str, *, half: bool, max_rank: int, known: Products | None = None):
        self.sample, self.type = sample, type_name
        a = sample.weights.attention
        self.scales = static_scales(sample.k[:, : sample.slim], type_name)
        self.row = SlimRow(sample, planes(a, "k+r", type_name, v_heads=sample.v_heads), self.scales)
        self.rows = np.concatenate([self.row.of(window) for window in sample.windows])
        self.v = sample.v[:, : sample.slim]
        self.noise = noise.of_plane(self.rows, self.row, a.d)
        self._halved = half and half_weights(type_name)
        self._store(self._fit(known))
        missed = sample.w_computed - sample.w_row @ self._of_row(self.weight)
        covariance = error_covariance(sample.moment, missed, self.weight, self.noise)
        self.missed, self.total = missed, float(covariance.trace())
        self.values, self.basis = leading(covariance, min(max_rank, sample.slim))
        self._left: tuple[int, np.ndarray, np.ndarray] | None = None

    def _of_row(self, weight: np.ndarray) -> np.ndarray:
        """W' of k' = k / s, for k."""
        return np.asarray(weight / self.row.scales[:, None])

    def _fit(self, known: Products | None) -> np.ndarray:
        sample, a = self.sample, self.sample.weights.attention
        if self.type == "f32" and a.kv_width >= a.d:  # no noise to expect: the fold becomes that of slim attention
            with suppress(CacheUnsupportedError):  # W_K is singular: the residual holds what K has lost
                return sample.v_from_k.weight
        of_weight = noise.of_float("f16") if self._halved else 0.0
        expected = self.noise + of_weight * noise.energy(self.rows)
        # k' + n predicts V as k + s n does, whose products do not depend on s.
        scales, noises = self.row.scales, expected * self.row.scales**2
        heard = expected != 0  # a channel that is always zero predicts nothing
        if known is not None and not heard.all():
            known = known[0][np.ix_(heard, heard)], known[1][heard]
        out = np.zeros((a.kv_width, sample.slim))
        if heard.any():
            of_row = wiener(sample.moment, sample.w_row[:, heard], sample.w_computed, noises[heard], known)
            out[heard] = of_row * scales[heard, None]
        return out

    def _store(self, weight: np.ndarray) -> None:
        """Round W' to its stored type, and make its tensors."""
        self.tensors: dict[str, np.ndarray] = {}
        if self._halved:
            rows, scale = half_rows(weight.T)
            self.tensors |= {"attn_kr_v.weight": rows, "attn_kr_v.scale": scale}
            self.weight = (rows.astype(np.float64) * scale[:, None]).T
        else:
            self.tensors["attn_kr_v.weight"] = np.ascontiguousarray(weight.T, np.float32)
            self.weight = self.tensors["attn_kr_v.weight"].T.astype(np.float64)
        if self.scales is not None:
            self.tensors["attn_kr_row.scale"] = self.scales.astype(np.float32)

    @cached_property
    def sigma(self) -> np.ndarray:
        """The divisor of each direction [max rank]."""
        deviation = np.sqrt(self.values)
        largest = float(deviation.max(initial=0.0))
        return np.maximum(deviation, 1e-6 * largest) if largest else np.ones(len(deviation))

    @cached_property
    def _weight_turned(self) -> np.ndarray:
        """W' B [e_k, max rank]."""
        return np.asarray(self.weight @ self.basis)

    @cached_property
    def _missed_turned(self) -> np.ndarray:
        """What W' misses, in the directions of B [d, max rank]."""
        return np.asarray(self.missed @ self.basis)

    @cached_property
    def residual_tensors(self) -> dict[str, np.ndarray]:
        """The residual's tensors for the largest rank; a smaller rank uses their first rows, or columns."""
        per_sigma = self.basis / self.sigma
        return {
            "attn_kr_x.weight": np.ascontiguousarray((self.sample.w_computed @ per_sigma).T, np.float32),
            "attn_kr_k.weight": np.ascontiguousarray(-(self._weight_turned / self.sigma).T, np.float32),
            "attn_kr_out.weight": np.ascontiguousarray(self.basis * self.sigma, np.float32),
        }

    @cached_property
    def _read_back(self) -> np.ndarray:
        """The sample's rows as they read back, float32 [n, e]."""
        return self.row.round(self.rows)

    @cached_property
    def _residuals(self) -> np.ndarray:
        """rho' of the sample's tokens, float32 [n, max rank]."""
        tensors = self.residual_tensors
        of_x = self.sample.x @ tensors["attn_kr_x.weight"].T
        return np.asarray(of_x + self._read_back @ tensors["attn_kr_k.weight"].T)

    def stored_residual(
        self, rank: int, residual_type: str, rounding: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """`residual_tensors` of a rank as they are stored, and the noise variance in each channel of V that float16
        adds [slim]. rounding: their residual_noise [rank], beside which it must be small.

        rho' = x P + k^ R, where the terms of k^ R cancel: rounding R to R^ alone may add a good part of the
        residual's noise. With P + W_K (R - R^) for P, the error R^ - R meets only the noise of k^, not k.
        """
        of_x, of_k, out = self.residual_tensors.values()
        out, added = np.ascontiguousarray(out[:, :rank]), np.zeros(self.sample.slim)
        if self._halved:
            limit = _HALVED * float(rounding.sum())
            to_values = (self.basis[:, :rank] * self.sigma[:rank]) ** 2
            half = self._half_k
            halves_k = (noises := to_values @ half.noise[:rank]).sum() <= limit
            if halves_k:
                of_k, of_x, added = half.tensor, self._x_of_half_k, added + noises
            half = self._half_x_of_half_k if halves_k else self._half_x
            if (noises := to_values @ half.noise[:rank]).sum() <= limit:
                of_x, added = half.tensor, added + noises
            half = _Half.of(out, Plane(rank, 1, residual_type).round(self._residuals[:, :rank]))
            if half.noise.sum() <= limit:
                out, added = half.tensor, added + half.noise
        tensors = (np.ascontiguousarray(of_x[:rank]), np.ascontiguousarray(of_k[:rank]), out)
        return dict(zip(self.residual_tensors, tensors, strict=True)), added

    @cached_property
    def _half_k(self) -> _Half:
        return _Half.of(self.residual_tensors["attn_kr_k.weight"], self._read_back - self.rows)

    @cached_property
    def _half_x(self) -> _Half:
        return _Half.of(self.residual_tensors["attn_kr_x.weight"], self.sample.x)

    @cached_property
    def _x_of_half_k(self) -> np.ndarray:
        """P + W_K (R - R^) [max rank, d]."""
        with np.errstate(over="ignore", invalid="ignore"):  # as in _Half
            error = self._half_k.tensor - self.residual_tensors["attn_kr_k.weight"]
            of_k = (self.sample.w_row / self.row.scales) @ error.T
        return np.asarray(self.residual_tensors["attn_kr_x.weight"] - of_k.T.astype(np.float32))

    @cached_property
    def _half_x_of_half_k(self) -> _Half:
        return _Half.of(self._x_of_half_k, self.sample.x)

    @cached_property
    def _noise_of_sums(self) -> np.ndarray:
        """Noise variance in each direction [max rank] of rho' sigma, the small difference of two float32 sums of the
        size of v, from their rounding."""
        size = noise.energy(self.v @ self.basis.astype(np.float32))
        sums = size * noise.of_sum(self.sample.weights.attention.d)
        return np.asarray(sums + noise.of_reading(noise.energy(self.rows), self._weight_turned, size))

    def residual_noise(self, rank: int, residual_type: str) -> np.ndarray:
        """Noise variance of the stored residual, times sigma^2: in each direction of V that it corrects [rank]."""
        if not rank:
            return np.zeros(0)
        rows = self._residuals[:, :rank]
        rounding = Plane(rank, 1, residual_type).round(rows) - np.ascontiguousarray(rows)
        return np.asarray(noise.energy(rounding) * self.sigma[:rank] ** 2 + self._noise_of_sums[:rank])

    def left(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The error of V that a residual of this rank leaves: the variance in each channel that the rounding of the row
        causes [e_v], and the matrix M with v - v^ = x M apart from that [d, e_v]. The result for the last rank is
        cached, for residuals of other types."""
        if self._left is None or self._left[0] != rank:
            basis = self.basis[:, :rank]
            weight = self.weight - self._weight_turned[:, :rank] @ basis.T
            self._left = rank, self.noise @ weight**2, self.missed - self._missed_turned[:, :rank] @ basis.T
        return self._left[1:]

    @cached_property
    def kept_noise(self) -> np.ndarray:
        """Noise variance in each channel of the stored V of heads that keep V."""
        return self.row.kept_noise()

    @cached_property
    def read_noise(self) -> np.ndarray:
        """Variance of the float32 sums that compute V from a row, which no residual can correct [slim]."""
        return noise.of_reading(noise.energy(self.rows), self.weight, noise.energy(self.v))

    def key_noise(self, window: Window) -> KeyNoise:
        """Noise of the keys, which does not depend on the rank."""
        return self.row.key_noise(window)

    @cached_property
    def score_error(self) -> float:
        """Sum of squares over the sample of the error of attention's output that errors of scores cause."""
        return sum(window.from_scores(self.key_noise(window)) for window in self.sample.windows)

    def value_error(self, rank: int, residual_type: str) -> float:
        """Expected relative error of V: from the directions left out, and from the rounding of the residual."""
        wanted = self.sample.value_energy
        left = max(self.total - float(self.values[:rank].sum()), 0.0)
        left += float(self.residual_noise(rank, residual_type).sum() + self.read_noise.sum() + self.kept_noise.sum())
        return float(np.sqrt(left / wanted)) if wanted else 0.0

    def smallest_rank(self, residual_type: str, target: float) -> int | None:
        """The smallest multiple of 4 (or the largest rank) whose value_error meets the target; None if none does."""
        ranks = [*range(0, len(self.values), 4), len(self.values)]
        if self.value_error(ranks[-1], residual_type) > target:
            return None
        low, high = -1, len(ranks) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.value_error(ranks[middle], residual_type) <= target else (middle, high)
        return int(ranks[high])

    def reader(self, rank: int, residual_type: str) -> KrReader:
        """The Reader for one rank and type of the residual."""
        return KrReader(self, rank, residual_type if rank else "")


class KrReader(Reader):
    """Mode k+r: K and a residual; V = k^ W' + rho^ B' with B' = sigma B^T."""

    mode = "k+r"

    def __init__(self, fold: Conditioned, rank: int, residual_type: str):
        super().__init__(fold.sample, fold.type)
        sample = fold.sample
        self.planes = planes(sample.weights.attention, "k+r", fold.type, rank, residual_type, sample.v_heads)
        self.fold, self.rank, self.residual_type = fold, rank, residual_type
        rounding = fold.residual_noise(rank, residual_type)
        residual, of_half = fold.stored_residual(rank, residual_type, rounding) if rank else ({}, np.zeros(1))
        self.tensors = fold.tensors | residual
        basis = fold.basis[:, :rank]
        of_row, missed = fold.left(rank)
        computed = of_row + fold.read_noise + basis**2 @ rounding + of_half
        self.value_noise = np.concatenate([computed, fold.kept_noise])
        self.value_missed = np.pad(missed, ((0, 0), (0, len(fold.kept_noise))))

    def key_noise(self, window: Window) -> KeyNoise:
        return self.fold.key_noise(window)

    @property
    def score_error(self) -> float:  # does not depend on the rank: cached in the fold
        return self.fold.score_error

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        row = self.fold.row.round(self.fold.row.of(window))
        values = row @ self.tensors["attn_kr_v.weight"].T.astype(np.float32)
        if (per_row := self.tensors.get("attn_kr_v.scale")) is not None:
            values = values * per_row
        if self.rank:
            of_x, of_k, out = (
                self.tensors[f"attn_kr_{part}.weight"].T.astype(np.float32) for part in ("x", "k", "out")
            )
            plane = self.planes[3 if self.sample.v_heads else 1]
            values = values + plane.round(window.x @ of_x + row @ of_k) @ out
        return self.fold.row.keys(window, row), self.fold.row.values(values, row)
