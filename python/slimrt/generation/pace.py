"""Chunked prefill: how many tokens of prompts a step computes beside the texts of others, which wait for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

LEAST = 64  # tokens of a chunk, at least: smaller ones reuse the weights too little; half where texts wait too long
_TOO_LONG = 2  # times `stall`, for a step with a chunk of LEAST
_UNIT = 32
_TO_STORED = 6  # where each chunk computes V of all rows before it again, it has at least 1/6 of their number
_ASSUMED = 0.1  # cost of a further token in a step, relative to a step of one, until it is measured
_NEWEST = 0.3  # weight of the newest step in a moving average


class Piece(Protocol):
    """A prompt that can be cut to its first n tokens for a step; `before`: cached rows before these."""

    before: int

    def __len__(self) -> int: ...
    def cut(self, n: int) -> None: ...


P = TypeVar("P", bound=Piece)


class Recent:
    """The median of the last five durations of something, which ignores single outliers.

    Attributes:
        seconds: the median; 0: not measured yet.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = deque[float](maxlen=5)

    def note(self, seconds: float) -> None:
        self._last.append(seconds)
        self.seconds = sorted(self._last)[len(self._last) // 2]

    @property
    def sure(self) -> bool:
        """Whether there are enough measurements for a median."""
        return len(self._last) >= 3


class Pace:
    """Sizes chunks of prompts by the measured durations of steps.

    Args:
        stall: seconds that a text may wait for a chunk.
        share: of the time that prompts get at least while texts are decoded beside them; more if prompts outnumber
            texts, by the number of sequences. After a chunk the texts are decoded alone for the rest of the time.
        batch: tokens of a step while nobody waits (n_batch).
        recomputes: the cost of a chunk grows with the rows before it (modes k, v and x).
    """

    def __init__(self, stall: float = 0.4, share: float = 0.8, batch: int = 512, recomputes: bool = False):
        self.stall, self.share, self.batch, self.recomputes = stall, share, batch, recomputes
        self._token_seconds = 0.0  # seconds for a token of a prompt
        self._step_seconds = 0.0  # seconds for a step of texts alone
        self._steps = defaultdict[int, Recent](Recent)  # steps of texts alone, by their number of tokens
        self._sizes = list[int]()  # the numbers of tokens that were measured, sorted
        self._n_texts = 1  # texts in the last such step
        self._owed = 0.0  # seconds that texts are still to be decoded alone
        self._waiting = 0  # prompts in the last step

    @property
    def tokens_per_second(self) -> float:
        """Measured speed of prefill; 0: not measured yet."""
        return 1 / self._token_seconds if self._token_seconds else 0.0

    @property
    def n_texts(self) -> int:
        """Texts in the last step without prompts."""
        return self._n_texts

    @property
    def alone(self) -> float:
        """Seconds for a step of one token for each of n_texts; 0: not measured well enough yet."""
        steps = self._steps[self._n_texts]
        return steps.seconds if steps.sure else 0.0

    def cost(self, more: int) -> float:
        """Duration of a step with `more` tokens beyond one for each of n_texts, relative to a step without them.

        Interpolated linearly between measured sizes; at most what the same tokens would take one after the other.
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
        """Record a step of n_prompt tokens of prompts, and n_tokens of n_texts texts."""
        texts = n_texts > 0
        if n_prompt == 0:
            self._step_seconds = _mean(self._step_seconds, seconds)
            if not self._steps[n_tokens].seconds:
                insort(self._sizes, n_tokens)
            self._steps[n_tokens].note(seconds)
            self._n_texts = n_texts
            self._owed = max(self._owed - seconds, 0.0)
            return
        spent = max(seconds - (self._step_seconds if texts else 0.0), seconds / 10)
        if n_prompt >= LEAST // 2 or not self._token_seconds:
            self._token_seconds = _mean(self._token_seconds, spent / n_prompt)
        if texts:
            share = max(self.share, self._waiting / (self._waiting + n_texts))
            self._owed += spent * (1 - share) / share

    def pieces(self, prompts: Sequence[P], texts: bool) -> list[P]:
        """The prompts (oldest first) that a step computes, cut to size: half of the budget goes to the oldest, half to
        the shortest. Empty while texts are still to be decoded alone."""
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
        return LEAST if LEAST * self._token_seconds + self._step_seconds <= _TOO_LONG * self.stall else LEAST // 2

    def _budget(self, least: int) -> int:
        if not self._token_seconds:
            return LEAST
        return max(int(max(self.stall - self._step_seconds, 0.0) / self._token_seconds) // _UNIT * _UNIT, least)


def _oldest_and_shortest(prompts: Sequence[P], texts: bool) -> list[P]:
    if len(prompts) < 2 or not texts:
        return list(prompts)
    first, *others = prompts
    return [first, *sorted(others, key=len)]


def _mean(before: float, newest: float) -> float:
    return newest if before == 0.0 else before + _NEWEST * (newest - before)
