# SPDX-License-Identifier: Apache-2.0
"""What the reference predicts, computed once: in a process, and among processes where SLIMRT_REMEMBERED names a folder.

The workers of a run, and the same tests on a core with sanitizers, then read what the first one computed. Nothing tells
whether the reference has changed since, so a folder must not outlive a state of the sources: .ci/run makes its own.
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
def _contents(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """functools.cache, and a file for each call: a path among the arguments stands for the contents of its file."""

    @cache
    @wraps(function)
    def call(*arguments):
        if not (folder := os.environ.get("SLIMRT_REMEMBERED")):
            return function(*arguments)
        key = [_contents(a) if isinstance(a, Path) else a for a in arguments]
        name = hashlib.sha256(repr([function.__module__, function.__qualname__, *key]).encode()).hexdigest()
        file = Path(folder) / name
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(function(*arguments)))
            part.replace(file)  # whole, for whoever reads at the same time
        return pickle.loads(file.read_bytes())

    return call
