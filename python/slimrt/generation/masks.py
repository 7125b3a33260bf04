"""Token masks of grammars, computed in a thread while the model computes the step before them."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from slimrt.generation.grammar import Matcher
from slimrt.plumbing.forking import watch

Mask = NDArray[np.uint32]


class NothingMayCome(Exception):
    """No token is allowed next: the vocabulary cannot spell what the grammar requires."""


class Masks:
    """Computes the masks of all texts, one after the other, in one thread.

    Attributes:
        made: masks so far. seconds: computing them took. waited: seconds that steps waited for them.
    """

    def __init__(self) -> None:
        self.made, self.seconds, self.waited = 0, 0.0, 0.0
        self._thread: ThreadPoolExecutor | None = None
        watch(self)

    def thread(self) -> ThreadPoolExecutor:
        """Their thread, which starts when it first has work."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "slimrt-masks")
        return self._thread

    def begin(self, matcher: Matcher) -> Future[Mask] | None:
        """Begin to compute the mask of the next token; the matcher must not be used until it is ready. None: any token
        is allowed."""
        if matcher.is_free:
            return None
        return self.thread().submit(self._make, matcher)

    def wait(self, mask: Future[Mask] | Mask | None) -> Mask | None:
        """The mask, once it is ready. Raises NothingMayCome, GrammarError."""
        if not isinstance(mask, Future):
            return mask
        began = time.perf_counter()
        try:
            return mask.result()
        finally:
            self.waited += time.perf_counter() - began

    def after_fork(self) -> None:
        """Threads do not survive a fork: the child starts one of its own."""
        self._thread = None

    def _make(self, matcher: Matcher) -> Mask:
        began = time.perf_counter()
        mask = matcher.mask()
        self.made, self.seconds = self.made + 1, self.seconds + time.perf_counter() - began
        if not mask.any():
            raise NothingMayCome
        return mask


MASKS = Masks()
