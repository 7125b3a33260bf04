"""Objects that are closed after use, by close() or a with statement."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Makes a class with close() a context manager. ValueError: one that is `closed` is entered."""

    def close(self) -> None:
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return False

    def __enter__(self) -> Self:
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
