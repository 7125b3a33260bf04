"""Grammars that begin within a text: after the model's thoughts, or at a trigger. Up to there any token is allowed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import GrammarError
from slimrt.generation.grammar import Grammar, Matcher, Vocabulary
from slimrt.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MARK = b"\xff"  # before the name of a control token; no UTF-8 text contains it


class Spelled:
    """A text as bytes, with control tokens marked, and as ids. only: its id, if it is a single token."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, text: str):
        self.bytes, self.ids, controls = b"", list[int](), tokenizer.special_tokens
        for part in split_controls(tokenizer, text):
            if part in controls:
                self.bytes, self.ids = self.bytes + _MARK + part.encode(), [*self.ids, controls[part]]
            else:
                self.bytes, self.ids = self.bytes + part.encode(), [*self.ids, *vocabulary.ids_of(part.encode())]
        self.only = self.ids[0] if len(self.ids) == 1 else None


def split_controls(tokenizer: Tokenizer, text: str) -> list[str]:
    """Split a text into control tokens and the texts between them."""
    controls = sorted((one for one in tokenizer.special_tokens if one and one in text), key=len, reverse=True)
    if not controls:
        return [text] if text else []
    return [part for part in re.split(f"({'|'.join(map(re.escape, controls))})", text) if part]


class WaitingGrammar(Grammar):
    """A grammar that begins within a text.

    Args:
        source: in llguidance's syntax.
        trigger: text with which the grammar's part begins; "": it begins at once, or after the thoughts.
        thoughts: (opening, closing) texts of thoughts, which may come first; (): none.
        opened: the prompt ends with the opening text.

    Errors as Grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        source: str,
        *,
        trigger: str = "",
        thoughts: tuple[str, ...] = (),
        opened: bool = False,
    ):
        super().__init__(vocabulary, source)
        self.trigger = Spelled(tokenizer, vocabulary, trigger) if trigger else None
        self.thoughts = [Spelled(tokenizer, vocabulary, one) for one in thoughts]
        self.opened = opened

    def begin(self) -> LLMatcher:
        return self._begun.deep_copy()

    def matcher(self) -> Matcher:
        return _WaitingMatcher(self)


class _WaitingMatcher(Matcher):
    """Allows any token until the thoughts have ended and the trigger has come."""

    def __init__(self, grammar: WaitingGrammar):
        super().__init__(grammar.vocabulary, grammar.begin())
        self._grammar, self._unmatched = grammar, b""
        self._first = self._undecided = True  # no token yet; the tokens so far may still open thoughts
        self._thinks = bool(grammar.thoughts) and grammar.opened
        self._waits = grammar.trigger is not None

    @property
    def is_free(self) -> bool:
        return self._thinks or self._waits

    def mask(self) -> NDArray[np.uint32]:
        words, opening = super().mask(), self._opening
        if opening is not None:
            words[opening // 32] |= np.uint32(1 << opening % 32)
        return words

    def accept(self, token: int) -> None:
        opening, self._first = self._opening, False
        if not self.is_free and token == opening:
            self._thinks = True
        elif not self.is_free:
            super().accept(token)
        else:
            self._unmatched += self._vocabulary.marked(token)
            self._search()

    def forced(self) -> list[int]:
        return [] if self.is_free else super().forced()

    @property
    def is_complete(self) -> bool:
        return self.is_free or super().is_complete

    @property
    def is_done(self) -> bool:
        return not self.is_free and super().is_done

    def copy(self) -> Matcher:
        other = _WaitingMatcher(self._grammar)
        other._state, other._unmatched, other._first = self._state.deep_copy(), self._unmatched, self._first
        other._thinks, other._waits, other._undecided = self._thinks, self._waits, self._undecided
        return other

    @property
    def _opening(self) -> int | None:
        """The token that opens thoughts, if it may come now."""
        thoughts = self._grammar.thoughts
        return thoughts[0].only if self._first and thoughts and not self._grammar.opened else None

    def _search(self) -> None:
        """Search the text seen so far for the end of the thoughts and for the trigger."""
        thoughts, trigger = self._grammar.thoughts, self._grammar.trigger
        if self._undecided and thoughts and not self._thinks:
            text, opening = self._unmatched.lstrip(), thoughts[0].bytes
            self._thinks = text.startswith(opening)
            self._undecided = not self._thinks and opening.startswith(text)
            self._unmatched = text[len(opening) :] if self._thinks else self._unmatched
        if self._thinks:
            _, end, rest = self._unmatched.partition(thoughts[1].bytes)
            if not end:
                self._unmatched = self._unmatched[-len(thoughts[1].bytes) :]
                return
            self._thinks, self._unmatched = False, rest
            if not self._waits and not self._begins([], rest):
                raise GrammarError(f"the grammar does not begin with what followed the thoughts: {rest!r}")
        while self._waits and trigger is not None:
            _, found, rest = self._unmatched.partition(trigger.bytes)
            if not found:
                self._unmatched = self._unmatched if self._undecided else self._unmatched[-len(trigger.bytes) :]
                return
            self._unmatched = rest  # if it does not continue as a call it is plain text
            self._waits = not self._begins(trigger.ids, rest)

    def _begins(self, ids: list[int], rest: bytes) -> bool:
        """Start the grammar with these ids and the tokens of these bytes. False: it does not allow them."""
        ids, state = [*ids, *self._vocabulary.ids_of(rest)], self._grammar.begin()
        if state.try_consume_tokens(ids) != len(ids):
            return False
        self._state, self._unmatched = state, b""
        return True
