"""How much of prompts a step computes beside the texts of others, which wait for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

LEAST = 64  # tokens: smaller pieces make less of the weights that they read; half, where texts would wait too long
_TOO_LONG = 2  # times what they may
_UNIT = 32
_TO_STORED = 6  # a piece is at least this part of what stands before it, where each piece makes V of all rows again
_ASSUMED = 0.1  # what a token more adds to a step of one, until it is measured
_NEWEST = 0.3  # weight of the newest step in a mean


class Piece(Protocol):
    """A prompt, of which the first tokens may be cut off for a step; `before`: rows that it follows."""

    before: int

    def __len__(self) -> int: ...
    def cut(self, n: int) -> None: ...


P = TypeVar("P", bound=Piece)


class Recent:
    """Seconds that something takes: the median of the last times, so that one in which the machine had other things to
    do says nothing.

    Attributes:
        seconds: 0: not measured yet.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = deque[float](maxlen=5)

    def note(self, seconds: float) -> None:
        self._last.append(seconds)
        self.seconds = sorted(self._last)[len(self._last) // 2]

    @property
    def sure(self) -> bool:
        """Whether that is more than a guess."""
        return len(self._last) >= 3


class Pace:
    """Sizes pieces of prompts by what steps took so far.

    Args:
        stall: seconds that a text may wait for a piece.
        share: of the time that prompts get at least while there are both; more where they are more than the texts, as
            each sequence is worth as much. After a piece texts go on alone for the rest.
        batch: tokens of a step while nobody waits (n_batch).
        recomputes: a piece costs time for all rows that stand before it (modes k, v and x).
    """

    def __init__(self, stall: float = 0.4, share: float = 0.8, batch: int = 512, recomputes: bool = False):
        self.stall, self.share, self.batch, self.recomputes = stall, share, batch, recomputes
        self._token = 0.0  # seconds that a token of a prompt takes
        self._texts = 0.0  # seconds that a step of texts alone takes
        self._steps = defaultdict[int, Recent](Recent)  # of so many tokens of texts
        self._sizes = list[int]()  # of these, in order, that were measured
        self._n_texts = 1  # of the last such step
        self._owed = 0.0  # seconds that texts have still to go on alone
        self._waiting = 0  # prompts of the last step that had texts beside it

    @property
    def tokens_per_second(self) -> float:
        """Of prompts, as measured; 0: not yet."""
        return 1 / self._token if self._token else 0.0

    @property
    def n_texts(self) -> int:
        """Of the last step of texts alone."""
        return self._n_texts

    @property
    def alone(self) -> float:
        """Seconds that a step of a token for each of these texts takes; 0: not measured well yet."""
        steps = self._steps[self._n_texts]
        return steps.seconds if steps.sure else 0.0

    def cost(self, more: int) -> float:
        """How many times as long a step takes with so many tokens more than one for each of the texts there are.

        As if it grew evenly between steps that were measured; no more than the same tokens one after the other.
        """
        n, tokens = self._n_texts, self._n_texts + more
        if not (alone := self._steps[n].seconds):
            return 1 + _ASSUMED * more / n
        at = bisect_left(self._sizes, tokens)
        below = self._sizes[at - 1]
        cost = self._steps[below].seconds / alone
        if at == len(self._sizes):
            cost += _ASSUMED * (tokens - below) / n
        else:
            above = self._sizes[at]
            cost += (self._steps[above].seconds / alone - cost) * (tokens - below) / (above - below)
        return min(cost, 1 + more / n)

    def note(self, seconds: float, n_prompt: int, n_texts: int, n_tokens: int) -> None:
        """Learn from a step: of so many tokens of prompts, and of so many texts beside them with so many tokens."""
        texts = n_texts > 0
        if n_prompt == 0:
            self._texts = _mean(self._texts, seconds)
            if not self._steps[n_tokens].seconds:
                insort(self._sizes, n_tokens)
            self._steps[n_tokens].note(seconds)
            self._n_texts = n_texts
            self._owed = max(self._owed - seconds, 0.0)
            return
        spent = max(seconds - (self._texts if texts else 0.0), seconds / 10)
        if n_prompt >= LEAST // 2 or not self._token:
            self._token = _mean(self._token, spent / n_prompt)
        if texts:
            share = max(self.share, self._waiting / (self._waiting + n_texts))
            self._owed += spent * (1 - share) / share

    def pieces(self, prompts: Sequence[P], texts: bool) -> list[P]:
        """Those of the prompts (oldest first) that a step takes up, cut to size: half of the tokens go to the oldest,
        half to the one with the least left. None while texts have still to go on alone."""
        self._waiting = len(prompts)
        if texts and self._owed > 0:
            return []
        least = self._least()
        budget = self._budget(least) if texts else self.batch
        chosen: list[P] = []
        for prompt in _oldest_and_shortest(prompts, texts):
            share = max(budget // 2, least) if not chosen and len(prompts) > 1 and texts else budget
            if share < min(least, len(prompt)) and chosen:
                break
            prompt.cut(max(share, prompt.before // _TO_STORED if self.recomputes else 0))
            budget -= len(prompt)
            chosen.append(prompt)
            if budget <= 0:
                break
        return chosen

    def _least(self) -> int:
        return LEAST if LEAST * self._token + self._texts <= _TOO_LONG * self.stall else LEAST // 2

    def _budget(self, least: int) -> int:
        if not self._token:
            return LEAST
        return max(int(max(self.stall - self._texts, 0.0) / self._token) // _UNIT * _UNIT, least)


def _oldest_and_shortest(prompts: Sequence[P], texts: bool) -> list[P]:
    if len(prompts) < 2 or not texts:
        return list(prompts)
    first, *others = prompts
    return [first, *sorted(others, key=len)]


def _mean(before: float, newest: float) -> float:
    return newest if before == 0.0 else before + _NEWEST * (newest - before)
