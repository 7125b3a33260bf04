"""Objects that are closed after use, by close() or a with statement."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Makes a class with close() a context manager."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
