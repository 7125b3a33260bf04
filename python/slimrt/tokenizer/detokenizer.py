"""Incremental detokenisation: text as soon as its characters are complete, never half a UTF-8 character."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable

from slimrt.tokenizer.vocabulary import Vocabulary


class IncrementalDetokenizer:
    """Turns ids into text one at a time; the pieces concatenated equal `Tokenizer.decode` of all the ids.

    Args:
        vocabulary: of the ids.
        prompt_ids: the ids before the first one fed. SentencePiece puts a space before a text; it is removed at the
            start of a text (no ids or only BOS before it) and kept where the ids continue one.
        skip_special_tokens: omit control tokens, except those in `shown`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Iterable[int] = (),
        skip_special_tokens: bool = False,
        shown: Container[int] = (),
    ):
        self._token_bytes = vocabulary.token_bytes
        self._skipped = vocabulary.control if skip_special_tokens else frozenset()
        self._shown = shown
        self._bos_id = vocabulary.special_ids.get("bos")
        self._strip_space = vocabulary.strips_space and all(id == self._bos_id for id in prompt_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """Return the text that this id completes; empty while a character is unfinished.

        Raises:
            ValueError: the id is negative.
        """
        if id in self._skipped and id not in self._shown:
            return ""
        piece = self._token_bytes(id)
        if self._strip_space and piece and id != self._bos_id:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return the rest at the end of the text; incomplete bytes become U+FFFD."""
        return self._utf8.decode(b"", final=True)
