"""A model's weights in huge pages, where reading them from there is faster: moved while the model works."""

from __future__ import annotations

import os
from contextlib import suppress
from time import perf_counter

from slimrt import core
from slimrt.errors import WontFitError
from slimrt.machine import ENVIRONMENT
from slimrt.plumbing.notes import LOG

_WORTHWHILE = 1.05  # gain from which a copy is made
_SHARE = 0.1  # of the time of work, at most, that goes into measuring and copying
_PIECE = 64 << 20  # bytes that are copied at a time
_MEASURING, _COPYING = 0.5, 0.05  # seconds that these take at first, by assumption


class HugePages:
    """Moves a model's mapped file into huge pages of this process, at the same addresses, if products are at least 5 %
    faster with them and the copy takes at most half of the available memory. The kernel may then evict the file's own.

    A copy takes about a second for each GB, which a short answer would not win back. So measuring and copying take at
    most a tenth of the time for which the model has worked: they begin after some seconds, and go on piece by piece.

    Nothing is done if SLIMRT_ACCESS is set or the file fits the CPU's caches.

    Attributes:
        gain: how many times as fast products are; 0.0: nothing was copied.
    """

    def __init__(self, file: core.GgufFile, n_threads: int):
        self.gain = 0.0
        self._file, self._n_threads, self._size = file, n_threads, file.bytes().size
        self._worked = self._spent = 0.0
        self._copied = 0
        self._next = _MEASURING  # seconds that the next piece of work should take
        self._done = bool(os.environ.get(ENVIRONMENT)) or self._size <= core.cpu_info()["cache_bytes"]

    def after(self, seconds: float) -> None:
        """Count seconds of the model's work, and do the next piece if it is time. The model must not work meanwhile."""
        self._worked += seconds
        if not self._done and self._spent + self._next <= _SHARE * self._worked:
            self._advance()

    def finish(self) -> float:
        """Do all that is left; returns the gain."""
        while not self._done:
            self._advance()
        return self.gain

    def _advance(self) -> None:
        started = perf_counter()
        (self._copy if self.gain else self._measure)()
        took = perf_counter() - started
        self._spent += took
        self._next = took if self._copied else _COPYING

    def _fits(self) -> bool:
        return 2 * (self._size - self._copied) <= core.available_memory()

    def _measure(self) -> None:
        self._done = True
        with suppress(WontFitError):
            if self._fits() and (gain := core.huge_page_gain(self._file, self._n_threads)) > _WORTHWHILE:
                self.gain, self._done = gain, False

    def _copy(self) -> None:
        piece = min(_PIECE, self._size - self._copied)
        if self._fits() and self._file.move_to_huge_pages(self._copied, piece):
            self._copied += piece
            self._done = self._copied == self._size
        else:
            self._done = True
        if self._done:
            LOG.info("%d %% of the weights were moved into huge pages (%.2f times as fast)",
                     100 * self._copied // self._size, self.gain)  # fmt: skip
            self.gain = self.gain if self._copied else 0.0
