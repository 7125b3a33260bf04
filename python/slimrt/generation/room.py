"""Room in the cache for the tokens of a step: where there is not enough for all, who waits and who gives rows up."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from slimrt.generation.pace import Pace
from slimrt.generation.parts import Part
from slimrt.generation.prefix import PrefixTree
from slimrt.generation.sequences import BLOCK, Ids, Sequences
from slimrt.generation.tickets import Ticket


class Idle(Protocol):
    """What holds rows that no step needs now."""

    def give_up(self) -> None: ...


class Room:
    """The rows of a model's cache, as those find them whose tokens a step computes.

    Attributes:
        prefixes: rows that texts have left for others that begin alike; None: of none.
        idle: what else holds rows that no step needs now, and can have them computed again.
    """

    def __init__(self, engine: Sequences):
        self.prefixes: PrefixTree | None = None
        self.idle: weakref.WeakSet[Idle] = weakref.WeakSet()
        self._engine = engine
        self._running: Sequence[Ticket[Any]] = ()

    def parts(self, asking: Sequence[Ticket[Any]], running: Sequence[Ticket[Any]], pace: Pace) -> list[Part]:
        """What goes into a step: every text, and of prompts as much as the texts of others may wait for.

        Args:
            asking: those who want tokens computed. running: all whose rows may be given up for them.
        """
        self._running = running
        wanted = [Part(one, self._engine) for one in asking]
        scores = [part for part in wanted if part.scores]  # whose rows are large: one prompt's at a time
        wanted = [part for part in wanted if part not in scores[1:]]
        oldest = min((part.ticket.order for part in wanted), default=0)
        texts = self._with_room([part for part in wanted if part.few], oldest)
        prompts = [part for part in wanted if not part.few]
        if is_shared([part.ticket for part in wanted]):
            prompts = pace.pieces(prompts, bool(texts))
        chosen = list(texts)
        for part in prompts:
            if self._finds_room(part, chosen):
                chosen.append(part)
        if chosen or not wanted:
            return chosen
        return self._forced(min(wanted, key=lambda part: part.ticket.order))

    def _with_room(self, texts: list[Part], oldest: int) -> list[Part]:
        """The texts for whose next tokens there is room, once the youngest have given up their rows; others wait."""
        while texts and not self._has_room([item for part in texts for item in part.items]):
            victim = self._youngest(min(part.ticket.order for part in texts))
            if victim is not None:
                self.give_up(victim)
            elif len(texts) > 1 or texts[0].ticket.order > oldest:
                victim = max((part.ticket for part in texts), key=lambda one: one.order)
            elif not self._let_go():
                break  # nobody else has what it needs: the engine says what that is
            texts = [part for part in texts if part.ticket is not victim]
        return texts

    def _finds_room(self, part: Part, chosen: Sequence[Part]) -> bool:
        """Whether a prompt may begin or go on: as a whole, beside a block more for each of the others."""
        reserve = [(of, ids + [0] * BLOCK) for other in chosen for of, ids in other.items]
        return self._has_room([*reserve, *part.all_items])

    def _forced(self, part: Part) -> list[Part]:
        """The oldest, where nobody finds room: all the others give up their rows for it, one after the other."""
        while not self._has_room(part.all_items):
            if victim := self._youngest(part.ticket.order):
                self.give_up(victim)
            elif not self._let_go():
                break
        return [part]

    def _let_go(self) -> bool:
        """Has prefixes forget what they cannot free, since texts that go on from it hold the same blocks: these need no
        copy of the last one then, for which there is no room. False: they have nothing."""
        if self.prefixes is None or not any(self.prefixes.held):
            return False
        self.prefixes.clear()
        return True

    def _has_room(self, items: Sequence[tuple[Any, Ids]]) -> bool:
        """Whether tokens find room, once the prefixes and all else that nobody uses have given up what that takes."""
        blocks = sum(-(-len(ids) // BLOCK) for _, ids in items)
        while not self._engine.has_room(items):
            if self.prefixes is not None and self.prefixes.evict(max(blocks - self._engine.free_blocks(), 1)):
                continue
            if not self.idle:
                return False
            self.idle.pop().give_up()
        return True

    def _youngest(self, older_than: int) -> Ticket[Any] | None:
        """The youngest, but not the oldest of those who ask, whose rows can be computed again."""
        young = [one for one in self._running if one.order > older_than and self._engine.gives_up(one.wants)]
        return max(young, key=lambda one: one.order, default=None)

    def give_up(self, victim: Ticket[Any]) -> None:
        """Free the rows of one, who has them computed again."""
        victim.preemptions += 1
        self._engine.give_up(victim.wants)


def is_shared(asking: Sequence[Ticket[Any]]) -> bool:
    """Whether others wait for what these want, or may come at any time."""
    return len({one.call for one in asking}) > 1 or any(one.eager for one in asking)
