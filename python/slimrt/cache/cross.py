"""The cache of cross-attention: the user's choice, checked and explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.info import CrossInfo, cross_of
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AUTO, CACHE_TYPES, CROSS_MODES, check_type
from slimrt.plumbing.arguments import unknown, whole


@dataclass(frozen=True)
class CrossConfig:
    """The cache of cross-attention, the same for all layers.

    Attributes:
        mode: "kv" (K and V of each layer), "k" (K of each layer, from which V is computed), "e" (the encoder's output,
            once), "e1" (the first layer's K, once), or "auto": what the file was converted for, else the one that reads
            the fewest bytes.
        type: element type of its rows; "auto": what the file says for its mode, else f16.
        n_source: most rows of one encoder output; 0: the model's own.

    Raises:
        UnsupportedError: an unknown mode or type. ValueError, TypeError: n_source is negative or not an integer.
    """

    mode: str = AUTO
    type: str = AUTO
    n_source: int = 0

    def __post_init__(self) -> None:
        if self.mode not in (AUTO, *CROSS_MODES):
            raise UnsupportedError(unknown("cross-attention cache mode", self.mode, (AUTO, *CROSS_MODES)))
        check_type(self.type, "cross-attention cache type", (*CACHE_TYPES, AUTO))
        if whole("n_source", self.n_source) < 0:
            raise ValueError(f"n_source must not be negative, got {self.n_source}")

    def arguments(self, source: ModelSource) -> dict[str, Any]:
        """Arguments of core.plan and core.Engine.

        Raises:
            ValueError: a value was given and the model has no encoder.
        """
        if source.has_encoder:
            return {"cross": self.mode, "cross_type": self.type, "n_source": self.n_source}
        if self != CrossConfig():
            raise ValueError(
                f"cross, cross_type and n_source are for models with an encoder, and {source.name} has none: "
                "leave them out"
            )
        return {}

    def resolved(self, source: ModelSource) -> CrossConfig:
        """The config with mode and type as the core resolves them for a model that has an encoder and a decoder. Errors
        as arguments()."""
        found = cross_of(core.plan(source.file, **self.arguments(source)))
        return CrossConfig(found["mode"], found["type"], self.n_source)

    def mode_for(self, source: ModelSource) -> str:
        """The resolved mode; "" for a model without an encoder, or without a decoder. Errors as arguments()."""
        crosses = bool(self.arguments(source)) and source.has_decoder
        return self.resolved(source).mode if crosses else ""

    def reason(self, source: ModelSource, mode: str) -> str:
        """A phrase on why the model has this mode."""
        if self.mode != AUTO:
            return "as asked"
        if source.says_cross:
            return "what the file was converted for"
        sizes = source.defaults
        d, kv, n = int(sizes["d_model"]), 2 * source.kv_width, int(sizes["n_layers"])
        if mode == "e":
            return f"a row of {d} serves all {n} layers, and each reads no more of it than of its own K and V ({kv})"
        return f"a row of the encoder's output ({d}) is wider than a layer's K and V ({kv}), and every layer reads it"


def describe_cross(cross: CrossInfo) -> str:
    """A label of the cross-attention cache. cross: from Model.info()."""
    return f"cross {cross['mode']} {cross['type']} ({cross['bytes_per_row']} bytes a row: {cross['reason']})"
