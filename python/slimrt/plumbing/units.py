"""Sizes in bytes, parsed and formatted."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse_bytes(size: str | int) -> int:
    """Bytes of a size such as 6442450944, "6GiB", "6G" (both 1024^3) or "6.4GB" (1000^3).

    Raises:
        ValueError: not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", str(size).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"'{size}' is not a size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    value = int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(float(match[1]))
    if value <= 0:
        raise ValueError(f"'{size}': a size must be at least one byte")
    return value


def format_bytes(size: float) -> str:
    """A size with a binary unit: "5.2 GiB"."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1)):
        if round(size, digits) < 1024:  # rounded as it is shown: 1023.96 KiB are 1.0 MiB
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_both(needed: int, available: int) -> tuple[str, str]:
    """Two sizes to be compared, as format_bytes; in bytes where they differ, but would read the same."""
    both = format_bytes(needed), format_bytes(available)
    if needed != available and both[0] == both[1]:
        return f"{needed} bytes", f"{available} bytes"
    return both
