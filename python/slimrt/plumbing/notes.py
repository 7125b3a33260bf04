"""Notes of the library: to the logger "slimrt", and to stderr where `shown` is active."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from slimrt.plumbing.progress import aside

LOG = logging.getLogger("slimrt")
LOG.addHandler(logging.NullHandler())  # else logging prints warnings to stderr in programs without handlers

_seen: ContextVar[set[str] | None] = ContextVar("notes that were shown", default=None)


def note(message: str, level: int = logging.INFO) -> None:
    """Log a message; within `shown` print it to stderr too, once."""
    LOG.log(level, message)
    seen = _seen.get()
    if seen is not None and message not in seen:
        seen.add(message)
        with aside():
            print(f"slimrt: {message}", file=sys.stderr)


def warn(message: str) -> None:
    """A UserWarning attributed to the caller's line outside slimrt."""
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").partition(".")[0] == "slimrt":
        depth += 1
    warnings.warn(message, stacklevel=depth + 1)


def tell(message: str) -> None:
    """For messages that must be seen: a note within `shown`, else a UserWarning."""
    if _seen.get() is None:
        warn(message)
    else:
        note(message, logging.WARNING)


@contextmanager
def shown(wanted: bool = True) -> Iterator[None]:
    """Within this context notes are printed to stderr, each once. wanted=False: no change."""
    before = _seen.get()
    token = _seen.set(set() if before is None else before) if wanted else None
    try:
        yield
    finally:
        if token is not None:
            _seen.reset(token)


@contextmanager
def heard(quiet: bool) -> Iterator[None]:
    """shown(); or with `quiet` nothing is printed, UserWarnings included."""
    if not quiet:
        with shown():
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
