"""Grammars that begin within a text: behind the model's thoughts, or where a trigger stands. Before that it is free."""

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

_MARK = b"\xff"  # before the text of a control token, which no other text spells


class Spelled:
    """A text as tokens spell it: its bytes, control tokens marked, and ids of it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, text: str):
        self.bytes, self.ids, controls = b"", list[int](), tokenizer.special_tokens
        for part in split_controls(tokenizer, text):
            if part in controls:
                self.bytes, self.ids = self.bytes + _MARK + part.encode(), [*self.ids, controls[part]]
            else:
                self.bytes, self.ids = self.bytes + part.encode(), [*self.ids, *vocabulary.ids_of(part.encode())]
        self.only = self.ids[0] if len(self.ids) == 1 else None


def split_controls(tokenizer: Tokenizer, text: str) -> list[str]:
    """The parts of a text: control tokens, and what stands between them."""
    controls = sorted((one for one in tokenizer.special_tokens if one and one in text), key=len, reverse=True)
    if not controls:
        return [text] if text else []
    return [part for part in re.split(f"({'|'.join(map(re.escape, controls))})", text) if part]


class WaitingGrammar(Grammar):
    """A grammar whose texts begin within another one.

    Args:
        source: as llguidance reads it.
        trigger: the grammar's texts begin with it; "": they begin at once, or behind the thoughts.
        thoughts: what opens and closes thoughts, which may come first; none: ().
        opened: the prompt has opened them.

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
    """Waits in its text for the end of the thoughts, then for the trigger."""

    def __init__(self, grammar: WaitingGrammar):
        super().__init__(grammar.vocabulary, grammar.begin())
        self._grammar, self._seen = grammar, b""
        self._first = self._undecided = True  # nothing came yet; what came may still open thoughts
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
            self._seen += self._vocabulary.marked(token)
            self._look()

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
        other._state, other._seen, other._first = self._state.deep_copy(), self._seen, self._first
        other._thinks, other._waits, other._undecided = self._thinks, self._waits, self._undecided
        return other

    @property
    def _opening(self) -> int | None:
        """The token that opens thoughts, where it may come."""
        thoughts = self._grammar.thoughts
        return thoughts[0].only if self._first and thoughts and not self._grammar.opened else None

    def _look(self) -> None:
        """Look in what was seen for what is waited for."""
        thoughts, trigger = self._grammar.thoughts, self._grammar.trigger
        if self._undecided and thoughts and not self._thinks:
            text, opening = self._seen.lstrip(), thoughts[0].bytes
            self._thinks = text.startswith(opening)
            self._undecided = not self._thinks and opening.startswith(text)
            self._seen = text[len(opening) :] if self._thinks else self._seen
        if self._thinks:
            _, end, rest = self._seen.partition(thoughts[1].bytes)
            if not end:
                self._seen = self._seen[-len(thoughts[1].bytes) :]
                return
            self._thinks, self._seen = False, rest
            if not self._waits and not self._begins([], rest):
                raise GrammarError(f"the grammar does not begin with what followed the thoughts: {rest!r}")
        while self._waits and trigger is not None:
            _, found, rest = self._seen.partition(trigger.bytes)
            if not found:
                self._seen = self._seen if self._undecided else self._seen[-len(trigger.bytes) :]
                return
            self._seen = rest  # what does not go on as a call is text
            self._waits = not self._begins(trigger.ids, rest)

    def _begins(self, ids: list[int], rest: bytes) -> bool:
        """Begin the grammar's text with these tokens and bytes, if it may."""
        ids, state = [*ids, *self._vocabulary.ids_of(rest)], self._grammar.begin()
        if state.try_consume_tokens(ids) != len(ids):
            return False
        self._state, self._seen = state, b""
        return True
