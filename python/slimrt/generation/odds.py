"""Accept rates of drafts, and how many drafts a step pay (speculative decoding)."""

from __future__ import annotations

from collections.abc import Callable

_MIN_SPEEDUP = 1.05  # expected speedup from which drafting pays
_NEWEST = 0.1  # weight of the newest draft in the moving average; the first drafts weigh more
_ASSUMED = 3  # the assumed accept rate counts as much as this many drafts
_TRIALS = 0.02  # share of the time, at most, that goes into trial drafts while drafting does not pay


class Odds:
    """The accept statistics of a drafter.

    Args:
        likely: accept rate assumed at first.
    """

    def __init__(self, likely: float = 0.7):
        self._accept_rate, self._n_drafts, self._n_undrafted = likely, 0, 0

    def best(self, most: int, cost: Callable[[int], float]) -> int:
        """How many drafts, at most `most`, bring the most tokens per time; 0: drafting does not pay.

        While it does not pay, one draft is tried now and then, so rarely that trials take at most _TRIALS of the time.

        Args:
            cost: duration of a step with n drafts, making them included, relative to a step without drafts.
        """
        costs = {n: cost(n) for n in range(1, most + 1)}
        worth = {n: _expected(self._accept_rate, n) / costs[n] for n in costs}
        best = max(worth, key=lambda n: worth[n], default=0)
        if best and worth[best] <= _MIN_SPEEDUP:
            return 1 if self._n_undrafted * _TRIALS >= costs[1] else 0
        return best

    def rest(self) -> None:
        """Count a token for which nothing was drafted."""
        self._n_undrafted += 1

    def guessed(self) -> None:
        """Note that a step had drafts."""
        self._n_undrafted = 0

    def learn(self, right: bool) -> None:
        """Count a draft as accepted (right) or rejected."""
        self._n_drafts += 1
        self._accept_rate += max(_NEWEST, 1 / (_ASSUMED + self._n_drafts)) * (right - self._accept_rate)


def _expected(likely: float, n: int) -> float:
    """Expected tokens from a step with n drafts, each accepted with probability `likely` if those before it were:
    (1 - likely^(n + 1)) / (1 - likely) (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    2023, equation 1)."""
    return n + 1.0 if likely >= 1 else (1 - likely ** (n + 1)) / (1 - likely)
