# SPDX-License-Identifier: Apache-2.0
"""The row of modes k and k+r. Slim heads compute V from it; the last `Sample.v_heads` heads store V.

A row is [K of slim heads | V of the others]; the keys of the others, after norm and RoPE, are stored in a plane of
their own. V of the slim heads is thus computed from as many columns as K has: if W_K is square, by
[W_K,slim | W_V,kept]^-1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slimrt.folding import noise
from slimrt.folding.exact import FOLDED, stored
from slimrt.folding.planes import Plane
from slimrt.folding.readback import Reader, Sample
from slimrt.folding.window import KeyNoise, Window


class SlimRow:
    """One layer's row. Its planes are k, if heads store V also v and k_v (their keys), then others that are ignored.

    Attributes:
        n: columns of K in it, and of V that is computed from it.
        scales: static scales by which columns are divided before they are stored [e_k]; ones if none are given.
    """

    def __init__(self, sample: Sample, planes: list[Plane], scales: np.ndarray | None = None):
        self.sample, self.n = sample, sample.slim
        kept = sample.v_heads > 0
        self._parts, self._keys = planes[: 1 + kept], planes[2] if kept else None
        self.scales = np.ones(sample.weights.attention.kv_width)
        if scales is not None:
            self.scales[: self.n] = scales

    def of(self, window: Window) -> NDArray[np.float32]:
        """Rows as they are stored, but not rounded, float32 [n, e_k]."""
        return np.asarray(self.sample.row_of(window.k, window.v) / self.scales.astype(np.float32), np.float32)

    def round(self, rows: np.ndarray) -> NDArray[np.float32]:
        """Rows float32 [n, e_k] as they read back."""
        ends = np.cumsum([part.width for part in self._parts])
        columns = np.split(rows, ends[:-1], axis=1)
        return np.concatenate([part.round(of) for part, of in zip(self._parts, columns, strict=True)], axis=1)

    def keys(self, window: Window, rows: np.ndarray) -> np.ndarray:
        """Keys after norm and RoPE [n, e_k], from rows that were read back."""
        keys = window.as_keys(self.sample.row_of(rows * self.scales.astype(np.float32), window.k))
        if self._keys is not None:
            keys[:, self.n :] = self._keys.round(window.keys[:, self.n :])
        return keys

    def key_noise(self, window: Window) -> KeyNoise:
        """Expected noise of those keys."""
        depth = self.sample.weights.attention.d
        squares = noise.squares(self.of(window), self, depth) * self.scales**2
        found = window.key_noise(squares)
        if self._keys is None:
            return found
        own = np.zeros_like(squares)
        own[:, self.n :] = noise.squares(window.keys[:, self.n :], self._keys, depth)
        return replace(found, channels=self.sample.row_of(found.channels, own))

    def values(self, computed: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """V [n, e_v]: `computed` for slim heads [n, self.n], and the stored V in rows that were read back."""
        return np.concatenate([computed, rows[:, self.n :]], axis=1)

    def kept_noise(self) -> NDArray[np.float64]:
        """Noise variance in each channel of stored V."""
        kept = self.sample.v[:, self.n :]
        if self._keys is None:
            return np.zeros(0)
        return noise.of_plane(kept, self._parts[1], self.sample.weights.attention.d)


class KReader(Reader):
    """Mode k: the row above; V = row W in slim heads, with the exact fold W."""

    mode = "k"

    def __init__(self, sample: Sample, type_name: str):
        super().__init__(sample, type_name)
        self.row, fold = SlimRow(sample, self.planes), sample.v_from_k
        self.cond, self.tensors = fold.cond, {FOLDED["k"]: stored(fold)}
        rows, v = sample.row_of(sample.k, sample.v), sample.v[:, : sample.slim]
        through = noise.of_product(rows, self.row, sample.weights.attention.d, fold.weight, noise.energy(v))
        self.value_noise = np.concatenate([through, self.row.kept_noise()])

    def key_noise(self, window: Window) -> KeyNoise:
        return self.row.key_noise(window)

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        rows = self.row.round(self.row.of(window))
        return self.row.keys(window, rows), self.row.values(rows @ self.tensors[FOLDED["k"]].T, rows)
