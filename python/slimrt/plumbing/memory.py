"""Memory that was freed and that the C library keeps."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return it to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
