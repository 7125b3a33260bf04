"""Guesses at what a text goes on with, made by drafters and checked many at once by the model.

A step over several guessed tokens costs little more than one over one token; each guess is kept while the sampler draws
it itself, so that the text is the one without guesses. A drafter looks them up in the text (lookup), or has a smaller
model go on with it (draft_model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from slimrt.generation.generate import Run
from slimrt.generation.lookup import Lookup
from slimrt.generation.loop import loop_of
from slimrt.generation.odds import Odds
from slimrt.generation.pace import Pace
from slimrt.generation.parts import FEW
from slimrt.generation.search import Append, Logits, Logprobs, Task
from slimrt.modes import AGING

_ROOM = 64  # tokens before the end of the context where nothing is guessed any more


class Drafter(Protocol):
    """Proposes tokens that may follow one text.

    Attributes:
        odds: of its guesses.
        spent: seconds that its proposals took in all.
    """

    odds: Odds
    spent: float

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens at the end of the text."""

    def cost(self, n: int, pace: Pace) -> float:
        """How many times as long a step takes with n guesses of this drafter as without, the guessing included."""

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        """What may follow this text, as the context holds it: at most so many tokens, [] if it has none."""

    def close(self) -> None:
        """Nothing more is asked."""


class DraftedRun(Run):
    """A text in the making with guesses, as many as pay by what steps take and how many were right."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._drafters = list[Drafter]()
        if self.options.lookup:
            self._drafters.append(Lookup())
        if self.runtime.draft is not None:
            self._drafters.append(self.runtime.draft.drafter(self.options.biases(self.ends)))
        for one in self._drafters:
            one.extend(self.prompt)
        self._known = 0
        self._asked: Odds | None = None  # of whose guesses are checked now
        self._guesses: deque[int] = deque()  # tokens that have rows and are not part of the text yet
        self._ahead: deque[Logits] = deque()  # rows of logits that follow them, if they come true
        modes = {layer["mode"] for layer in self.runtime.info["layers"]}
        self._may_guess = modes.isdisjoint(AGING)  # rows that have aged cannot be taken back
        self._pace = loop_of(self.runtime).pace

    def _next(self, pending: Sequence[int]) -> Task[tuple[int, Logprobs | None]]:
        if not self._ahead:
            guesses = self._guess(pending)
            if not guesses:
                return (yield from super()._next(pending))
            self._ahead.extend((yield Append([(self.session, [*pending, *guesses])], outputs=len(guesses) + 1)))
            self._guesses.extend(guesses)
            self.drafted += len(guesses)
        return self._chosen(self._ahead.popleft())

    def _guess(self, pending: Sequence[int]) -> list[int]:
        """Guesses that are worth a step, for after these tokens that have no rows."""
        for one in self._drafters:
            one.extend(self.tokens[self._known :])
        self._known = len(self.tokens)
        assert self.session is not None
        room = self.runtime.n_ctx - self.session.length - _ROOM
        if self.options.max_tokens > 0:  # the last token needs no guess
            room = min(room, self.options.max_tokens - len(self.tokens) - 1)
        if not self.tokens or not self._may_guess or room <= 0:
            return []
        for one in self._drafters:
            if guesses := self._proposed(one, pending, FEW - len(pending), room):
                return guesses
        return []

    def _proposed(self, drafter: Drafter, pending: Sequence[int], most: int, room: int) -> list[int]:
        """What one has to propose, as far as that pays."""
        assert self.session is not None
        best = drafter.odds.best(most, lambda n: drafter.cost(n, self._pace))
        spent = drafter.spent
        guesses = drafter.propose([*self.session.tokens, *pending], min(best, room)) if best else []
        if drafter.spent > spent:
            self.meter.add(drafter.spent - spent, 0, 0)
        if guesses:
            drafter.odds.guessed()
            self._asked = drafter.odds
        else:
            drafter.odds.rest()
        return guesses

    def _accept(self, token: int, logprobs: Logprobs | None) -> None:
        self._pending = []
        super()._accept(token, logprobs)
        if self.finish_reason is not None:
            return self._drop()
        n = 0
        while n < len(self._pending) and self._guesses and self._pending[n] == self._guesses[0]:
            self._guesses.popleft()
            n += 1
            self._learn(True)
        for _ in range(n - 1):  # rows after tokens that a grammar has forced are not asked
            self._ahead.popleft()
        if n < len(self._pending):
            if self._guesses:
                self._learn(False)
            self._drop()
        self._pending = self._pending[n:]

    def _learn(self, right: bool) -> None:
        self.accepted += right
        if self._asked is not None:
            self._asked.learn(right)

    def _drop(self) -> None:
        """Take back what was guessed and has not come."""
        assert self.session is not None
        if self._guesses:
            self.session.truncate(self.session.length - len(self._guesses))
        self._guesses.clear()
        self._ahead.clear()

    def _end(self) -> None:
        if self.session is not None:
            self._drop()
        for one in self._drafters:
            one.close()
        super()._end()
