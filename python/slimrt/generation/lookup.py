"""Guesses at what a text goes on with, looked up in itself.

Text that repeats its prompt (code, quotes, tables) says what comes next: where its last tokens stood before, others
followed (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrt.generation.odds import Odds

_GRAMS = (3, 2)  # tokens that must have stood together before, the longer first
_LIKELY = 0.2  # that what is found is right, until the text has shown it: one right one, and it pays


class Lookup:
    """Knows where each few tokens of a text stood last.

    Attributes:
        odds: of what it finds, seen of every token: whether it would have been right costs nothing to know.
    """

    def __init__(self) -> None:
        self.odds = Odds(_LIKELY)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens at the end of the text."""
        for token in tokens:
            for n in _GRAMS:
                if len(self._tokens) >= n:
                    self._after[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def learn(self, tokens: Sequence[int]) -> None:
        """The same of tokens that tell how often it is right."""
        for token in tokens:
            for guess in self.guess(1):
                self.odds.learn(guess == token)
            self.extend([token])

    def guess(self, most: int) -> list[int]:
        """What followed when the last tokens stood there before; [] if they never did."""
        for n in _GRAMS:
            if (at := self._after.get(tuple(self._tokens[-n:]))) is not None:
                return self._tokens[at : at + most]
        return []
