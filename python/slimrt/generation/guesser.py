"""Drafts by a model, for all texts that want some, in batched steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slimrt.generation.odds import Odds
from slimrt.generation.pace import Pace, Recent
from slimrt.generation.search import Guess, Logits
from slimrt.runtime.session import Session

_PLAIN_EVERY = 16  # one round of 16 drafts nothing, so that the cost of a plain step is measured again


@dataclass(eq=False)
class Drafter:
    """The draft state of one text.

    Args:
        biases: token -> value added to its draft logit. ends: end tokens, at which drafting stops.
        key: owner of the text; rows are shared only among texts with the same key.

    Attributes:
        session: in the draft model; it holds the text as last drafted, rejected tokens included.
    """

    biases: Mapping[int, float]
    ends: frozenset[int]
    key: str
    session: Session | None = None

    def close(self) -> None:
        """Free its rows."""
        if self.session is not None:
            self.session.close()
            self.session = None


@dataclass
class Going:
    """A text that is drafted for, by at most `most` tokens. sequence: in the draft model; tokens: still to compute."""

    wish: Guess
    sequence: Any
    tokens: list[int]
    most: int
    guesses: list[int] = field(default_factory=list)

    def take(self, logits: Logits) -> bool:
        """Add the likeliest token of logits (vocab,), to which it adds the biases. False: no more drafts are wanted."""
        for token, bias in self.wish.drafter.biases.items():
            if token < len(logits):
                logits[token] += bias
        token = int(np.argmax(logits))
        if token in self.wish.drafter.ends:
            return False
        self.tokens = [token]
        self.guesses.append(token)
        return len(self.guesses) < self.most


class Guesser(ABC):
    """A source of drafts for the texts of a model.

    Args:
        n_tokens: of the vocabulary; the logits of the two models may be padded to different widths.

    Attributes:
        odds: accept statistics over all drafts, since of a new text nothing is known.
        steps: by number of texts, the seconds of one draft step.
    """

    def __init__(self, n_tokens: int):
        self.odds = Odds()
        self.steps = defaultdict[int, Recent](Recent)
        self._n_tokens = n_tokens
        self._rounds = 0

    def drafter(self, biases: Mapping[int, float], ends: frozenset[int], key: str) -> Drafter:
        """The draft state of a new text."""
        return Drafter(biases, ends, key)

    def cost(self, n: int, n_texts: int, pace: Pace) -> float:
        """Duration of a step that drafts n tokens for each of n_texts and verifies them, in plain steps."""
        if not pace.alone:  # plain steps are measured first
            return float("inf")
        return pace.cost(n * n_texts) + n * self.steps[n_texts].seconds / pace.alone

    def guess(self, wishes: Sequence[Guess], pace: Pace) -> list[list[int]]:
        """Drafts for each text, made in the same steps; empty where drafting does not pay."""
        found = {id(one): list[int]() for one in wishes}
        if able := [one for one in wishes if self.can_guess(one)]:
            self._rounds += 1
            n = self.odds.best(max(one.most for one in able), lambda n: self.cost(n, len(able), pace))
            if n > 0 and self._rounds % _PLAIN_EVERY:
                with self.begin(able, n) as going:
                    self._draft(going)
                found |= {id(one.wish): one.guesses for one in going}
            if any(found.values()):
                self.odds.guessed()
            else:
                self.odds.rest()
        return [found[id(one)] for one in wishes]

    @abstractmethod
    def can_guess(self, wish: Guess) -> bool:
        """Whether this source can draft for a text."""

    @abstractmethod
    def begin(self, wishes: Sequence[Guess], n: int) -> AbstractContextManager[list[Going]]:
        """The texts ready for n drafts; texts that cannot be drafted for this time are left out."""

    @abstractmethod
    def append(self, going: Sequence[Going]) -> Logits:
        """Compute the outstanding tokens of each; logits (texts, vocab) of the next ones."""

    def _draft(self, going: Sequence[Going]) -> None:
        """Draft one token a step for each text, until all have theirs."""
        while going:
            started = time.perf_counter()
            logits = self.append(going)[:, : self._n_tokens]
            more = [one for one, row in zip(going, logits, strict=True) if one.take(row)]
            self.steps[len(going)].note(time.perf_counter() - started)
            going = more
