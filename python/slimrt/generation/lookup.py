"""Drafts looked up in the text itself: prompt lookup decoding (Saxena, "Prompt Lookup Decoding", 2023).

In text that repeats its prompt (code, quotes, tables) the tokens that followed the latest n-gram at its last occurrence
are likely to follow again.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrt.generation.odds import Odds

_GRAMS = (3, 2)  # lengths of n-grams, tried in this order
_ASSUMED_RATE = 0.2  # accept rate assumed at first: low, so that drafting begins once one has been right


class Lookup:
    """The last position of each n-gram of a text.

    Attributes:
        odds: accept statistics. Every token counts, drafted or not, since looking it up costs nothing.
    """

    def __init__(self) -> None:
        self.odds = Odds(_ASSUMED_RATE)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for n in _GRAMS:
                if len(self._tokens) >= n:
                    self._after[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def learn(self, tokens: Sequence[int]) -> None:
        """Append tokens, and count whether each was predicted."""
        for token in tokens:
            for guess in self.guess(1):
                self.odds.learn(guess == token)
            self.extend([token])

    def guess(self, most: int) -> list[int]:
        """The tokens that followed the latest n-gram at its last occurrence; [] if there is none."""
        for n in _GRAMS:
            if (at := self._after.get(tuple(self._tokens[-n:]))) is not None:
                return self._tokens[at : at + most]
        return []
