"""What a fork() leaves of locks: in the child no thread is left that would give them back."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class AfterFork(Protocol):
    """Something with locks."""

    def after_fork(self) -> None:
        """Called in the child of a fork, before anything else there."""


_living: weakref.WeakSet[AfterFork] = weakref.WeakSet()


def watch(lockable: AfterFork) -> None:
    """Has its after_fork() called as long as it lives."""
    _living.add(lockable)


def _after_fork() -> None:
    for lockable in list(_living):
        lockable.after_fork()


os.register_at_fork(after_in_child=_after_fork)
