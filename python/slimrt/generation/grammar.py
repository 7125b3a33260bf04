"""Constrained decoding: JSON schemas, Lark, GBNF, regular expressions, choices; by llguidance (extra `grammar`).

A Grammar is compiled before anything is computed. Each text has a Matcher, which gives before each token the mask of
allowed tokens, and the tokens that are forced.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import GrammarError, UnsupportedError
from slimrt.generation.gbnf import lark_of
from slimrt.generation.schemas import enforceable, enforceable_blocks, named
from slimrt.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

CONSTRAINTS = ("grammar", "json_schema", "regex", "choice")
"""The options that constrain a text; only one at a time."""

MAX_TEXT = 1 << 18
"""Characters of a grammar; each takes up to about a microsecond to compile."""

MAX_RULES = 500
"""Rules of a grammar, or references of a schema: llguidance recurses along them with some 4 kB of stack each, and an
overflow ends the process."""

# White space between the tokens of JSON: none, one blank, or a newline with its indentation, as JSON is usually laid
# out. With arbitrary white space allowed a model can write it until the context is full.
_JSON_RULES = {"whitespace_pattern": r"( |\n[ \t]{0,40})?", "lenient": False}
_MAX_LEXER_STATES = 20_000  # up to 2 kB each

_KEPT, _KEPT_TEXT = 32, 1 << 18  # compiled grammars kept, and their characters: each takes up to some 100 bytes

# Text encoded after one is tokenised as in the middle of a text. Normalizers drop the first; the others may merge.
_PROBES = ("\x02", ")", "0")


def _llguidance() -> Any:
    """The package. UnsupportedError: it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise UnsupportedError(
            "grammars and JSON schemas need llguidance, which is missing: pip install 'slimrt[grammar]'"
        ) from None


class _Tokens:
    """The tokenizer interface that llguidance asks for. llguidance keeps this object, so it must refer to the tokenizer
    weakly: a cycle through it would never be freed."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, n_vocab: int):
        self._tokenizer = weakref.proxy(tokenizer)
        control = tokenizer.vocabulary.control
        self.tokens = [_marked(tokenizer.token_bytes(id), id in control) for id in range(n_vocab)]
        self.special_token_ids = sorted(id for id in control if id < n_vocab)
        self.ends = sorted(id for id in tokenizer.eog_ids if id < n_vocab)
        if not self.ends:  # llguidance needs one: an id beyond the logits, which is never chosen
            self.ends = [n_vocab]
            self.tokens.append(b"\xffend")
        self.eos_token_id = self.ends[0]
        self._before = {probe: len(tokenizer.encode(probe, False, False)) for probe in _PROBES}

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text as in the middle of another one; none where the tokenizer changes the text."""
        text = text if isinstance(text, str) else text.decode()
        for probe, n_before in self._before.items():
            ids: list[int] = self._tokenizer.encode(probe + text, False, False)[n_before:]
            if b"".join(self.tokens[id] for id in ids) == text.encode():
                return ids
        return []


