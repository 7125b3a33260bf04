"""A loaded vocabulary, as built by the GGUF and the Hugging Face loader; and how a token becomes bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from slimrt.errors import ModelFormatError, SlimrtError

SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Tokens that end a turn in the known chat formats, or (<|tool_response>) hand it to the runner of tools.
END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<EOT>",
    "_<EOT>",
)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, with what its file declares about it.

    Attributes:
        backend: the tokenizer (Hugging Face's library) that turns text into ids.
        tokens: the text of each id; None for ids without a token.
        control: ids that are not text (BOS, end of turn, ...).
        literal: ids whose bytes are their text as it is: control tokens and, if byte_level, user-defined ones.
        byte_level: the other tokens are written in GPT-2's byte alphabet, else in SentencePiece's.
        strips_space: encoding puts a space before the text, which decoding removes.
        prefix, suffix: ids that encoding adds before and after a text.
        special_ids: "bos", "eos", "unk", "pad" -> id, for those declared.
        eog_ids: ids that end generation.
        chat_template: the file's default chat template, if any.
        chat_templates: its further templates, by name.
        aliases: ids that the backend returns -> the ids of the vocabulary that they stand for.
        unknown_texts: text that is unknown to the backend -> its id, for tokens of the vocabulary that it lacks.
        language_token: where a text in one of several languages has the language's token (`languages`): "first", or
            "last", behind the suffix; None: it has none.
        exact_charsmap: SentencePiece's table is applied as by SentencePiece (`charsmap.exact`), not as by the library.
    """

    backend: tokenizers.Tokenizer
    tokens: list[str | None]
    control: frozenset[int]
    literal: frozenset[int]
    byte_level: bool
    strips_space: bool
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special_ids: Mapping[str, int]
    eog_ids: frozenset[int]
    chat_template: str | None
    aliases: Mapping[int, int] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    unknown_texts: Mapping[str, int] = field(default_factory=dict)
    language_token: str | None = None
    exact_charsmap: bool = False

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token; empty for an id without a token.

        Logits may be wider than the vocabulary, so an id past its end is not an error.

        Raises:
            ValueError: the id is negative.
        """
        if id < 0:
            raise ValueError(f"token id {id} is negative")
        text = self.tokens[id] if id < len(self.tokens) else None
        if text is None:
            return b""
        if id in self.literal:
            return text.encode()
        if self.byte_level:
            return from_byte_level(text)
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()


@contextmanager
def typed(what: str) -> Iterator[None]:
    """Turn any error of the tokenizers library into ModelFormatError: it raises plain Exception, and on a Rust panic
    PanicException, which is not an Exception."""
    try:
        yield
    except SlimrtError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFormatError(f"{what}: {error}") from error


def end_of_generation(matched: Mapping[str, int], declared: Iterable[int | None]) -> frozenset[int]:
    """Return the ids that end generation.

    Args:
        matched: text -> id of control and user-defined tokens, since some files declare end tokens as the latter.
        declared: the ids that the file declares as ends (eos, eot, eom); None for those it has not.
    """
    known = {matched[text] for text in END_OF_TURN if text in matched}
    if "<|return|>" in matched and "<|call|>" in matched:
        known.discard(matched.get("<|end|>"))  # in the Harmony format it ends a message, not the turn
    return frozenset(known | {id for id in declared if id is not None})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _byte_alphabet()
_LETTERS = {byte: letter for letter, byte in _BYTES.items()}


def byte_level_alphabet() -> list[str]:
    """The letters of GPT-2's byte alphabet in the order of its vocabulary, which begins with them."""
    return list(_BYTES)


def to_byte_level(data: bytes) -> str:
    """Bytes written in GPT-2's byte alphabet."""
    return "".join(_LETTERS[byte] for byte in data)


def from_byte_level(text: str) -> bytes:
    """The bytes of a token in GPT-2's byte alphabet."""
    try:
        return bytes([_BYTES[char] for char in text])
    except KeyError:  # not in the alphabet: its bytes are its text
        return text.encode()
