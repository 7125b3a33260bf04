# SPDX-License-Identifier: Apache-2.0
"""The planes that each cache mode stores of a token in one layer: their bytes, and their rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.folding.attention import Attention
from slimrt.modes import DEFAULT_TYPE, STATIC_SCALES


class Rounds(Protocol):
    """Anything that stores rows and reads them back rounded."""

    def round(self, rows: np.ndarray) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Plane:
    """One stored part of a row: `heads` equal parts, each with its own scales."""

    width: int
    heads: int
    type: str

    @property
    def bytes(self) -> int:
        """Bytes per token."""
        return core.plane_bytes(self.type, self.width, self.heads)

    def round(self, rows: np.ndarray) -> NDArray[np.float32]:
        """Rows float32 [n, width] as they read back, computed with the runtime's own kernels."""
        rows = np.ascontiguousarray(rows, np.float32)
        return np.asarray(core.ops.cache_round_trip(rows, self.heads, self.type, core.ops.backends()[0]))


def planes(
    attention: Attention, mode: str, type_name: str, rank: int = 0, residual_type: str = "", v_heads: int = 0
) -> list[Plane]:
    """Return the planes of a mode in the order in which they are stored (docs/architecture.md lists them).

    Args:
        attention: the layer's shape.
        mode: a cache mode.
        type_name: element type of the row, of both K and V in mode "kv".
        rank, residual_type: of mode "k+r".
        v_heads: KV heads that store V, of modes "k" and "k+r".
    """
    found = attention.modes(type_name, rank, residual_type or DEFAULT_TYPE, v_heads)[mode]
    return [Plane(plane.width, plane.heads, plane.type) for plane in found.planes]


def bytes_per_token(stored: Sequence[Plane]) -> int:
    """Bytes per token of these planes."""
    return sum(plane.bytes for plane in stored)


def static_scales(rows: np.ndarray, type_name: str) -> NDArray[np.float64] | None:
    """Return the static scales s [width] by which channels are divided before they are stored; None for types that do
    not benefit.

    With a scale shared by a token's channels the error is sum_c w_c (s_c t)^2, where t is the largest |k_c| / s_c and
    w_c the weights of the channels' errors. If all channels reach their peaks p_c, the minimum is at s_c = p_c for any
    weights: a smaller s_c raises t for all channels. Few tokens reach a peak; on trained models the 99 % quantile is
    about 5 % better than the maximum, and does not depend on a single token. Nothing is clipped, as the shared scale
    adapts to each token.

    Args:
        rows: channels over tokens [n, width].
    """
    if type_name not in STATIC_SCALES:
        return None
    scales = np.quantile(np.abs(rows), 0.99, axis=0).astype(np.float64)
    largest = float(scales.max(initial=0.0))
    return np.maximum(scales, 1e-6 * largest) if largest else np.ones(rows.shape[1])