class Vocabulary:
    """A model's tokens as llguidance's trie, which takes a second to build for 150,000. Grammars are compiled for one.

    Args:
        n_vocab: width of the model's logits.

    Attributes:
        ends: ids of the end-of-generation tokens.
        ends_unseen: the vocabulary has no such token, so `ends` is n_vocab, which no model chooses.
        words: 32-bit words of a mask.

    Raises:
        UnsupportedError: llguidance is missing.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int):
        llguidance = _llguidance()
        tokens = _Tokens(tokenizer, n_vocab)
        self.n_vocab, self.ends = n_vocab, frozenset(tokens.ends)
        self.ends_unseen = n_vocab in self.ends
        self.words = (len(tokens.tokens) + 31) // 32
        self._trie = llguidance.LLTokenizer(tokens, eos_token=tokens.ends)
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._new, self._tokens = llguidance.LLMatcher, tokens.tokens
        control = tokenizer.vocabulary.control
        self._bytes = frozenset(b"".join(one for id, one in enumerate(self._tokens) if id not in control))
        self._begun: dict[str, LLMatcher] = {}

    def marked(self, id: int) -> bytes:
        """The bytes of a token, 0xff before those of a control token."""
        return self._tokens[id]

    def ids_of(self, data: bytes) -> list[int]:
        """Tokens whose bytes are `data`."""
        ids: list[int] = self._trie.tokenize_bytes(data)
        return ids

    def begin(self, source: str) -> LLMatcher:
        """A matcher at the start of a grammar, to be copied. GrammarError: it is wrong, or cannot be enforced."""
        found = self._begun.pop(source, None)
        if found is None:
            wrong, words = self._new.validate_grammar_with_warnings(source, self._trie, limits=self._limits)
            if words:
                raise GrammarError(_short_message("; ".join(words)))
            found = self._new(self._trie, source, log_level=0, limits=self._limits)
            if found.is_error():
                raise GrammarError(_short_message(found.get_error()))
            self._require(found.deep_copy().compute_ff_bytes())
        self._begun[source] = found  # moved to the end: the most recently used
        while len(self._begun) > 1 and (len(self._begun) > _KEPT or sum(map(len, [*self._begun])) > _KEPT_TEXT):
            self._begun.pop(next(iter(self._begun)), None)
        return found

    def _require(self, begin: bytes) -> None:
        """GrammarError: no token has a byte of `begin`, with which every text begins, as none of T5's has a brace."""
        for letter in begin.decode(errors="ignore"):
            if not self._bytes.issuperset(letter.encode()):
                raise GrammarError(f"every text that matches has {letter!r}, which no token of this model can write")


def _marked(data: bytes, control: bool) -> bytes:
    """Control tokens are prefixed with 0xff, which no UTF-8 text has: llguidance's convention."""
    return b"\xff" + data if data and control else data


_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Tokenizer, n_vocab: int) -> Vocabulary:
    """The Vocabulary of a model, built at the first call. UnsupportedError: llguidance is missing."""
    found = _vocabularies.get(tokenizer)
    if found is None or found.n_vocab != n_vocab:
        found = _vocabularies[tokenizer] = Vocabulary(tokenizer, n_vocab)
    return found


class Grammar:
    """A grammar compiled for a vocabulary.

    Args:
        source: in llguidance's syntax (see source_of).

    Raises:
        GrammarError: it is wrong, too large, or has a part that cannot be enforced, which is named.
    """

    def __init__(self, vocabulary: Vocabulary, source: str):
        if len(source) > MAX_TEXT:
            raise GrammarError(
                f"all that is to be enforced has {len(source)} characters; at most {MAX_TEXT} are compiled"
            )
        self.vocabulary, self._begun = vocabulary, vocabulary.begin(source)

    def matcher(self) -> Matcher:
        """A matcher for a new text, at the start of the grammar."""
        return Matcher(self.vocabulary, self._begun.deep_copy())


