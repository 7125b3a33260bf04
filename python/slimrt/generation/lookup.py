"""Guesses at what a text goes on with, looked up in itself, and checked many at once by the model.

Text that repeats its prompt (code, quotes, tables) says what comes next: where its last tokens stood before, others
followed (Saxena, "Prompt Lookup Decoding", 2023). A step over several guessed tokens costs little more than one over
one token; each guess is kept while the sampler draws it itself, so that the text is the one without guesses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from slimrt.generation.generate import Run
from slimrt.generation.loop import loop_of
from slimrt.generation.parts import FEW
from slimrt.generation.search import Append, Logits, Logprobs, Task
from slimrt.modes import AGING

_GRAMS = (3, 2)  # tokens that must have stood together before, the longer first
_ROOM = 64  # tokens before the end of the context where nothing is guessed any more
_PAYS = 1.05  # times as many tokens a second as without guesses, as estimated
_FIRST = 0.7  # how likely a guess is to be right, before any was checked
_NEWEST = 0.1  # weight of the newest guess in that
_FORGETS = 0.01  # of what was found, with each token that nothing was guessed for


class Lookup:
    """Where each few tokens of a text stood last."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens at the end of the text."""
        for token in tokens:
            for n in _GRAMS:
                if len(self._tokens) >= n:
                    self._after[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """What followed when the last tokens stood there before; [] if they never did."""
        for n in _GRAMS:
            if (at := self._after.get(tuple(self._tokens[-n:]))) is not None:
                return self._tokens[at : at + most]
        return []


class LookupRun(Run):
    """A text in the making with guesses, as many as pay by what steps take and how many were right."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._lookup, self._known, self._likely = Lookup(), 0, _FIRST
        self._lookup.extend(self.prompt)
        self._guesses: deque[int] = deque()  # tokens that have rows and are not part of the text yet
        self._ahead: deque[Logits] = deque()  # rows of logits that follow them, if they come true
        modes = {layer["mode"] for layer in self.runtime.info["layers"]}
        self._may_guess = modes.isdisjoint(AGING)  # rows that have aged cannot be taken back
        self._pace = loop_of(self.runtime).pace

    def _next(self, pending: Sequence[int]) -> Task[tuple[int, Logprobs | None]]:
        if not self._ahead:
            guesses = self._guess(len(pending))
            if not guesses:
                return (yield from super()._next(pending))
            self._ahead.extend((yield Append([(self.session, [*pending, *guesses])], outputs=len(guesses) + 1)))
            self._guesses.extend(guesses)
            self.drafted += len(guesses)
        return self._chosen(self._ahead.popleft())

    def _guess(self, n_pending: int) -> list[int]:
        """Guesses that are worth a step, for after so many tokens that have no rows."""
        self._lookup.extend(self.tokens[self._known :])
        self._known = len(self.tokens)
        assert self.session is not None
        room = self.runtime.n_ctx - self.session.length - _ROOM
        if not self.tokens or not self._may_guess or room <= 0:
            return []
        worth = {n: _expected(self._likely, n) / self._pace.cost(n) for n in range(1, FEW - n_pending + 1)}
        best = max(worth, key=lambda n: worth[n], default=0)
        guesses = self._lookup.guess(min(best, room)) if best and worth[best] > _PAYS else []
        if not guesses:
            self._likely += _FORGETS * (_FIRST - self._likely)
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
        self._likely += _NEWEST * (right - self._likely)

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
        super()._end()


def _expected(likely: float, n: int) -> float:
    """Tokens that a step with n guesses is expected to bring, each right with that probability while those before it
    are (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, equation 1)."""
    return n + 1.0 if likely >= 1 else (1 - likely ** (n + 1)) / (1 - likely)
