"""The singular values of W_K, which determine how much a mode that inverts it amplifies rounding
(docs/cache-math.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import ModelData
from slimrt.plumbing import progress as bars

QUANTILES = (0.75, 0.5, 0.25, 0.1, 0.01)  # of the values over the largest; the low ones matter most


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one layer's W_K [d, e_k]. values: float64 [min(d, e_k)], descending."""

    layer: int
    values: NDArray[np.float64]

    @property
    def cond(self) -> float:
        """Condition number: largest over smallest value; infinite if W_K is singular."""
        return float(self.values[0] / self.values[-1]) if self.values[-1] > 0 else float("inf")

    def quantiles(self) -> dict[float, float]:
        """Quantile -> that quantile of the values, over the largest."""
        return {q: float(np.quantile(self.values, q) / self.values[0]) for q in QUANTILES}

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON-ready values; cond None where it is infinite."""
        return {
            "layer": self.layer,
            "largest": float(self.values[0]),
            "smallest": float(self.values[-1]),
            "cond": self.cond if np.isfinite(self.cond) else None,
            "quantiles": {f"{q:g}": value for q, value in self.quantiles().items()},
            "values": self.values.tolist(),
        }


def spectra(model: ModelData, *, progress: bool = False) -> list[Spectrum]:
    """The spectrum of W_K in every layer that has one, one layer in memory at a time; progress: show a bar on stderr.

    Raises:
        ModelFormatError, UnsupportedError, OSError: the file is broken, of an unknown architecture, or has no decoder.
    """
    from slimrt.folding.attention import Attention
    from slimrt.folding.weights import projections

    attention = Attention.of(model)
    found = []
    owning = attention.owning()
    if not owning:
        raise UnsupportedError(f"architecture '{model.arch}' has no decoder, and so no cache whose W_K would matter")
    with bars.bar(progress, len(owning), "spectrum", "layer") as update:
        for done, layer in enumerate(owning):
            w_k, _ = projections(model, attention, layer)
            found.append(Spectrum(layer, np.linalg.svd(w_k, compute_uv=False)))
            update(done + 1, len(owning))
    return found
