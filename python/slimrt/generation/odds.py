"""How likely guesses are to be right, and how many of them pay."""

from __future__ import annotations

from collections.abc import Callable

_PAYS = 1.05  # times as many tokens a second as without guesses, as estimated
_FIRST = 0.7  # how likely a guess is to be right, before any was checked
_NEWEST = 0.1  # weight of the newest guess in that
_AGAIN = 8  # tokens after which it is worked out anew whether guesses pay, where they did not
_TRIALS = 0.02  # of the time, at most, for guesses that did not pay when they were last tried


class Odds:
    """What is known of the guesses of a drafter.

    Args:
        forgets: part of what was found that is forgotten with each token that nothing was guessed for.
    """

    def __init__(self, forgets: float = 0.0):
        self._likely, self._forgets = _FIRST, forgets
        self._idle, self._pays = 0, True

    def best(self, most: int, cost: Callable[[int], float]) -> int:
        """How many guesses, at most so many, bring the most tokens in the time of a step without any; 0: none pays.

        What does not pay is tried again, one guess at a time, when that takes no more than its share of the time since.

        Args:
            cost: how many times as long a step takes with n guesses, the guessing included.
        """
        if not self._pays and self._idle % _AGAIN:
            return 0
        costs = {n: cost(n) for n in range(1, most + 1)}
        worth = {n: _expected(self._likely, n) / costs[n] for n in costs}
        best = max(worth, key=lambda n: worth[n], default=0)
        self._pays = best > 0 and worth[best] > _PAYS
        if self._pays:
            return best
        return 1 if best and self._idle * _TRIALS >= costs[1] else 0

    def rest(self) -> None:
        """Nothing was guessed for a token."""
        self._idle += 1
        self._likely += self._forgets * (_FIRST - self._likely)

    def guessed(self) -> None:
        """Something was."""
        self._idle = 0

    def learn(self, right: bool) -> None:
        """A guess was checked."""
        self._likely += _NEWEST * (right - self._likely)


def _expected(likely: float, n: int) -> float:
    """Tokens that a step with n guesses is expected to bring, each right with that probability while those before it
    are (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, equation 1)."""
    return n + 1.0 if likely >= 1 else (1 - likely ** (n + 1)) / (1 - likely)
