"""Tasks that wait to begin, and which one is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from slimrt.generation.tickets import Call, Ticket

Tickets = Sequence[Ticket[Any]]


class Queue:
    """Tickets that have not begun. Those of one owner and call that need as many sequences are alike but for their age,
    so that only the oldest of them that some thread waits for is looked at: there may be thousands.

    Changed under the loop's lock; read from any thread.
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[str, Call, int], list[Ticket[Any]]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._alike.values())))

    def __iter__(self) -> Iterator[Ticket[Any]]:
        return chain.from_iterable(list(self._alike.values()))

    def add(self, one: Ticket[Any]) -> None:
        self._alike.setdefault((one.key, one.call, one.needs), []).append(one)

    def discard(self, one: Ticket[Any]) -> None:
        kind = (one.key, one.call, one.needs)
        if one in (alike := self._alike.get(kind, [])):
            alike.remove(one)
            if not alike:
                del self._alike[kind]

    def next(self, running: Tickets, only: Tickets | None, width: int | None) -> Ticket[Any] | None:
        """The task that begins next, beside those that run; None: there is none, or too few sequences are left."""
        of_key, of_call = Counter(one.key for one in running), Counter[Call]()
        for one in running:  # streams that nobody reads do not count
            of_call[one.call] += one.needs if attended(one, only) else 0
        oldest = [
            next((one for one in alike if attended(one, only)), None)
            for (_, call, needs), alike in list(self._alike.items())
            if _fits(needs, of_call[call], call.width)
        ]
        asking = [one for one in oldest if one is not None]
        first = min(asking, key=lambda one: (of_key[one.key], of_call[one.call], one.order), default=None)
        return first if first is not None and _fits(first.needs, of_call.total(), width) else None


def attended(one: Ticket[Any], only: Tickets | None) -> bool:
    """Whether a step is for this task: some thread waits for it or it is eager; in a callback, if it is in `only`."""
    return one in only if only is not None else one.eager or one.awaited > 0


def _fits(needs: int, used: int, width: int | None) -> bool:
    """Whether a task finds enough sequences; one that needs more than `width` runs alone."""
    return width is None or used == 0 or used + needs <= width
