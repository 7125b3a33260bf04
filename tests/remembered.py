# SPDX-License-Identifier: Apache-2.0
"""What the reference predicts, and goldens converted, once: in a process, and among processes where SLIMRT_REMEMBERED
names a folder.

The workers of a run, and the same tests on a core with sanitizers, then read what the first one computed. Nothing tells
whether the sources have changed since, so a folder must not outlive a state of them: .ci/run makes its own.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


@cache
def _digest(path: Path, _changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _stands_for(argument: object) -> object:
    """Of a file its contents, as they are now: tests write models anew at the same path."""
    return _digest(argument, argument.stat().st_mtime_ns) if isinstance(argument, Path) else argument


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """functools.cache, and a file for each call: a path among the arguments stands for the contents of its file."""
    known: dict[str, Result] = {}

    @wraps(function)
    def call(*arguments):
        key = [function.__module__, function.__qualname__, *map(_stands_for, arguments)]
        name = hashlib.sha256(repr(key).encode()).hexdigest()
        if name not in known:
            known[name] = _shared(name, lambda: function(*arguments))
        return known[name]

    return call


def _shared(name: str, compute: Callable[[], Result]) -> Result:
    """From the folder's file of this name, which is written first where it is not there."""
    if not (folder := os.environ.get("SLIMRT_REMEMBERED")):
        return compute()
    file = Path(folder) / name
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(compute()))
        part.replace(file)  # whole, for whoever reads at the same time
    return pickle.loads(file.read_bytes())
