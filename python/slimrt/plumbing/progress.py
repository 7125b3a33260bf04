"""Progress bars, on stderr only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int, int], object]


def wanted(progress: bool | None) -> bool:
    """Whether to show bars; None: if stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if progress is None else progress


@contextmanager
def bar(show: bool, total: int, description: str, unit: str) -> Iterator[Update]:
    """A progress bar that appears after a second; yields update(done, total)."""
    if not show:
        yield lambda done, total: None
        return
    started, shown = time.monotonic(), None

    def update(done: int, total: int) -> None:
        nonlocal shown
        took = time.monotonic() - started
        if shown is None and took >= 1.0:  # not by tqdm's `delay`: a bar drawn early by aside() would never be removed
            from tqdm import tqdm  # type: ignore[import-untyped]  # imported late: it takes as long as a small model

            shown = tqdm(total=total, desc=description, unit=unit, leave=False, dynamic_ncols=True)
            shown.start_t -= took
        if shown is not None:
            shown.update(done - shown.n)

    try:
        yield update
    finally:
        if shown is not None:
            shown.close()


@contextmanager
def aside() -> Iterator[None]:
    """Clear progress bars while something else is written to the terminal."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:  # no bar was ever shown
        yield
        return
    with tqdm.tqdm.external_write_mode():
        yield
