"""Cache room for the tokens of a step: if there is too little for all, who waits and who is preempted."""

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
    """A holder of rows that no step needs now, which can be computed again."""

    def give_up(self) -> None: ...


class Room:
    """Allocates the rows of a model's cache to the tasks of a step.

    Attributes:
        prefixes: the prefix cache; None: not used.
        idle: other holders of rows that no step needs now.
    """

    def __init__(self, engine: Sequences):
        self.prefixes: PrefixTree | None = None
        self.idle: weakref.WeakSet[Idle] = weakref.WeakSet()
        self._engine = engine
        self._running: Sequence[Ticket[Any]] = ()

    def parts(self, asking: Sequence[Ticket[Any]], running: Sequence[Ticket[Any]], pace: Pace) -> list[Part]:
        """The parts of a step: all texts, and as much of prompts as the texts of others may wait for.

        Args:
            asking: tasks that want tokens computed. running: tasks that may be preempted.
        """
        self._running = running
        wanted = [Part(one, self._engine) for one in asking]
        scores = [part for part in wanted if part.scores]  # logits of all tokens are large: one such prompt a step
        wanted = [part for part in wanted if part not in scores[1:]]
        oldest = min((part.ticket.order for part in wanted), default=0)
        texts = self._with_room([part for part in wanted if part.few], oldest)
        # Made anew: one that gave up its rows for the texts has to compute them again.
        prompts = [Part(part.ticket, self._engine) for part in wanted if not part.few]
        if is_shared([part.ticket for part in wanted]):
            prompts = pace.pieces(prompts, bool(texts))
        chosen = list(texts)
        for part in prompts:
            if self._prompt_fits(part, chosen):
                chosen.append(part)
        if chosen or not wanted:
            return chosen
        return self._forced(min(wanted, key=lambda part: part.ticket.order))

    def _with_room(self, texts: list[Part], oldest: int) -> list[Part]:
        """The texts whose next tokens find room, after preempting the youngest tasks; the other texts wait."""
        while texts and not self._has_room([item for part in texts for item in part.items]):
            victim = self._youngest(min(part.ticket.order for part in texts))
            if victim is not None:
                self.give_up(victim)
            elif len(texts) > 1 or texts[0].ticket.order > oldest:
                victim = max((part.ticket for part in texts), key=lambda one: one.order)
            elif not self._clear_prefixes():
                break  # nothing is left to free: the engine raises the error
            texts = [part for part in texts if part.ticket is not victim]
        return texts

    def _prompt_fits(self, part: Part, chosen: Sequence[Part]) -> bool:
        """Whether a prompt fits as a whole, beside one more block for each chosen sequence."""
        reserve = [(of, ids + [0] * BLOCK) for other in chosen for of, ids in other.items]
        return self._has_room([*reserve, *part.all_items])

    def _forced(self, part: Part) -> list[Part]:
        """The oldest task if nothing fits: all others are preempted for it, one after the other."""
        while not self._has_room(part.all_items):
            if victim := self._youngest(part.ticket.order):
                self.give_up(victim)
            elif not self._clear_prefixes():
                break
        return [part]

    def _clear_prefixes(self) -> bool:
        """Clear the prefix cache, even of blocks that running texts share: a text that shares its last block would have
        to copy it, for which there is no room. False: it was empty."""
        if self.prefixes is None or not any(self.prefixes.held):
            return False
        self.prefixes.clear()
        return True

    def _has_room(self, items: Sequence[tuple[Any, Ids]]) -> bool:
        """Whether tokens fit, after evicting prefixes and idle rows as needed."""
        blocks = sum(-(-len(ids) // BLOCK) for _, ids in items)
        while not self._engine.has_room(items):
            if self.prefixes is not None and self.prefixes.evict(max(blocks - self._engine.free_blocks(), 1)):
                continue
            if not self.idle:
                return False
            self.idle.pop().give_up()
        return True

    def _youngest(self, older_than: int) -> Ticket[Any] | None:
        """The youngest running task whose rows can be computed again, if younger than `older_than`."""
        young = [one for one in self._running if one.order > older_than and self._engine.gives_up(one.wants)]
        return max(young, key=lambda one: one.order, default=None)

    def give_up(self, victim: Ticket[Any]) -> None:
        """Preempt a task: free its rows, which it computes again later."""
        victim.preemptions += 1
        self._engine.give_up(victim.wants)


def is_shared(asking: Sequence[Ticket[Any]]) -> bool:
    """Whether several calls share the step, or may join at any time (eager tasks)."""
    return len({one.call for one in asking}) > 1 or any(one.eager for one in asking)
