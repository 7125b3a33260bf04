"""How likely guesses are to be right, and how many of them pay."""

from __future__ import annotations

from collections.abc import Callable

_PAYS = 1.05  # times as many tokens a second as without guesses, as estimated
_NEWEST = 0.1  # weight of the newest guess in that, or more of the first ones
_ASSUMED = 3  # guesses that count as much as what was assumed before them
_TRIALS = 0.02  # of the time, at most, for guesses that do not pay


class Odds:
    """What is known of the guesses of a drafter.

    Args:
        likely: how likely one is to be right, before any is known.
    """

    def __init__(self, likely: float = 0.7):
        self._likely, self._known, self._idle = likely, 0, 0

    def best(self, most: int, cost: Callable[[int], float]) -> int:
        """How many guesses, at most so many, bring the most tokens in the time of a step without any; 0: none pays.

        Where none does one is tried now and then, when that takes no more than its share of the time since the last.

        Args:
            cost: how many times as long a step takes with n guesses, the guessing included.
        """
        costs = {n: cost(n) for n in range(1, most + 1)}
        worth = {n: _expected(self._likely, n) / costs[n] for n in costs}
        best = max(worth, key=lambda n: worth[n], default=0)
        if best and worth[best] <= _PAYS:
            return 1 if self._idle * _TRIALS >= costs[1] else 0
        return best

    def rest(self) -> None:
        """Nothing was guessed for a token."""
        self._idle += 1

    def guessed(self) -> None:
        """Something was."""
        self._idle = 0

    def learn(self, right: bool) -> None:
        """A guess was right, or was not."""
        self._known += 1
        self._likely += max(_NEWEST, 1 / (_ASSUMED + self._known)) * (right - self._likely)


def _expected(likely: float, n: int) -> float:
    """Tokens that a step with n guesses is expected to bring, each right with that probability while those before it
    are (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, equation 1)."""
    return n + 1.0 if likely >= 1 else (1 - likely ** (n + 1)) / (1 - likely)
