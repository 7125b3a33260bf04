# SPDX-License-Identifier: Apache-2.0
"""Attention calls by their sizes, for tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Call:
    """heads: of queries; kv: of k; rows in all, the last `queries` fresh."""

    heads: int
    kv: int
    dim: int
    rows: int
    queries: int
    window: int = 0

    @property
    def distance(self) -> np.ndarray:
        """Of a row from a query, [queries, rows]."""
        return np.arange(self.rows) - (self.rows - self.queries + np.arange(self.queries))[:, None]

    @property
    def seen(self) -> np.ndarray:
        """Whether a query sees a row, [queries, rows]."""
        return (self.distance <= 0) & ((self.distance > -self.window) if self.window else True)
