"""Speculative decoding: draft tokens, verified several at a time by the model.

A step over several drafted tokens costs little more than one over a single token. A draft is accepted while the sampler
draws the same token from the model's own logits, so the text is the same as without drafts. Drafts come from the text
itself (lookup) or from a smaller model (draft_model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from slimrt.generation.generate import Run
from slimrt.generation.guesser import Drafter
from slimrt.generation.lookup import Lookup
from slimrt.generation.loop import loop_of
from slimrt.generation.odds import Odds
from slimrt.generation.parts import FEW
from slimrt.generation.search import Append, Guess, Logits, Logprobs, Task
from slimrt.modes import AGING

_ROOM = 64  # with fewer tokens of context left nothing is drafted
_LEARNED = 8192  # tokens of a prompt whose n-grams a step notes: ten milliseconds for which others' texts wait


class DraftedRun(Run):
    """A text generated with speculative decoding: with as many drafts as pay (odds.py, pace.py)."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._lookup: Lookup | None = None
        self._drafter: Drafter | None = None
        self._n_learned = 0  # tokens of the text that the lookup has seen
        self._odds: Odds | None = None  # accept statistics of the draft model, if the current drafts are its
        self._drafts: deque[int] = deque()  # drafts that have cache rows but are not accepted yet
        self._draft_logits: deque[Logits] = deque()  # rows of logits after each of these drafts, used if it is accepted
        modes = {layer["mode"] for layer in self.runtime.info["layers"]}
        self._may_guess = modes.isdisjoint(AGING)  # aged rows cannot be truncated
        self._pace = loop_of(self.runtime).pace

    def _next(self, pending: Sequence[int]) -> Task[tuple[int, Logprobs | None]]:
        if not self._draft_logits:
            guesses = yield from self._guess(pending)
            if not guesses:
                return (yield from super()._next(pending))
            self._draft_logits.extend((yield Append([(self.session, [*pending, *guesses])], outputs=len(guesses) + 1)))
            self._drafts.extend(guesses)
            self.drafted += len(guesses)
        return self._chosen(self._draft_logits.popleft())

    def _guess(self, pending: Sequence[int]) -> Task[list[int]]:
        """Draft tokens to follow `pending` (accepted tokens without rows); empty if drafting does not pay."""
        assert self.session is not None
        room = self.runtime.n_ctx - self.session.length - _ROOM
        if self.options.max_tokens > 0:  # the last token needs no guess
            room = min(room, self.options.max_tokens - len(self.tokens) - 1)
        most = min(FEW - len(pending), room)
        if not self.tokens or not self._may_guess or most <= 0:
            return []
        if self.options.lookup and (guesses := self._looked_up(most)):
            self._odds = None
            return guesses
        if (draft := self.runtime.draft) is None:
            return []
        if self._drafter is None:
            self._drafter = draft.drafter(self.options.biases(self.ends), self.ends, self.key)
        self._odds = draft.odds
        found: list[int] = yield Guess(self.session, [*self.session.tokens, *pending], self._drafter, most)
        return found

    def _looked_up(self, most: int) -> list[int]:
        """Drafts from the text itself: as many as pay if every text of the step drafts as many."""
        if (lookup := self._lookup) is None:  # of texts under way alone: tables are large
            lookup = self._lookup = Lookup()
        lookup.extend(self.prompt[len(lookup) : len(lookup) + _LEARNED])
        if len(lookup) < len(self.prompt):
            return []
        lookup.learn(self.tokens[self._n_learned :])
        self._n_learned = len(self.tokens)
        guesses = lookup.guess(most)
        del guesses[lookup.odds.best(len(guesses), lambda n: self._pace.cost(n * self._pace.n_texts)) :]
        if guesses:
            lookup.odds.guessed()
        else:
            lookup.odds.rest()
        return guesses

    def _accept(self, token: int, logprobs: Logprobs | None) -> None:
        self._pending = []
        super()._accept(token, logprobs)
        if self.finish_reason is not None:
            return self._drop()
        n = 0
        while n < len(self._pending) and self._drafts and self._pending[n] == self._drafts[0]:
            self._drafts.popleft()
            n += 1
            self._learn(True)
        for _ in range(n - 1):  # tokens forced by a grammar need no choice: their rows of logits are skipped
            self._draft_logits.popleft()
        if n < len(self._pending):
            if self._drafts:
                self._learn(False)
            self._drop()
        self._pending = self._pending[n:]

    def _shift(self) -> bool:
        """Drafts go first: they are no part of the text, and may be all that does not fit beside forced tokens."""
        assert self.session is not None
        self._drop()
        return self.session.length + len(self._pending) <= self.runtime.n_ctx or super()._shift()

    def _learn(self, right: bool) -> None:
        self.accepted += right
        if self._odds is not None:
            self._odds.learn(right)

    def _drop(self) -> None:
        """Truncate the drafts that were not accepted."""
        assert self.session is not None
        if self._drafts:
            self.session.cut(self.session.length - len(self._drafts))
        self._drafts.clear()
        self._draft_logits.clear()

    def _end(self) -> None:
        if self.session is not None and not self.session.closed:
            self._drop()
        if self._drafter is not None:
            self._drafter.close()
        self._lookup = None
        super()._end()
