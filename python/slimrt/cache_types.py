"""The element types that a cache may have."""

from __future__ import annotations

from collections.abc import Sequence

from slimrt.arguments import unknown
from slimrt.errors import UnsupportedError

CACHE_TYPES = ("f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4")
AUTO = "auto"
DEFAULT_TYPE = "f16"


def check_type(name: object, what: str, known: Sequence[str]) -> None:
    """Raises UnsupportedError for a type that is not known; the message suggests the nearest."""
    if name not in known:
        raise UnsupportedError(unknown(what, name, known))
