"""Guesses at what texts go on with, by a model: of all texts that want some at once, in the same steps."""

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

_PLAIN = 16  # one of so many rounds is left out, so that what a step takes without guesses is measured again


@dataclass(eq=False)
class Drafter:
    """What guesses for one text.

    Args:
        biases: what is added to logits of tokens there. ends: tokens that nothing follows.
        key: whose text it is: with texts of the same key it may share rows.

    Attributes:
        session: in the guessing model, of the text as it was last gone on with, wrong guesses included.
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
    """A text that guesses are made for, at most so many. sequence: of the guessing model; tokens: that it lacks."""

    wish: Guess
    sequence: Any
    tokens: list[int]
    most: int
    guesses: list[int] = field(default_factory=list)

    def take(self, logits: Logits) -> bool:
        """Go on with the likeliest token of logits (vocab,), which it changes. False: there are enough guesses."""
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
    """Guesses for the texts of a model.

    Args:
        n_tokens: of the vocabulary; logits may be wider, by other numbers in two models.

    Attributes:
        odds: of all guesses; of a new text nothing else is known.
        steps: what a step of guesses for so many texts takes.
    """

    def __init__(self, n_tokens: int):
        self.odds = Odds()
        self.steps = defaultdict[int, Recent](Recent)
        self._n_tokens = n_tokens
        self._rounds = 0

    def drafter(self, biases: Mapping[int, float], ends: frozenset[int], key: str) -> Drafter:
        """For one text."""
        return Drafter(biases, ends, key)

    def cost(self, n: int, n_texts: int, pace: Pace) -> float:
        """How many times as long a step takes with n guesses for each of so many texts as without, these included."""
        if not pace.alone:  # steps without guesses are measured first
            return float("inf")
        return pace.cost(n * n_texts) + n * self.steps[n_texts].seconds / pace.alone

    def guess(self, wishes: Sequence[Guess], pace: Pace) -> list[list[int]]:
        """What may follow each text, all of them in the same steps; nothing where that does not pay."""
        found = {id(one): list[int]() for one in wishes}
        if able := [one for one in wishes if self.can_guess(one)]:
            self._rounds += 1
            n = self.odds.best(max(one.most for one in able), lambda n: self.cost(n, len(able), pace))
            if n > 0 and self._rounds % _PLAIN:
                with self.begin(able, n) as going:
                    self._go_on(going)
                found |= {id(one.wish): one.guesses for one in going}
            if any(found.values()):
                self.odds.guessed()
            else:
                self.odds.rest()
        return [found[id(one)] for one in wishes]

    @abstractmethod
    def can_guess(self, wish: Guess) -> bool:
        """Whether a text is one that it has guesses for."""

    @abstractmethod
    def begin(self, wishes: Sequence[Guess], n: int) -> AbstractContextManager[list[Going]]:
        """The texts as n guesses go on from them: without those that have to do without this time."""

    @abstractmethod
    def append(self, going: Sequence[Going]) -> Logits:
        """Compute the tokens that they lack; logits (texts, vocab) of what follows."""

    def _go_on(self, going: Sequence[Going]) -> None:
        """A token more for each, until all have theirs."""
        while going:
            started = time.perf_counter()
            logits = self.append(going)[:, : self._n_tokens]
            more = [one for one, row in zip(going, logits, strict=True) if one.take(row)]
            self.steps[len(going)].note(time.perf_counter() - started)
            going = more
