"""Progress bars: always on stderr, never in the way of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int, int], object]


def wanted(progress: bool | None) -> bool:
    """Whether to show bars: None means when stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if progress is None else progress


@contextmanager
def bar(show: bool, total: int, description: str, unit: str) -> Iterator[Update]:
    """A bar that appears once the work has taken a second; yields update(done, total)."""
    if not show:
        yield lambda done, total: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]  # here: it is as slow to import as a small model to load

    with tqdm(total=total, desc=description, unit=unit, delay=1.0, leave=False, dynamic_ncols=True) as shown:
        yield lambda done, total: shown.update(done - shown.n)


@contextmanager
def aside() -> Iterator[None]:
    """Takes bars off the terminal while something else is written to it."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:  # no bar was ever shown
        yield
        return
    with tqdm.tqdm.external_write_mode():
        yield