class Matcher:
    """The state of one text in its grammar.

    Raises, from each of its methods:
        GrammarError: a token that is not allowed, or a step that exceeds llguidance's limits.
    """

    def __init__(self, vocabulary: Vocabulary, state: LLMatcher):
        self._vocabulary, self._state = vocabulary, state
        self._words = np.zeros(vocabulary.words, np.uint32)

    @property
    def is_free(self) -> bool:
        """Whether any token is allowed, so that no mask is needed."""
        return False

    def mask(self) -> NDArray[np.uint32]:
        """Bits (words,) of the allowed tokens, as core.Sampler reads them; valid until the next call."""
        self._state.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        if self._vocabulary.ends_unseen:
            n_vocab = self._vocabulary.n_vocab
            self._words[n_vocab // 32] &= np.uint32((1 << n_vocab % 32) - 1)
        return self._words

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        self._state.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model's logits are; they are not accepted yet."""
        tokens = self._state.compute_ff_tokens()
        self._check()
        return [token for token in tokens if token not in self._vocabulary.ends]

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self._state.is_accepting()

    @property
    def is_done(self) -> bool:
        """Whether it must end here."""
        return self._state.is_stopped()

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        return Matcher(self._vocabulary, self._state.deep_copy())

    def _check(self) -> None:
        if self._state.is_error():
            raise GrammarError(_short_message(self._state.get_error()))


def compile_grammar(tokenizer: Tokenizer, n_vocab: int, **constraint: Any) -> Grammar:
    """Compile a constraint, given by its name in CONSTRAINTS and a value as in source_of, or a Grammar.

    Raises:
        UnsupportedError: llguidance is missing. Others as source_of and Grammar.
    """
    ((name, value),) = constraint.items()
    if isinstance(value, Grammar):
        return value
    source = source_of(name, value)
    with named(name):
        return Grammar(vocabulary_of(tokenizer, n_vocab), source)


def source_of(name: str, value: Any) -> str:
    """A constraint in llguidance's syntax.

    Args:
        name, value: "json_schema": a mapping, or JSON text. "grammar": Lark or GBNF text. "regex": in the syntax of
            Rust's regex crate. "choice": a sequence of texts.

    Raises:
        GrammarError, TypeError: the value is none of these.
    """
    if name == "json_schema":
        return json.dumps({"grammars": [{"json_schema": json_rules(value)}]})
    choices = _choices(value) if name == "choice" else ()
    if not choices and not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {value!r}")
    with named(name):
        if choices:
            return "start: " + " | ".join(map(quoted, choices))
        _check_unicode(value)
        return f"start: /{_DELIMITED.sub(_in_delimiters, value)}/" if name == "regex" else _lark(value)


_DELIMITED = re.compile(r"\\.|[/\n]", re.DOTALL)


def _in_delimiters(found: re.Match[str]) -> str:
    """A part of a regular expression, escaped to stand between slashes on one line; escapes stay as they are."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def json_rules(schema: Any, what: str = "json_schema") -> dict[str, Any]:
    """A JSON schema (a mapping, true, or JSON text) in llguidance's syntax. GrammarError: `what` is not a schema."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{what} is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{what} must be an object, got {schema!r}")
    try:
        text = json.dumps({**schema})
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{what} must be what JSON can hold: {error}") from None
    with named(what):
        _check_unicode(json.dumps({**schema}, ensure_ascii=False))
        _check_size("the schema", "references", text, _REFERENCE)
        return {**enforceable(json.loads(text)), "x-guidance": _JSON_RULES}


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar. GrammarError: it is not valid Unicode."""
    _check_unicode(text)
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # Lark literals must not contain it raw


def _check_unicode(text: str) -> None:
    """GrammarError: the text has a lone surrogate, which can never be generated."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"not valid Unicode: {text[max(error.start - 20, 0) : error.end + 20]!r}") from None


def _choices(value: Any) -> Sequence[str]:
    """Check the value of `choice`. Raises GrammarError, TypeError."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"choice must be a sequence of texts, got {value!r}")
    if not value or "" in value:
        raise GrammarError("choice needs at least one text, and none may be empty")
    return value


def _lark(text: str) -> str:
    """A grammar in Lark; one whose rules have ::= is GBNF and converted. GrammarError: it is not valid GBNF."""
    is_gbnf = _GBNF_RULE.search(text) is not None
    _check_size("the grammar", "rules", text, _GBNF_MARK if is_gbnf else _LARK_MARK)
    if text.lstrip().startswith("{"):
        raise GrammarError("the grammar is JSON: give Lark's or GBNF's text, or a schema as json_schema")
    if is_gbnf:
        return lark_of(text)
    lark = enforceable_blocks(text)
    _check_size("the grammar", "rules and references", lark, _LARK_MARK)  # where "$ref" has no other spelling
    return lark


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_GBNF_MARK = re.compile("::=")
_REFERENCE = re.compile(r'"\$ref"')
_LARK_MARK = re.compile(r'^(?![ \t]*\|)[^:\n]*:|"\$ref"', re.MULTILINE)  # no line has two rules


def _check_size(what: str, parts: str, text: str, mark: re.Pattern[str]) -> None:
    """GrammarError: more than can be compiled. `mark` occurs at least once in each of the `parts`."""
    if len(text) > MAX_TEXT:
        raise GrammarError(f"{what} has {len(text)} characters; at most {MAX_TEXT} are compiled")
    if len(mark.findall(text)) > MAX_RULES:
        raise GrammarError(f"{what} has more than {MAX_RULES} {parts}")


def _short_message(message: str) -> str:
    """llguidance's error message without its backtrace and parser state."""
    if message.startswith("NoExtensionBias"):
        return "no text matches: it refers only to itself, or no token of this model can write what comes next"
    if message.startswith("Parser Error: token") and "forced bytes" in message:
        return "no token of this model can write what comes next"
    return message.partition("<backtrace>")[0].partition("<state>")[0].strip() or "the grammar cannot be followed"
