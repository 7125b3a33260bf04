"""Locks after fork(): the child has no thread that could release those that were held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class AfterFork(Protocol):
    """An object with locks."""

    def after_fork(self) -> None:
        """Called in the child process right after the fork: replace all locks."""


_living: weakref.WeakSet[AfterFork] = weakref.WeakSet()


def watch(lockable: AfterFork) -> None:
    """Have after_fork() called in child processes, as long as the object lives (a weak reference)."""
    _living.add(lockable)


def _after_fork() -> None:
    for lockable in list(_living):
        lockable.after_fork()


os.register_at_fork(after_in_child=_after_fork)
