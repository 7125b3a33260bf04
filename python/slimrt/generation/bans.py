"""Tokens that may not come next: lengths, repeated sequences and words that options or a model's own settings rule out.

As transformers has them, in its order. One object serves a text that is sampled, as masks, and the beams of a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from slimrt.generation.options import Options
from slimrt.modelfile.settings import Settings
from slimrt.plumbing.numbers import log_normaliser

Ids = NDArray[np.int32]


class Bans:
    """What may not come next in one text.

    Args:
        settings: the model's own, which count where options say nothing.
        before: ids that the text begins with: a prompt, or what a decoder beside an encoder starts with.
        source: ids that an encoder read; None: there is no encoder.
        ends: tokens that end a text.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        before: Sequence[int],
        source: Sequence[int] | None,
        ends: Iterable[int],
        n_vocab: int,
    ):
        self._renormalizes = settings.renormalize_logits
        self._before, self._source = np.array(before, np.int32), np.array(source or (), np.int32)
        self._n_vocab = n_vocab
        self._ends = [id for id in ends if id < n_vocab]
        own = options.no_repeat_ngram_size
        self._ngram = settings.no_repeat_ngram_size if own is None else int(own)  # True, too, is a number to NumPy then
        self._source_ngram = settings.encoder_no_repeat_ngram_size
        never = settings.suppress_tokens if options.suppress_tokens is None else options.suppress_tokens
        self._never = {*map(int, never), *(word[0] for word in settings.bad_words_ids if len(word) == 1)}
        self._words = [word for word in settings.bad_words_ids if len(word) > 1]
        self._not_first = settings.begin_suppress_tokens
        n_given = 0 if source is None else len(before) - 1  # a decoder's start alone is no token of the text
        least = max(settings.min_new_tokens - n_given, settings.min_length - len(before))
        self._least = least if options.min_tokens is None else options.min_tokens
        self._forced = None if options.ignore_eos else settings.forced_eos_token_id
        self._last = options.max_tokens - 1

    def __bool__(self) -> bool:
        """Whether there is anything that may rule out a token."""
        asked = self._ngram or self._source_ngram or self._never or self._words or self._not_first
        return bool(asked or self._least > 0 or (self._forced is not None and self._last >= 0))

    def forced(self, n: int) -> int | None:
        """The only token that may follow n others; None: there is not only one."""
        return self._forced if n == self._last else None

    def banned(self, tokens: Sequence[int]) -> list[int]:
        """The ids that may not follow these tokens of the text."""
        found = [*self._never, *(self._ends if len(tokens) < self._least else ())]
        if not tokens:
            found += self._not_first
        if self._ngram or self._source_ngram or self._words:
            text = np.concatenate([self._before, np.array(tokens, np.int32)])
            found += [*_following(text, text, self._ngram), *_following(self._source, text, self._source_ngram)]
            found += [word[-1] for word in self._words if tuple(text[1 - len(word) :]) == word[:-1]]
        return found

    def mask(self, tokens: Sequence[int]) -> NDArray[np.uint32] | None:
        """What may follow these tokens as bits (words,), as core.Sampler reads them; None: anything."""
        only = self.forced(len(tokens))
        banned = self.banned(tokens) if only is None else ()
        if only is None and not banned:
            return None
        allowed = np.full((self._n_vocab + 31) // 32 * 32, only is None)
        allowed[list(banned)] = False
        if only is not None:
            allowed[only] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def apply(self, row: NDArray[np.float32], tokens: Sequence[int], normaliser: float) -> float:
        """Rule out what may not follow these tokens in a row of logits (vocab,), in place, for a beam search.

        Args:
            normaliser: log of the sum of the row's exponentials.

        Returns:
            What log probabilities are now relative to. As in transformers they stay as if all tokens might come, unless
            the model's settings say otherwise; a token that must come has 0.
        """
        if (only := self.forced(len(tokens))) is not None:
            row[:] = -np.inf
            row[only] = normaliser
        elif banned := self.banned(tokens):
            row[banned] = -np.inf
            if self._renormalizes and row.max() > -np.inf:
                return log_normaliser(row)
        return normaliser


def _following(text: Ids, end: Ids, size: int) -> list[int]:
    """What follows, wherever it is in `text`, a sequence that `end` ends with and that is one shorter than `size`."""
    if not 0 < size <= min(len(text), len(end) + 1):
        return []
    windows = sliding_window_view(text, size)
    found: list[int] = windows[(windows[:, :-1] == end[len(end) + 1 - size :]).all(axis=1), -1].tolist()
    return found
