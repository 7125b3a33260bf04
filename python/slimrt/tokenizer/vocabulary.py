"""A loaded vocabulary: what the GGUF and the Hugging Face loaders both produce, and how a token becomes bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from slimrt.errors import ModelFormatError, SlimrtError

SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Tokens with which the known chat formats end a turn, or (<|tool_response>) give it to who runs the tools.
_END_OF_TURN = (
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
    """A vocabulary and the facts its file declares about it.

    Attributes:
        backend: the Hugging Face tokenizer that turns text into ids.
        tokens: the text of each id, None where no token has the id.
        control: ids that are not text (BOS, end of turn, ...).
        literal: ids whose text stands for itself: control tokens and, where byte_level, user-defined ones.
        byte_level: the others are written in GPT-2's byte alphabet, else in SentencePiece's.
        strips_space: encoding puts a space before the text, so decoding takes it off.
        prefix, suffix: the ids that encoding adds around a text.
        special_ids: "bos", "eos", "unk", "pad" to the id, for those declared.
        eog_ids: ids that end a generation.
        chat_template: the file's default chat template, if any.
        chat_templates: others that it has under a name.
        aliases: ids the backend gives that stand for another id of the vocabulary.
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

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that one token stands for; empty for an id without a token.

        A model's output can be wider than its vocabulary, so an id past the end is not an error.

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
    """Makes a ModelFormatError of whatever the tokenizers library raises: plain Exception for what it refuses, and a
    PanicException, which is no Exception, for what it did not expect."""
    try:
        yield
    except SlimrtError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFormatError(f"{what}: {error}") from error


def end_of_generation(matched: Mapping[str, int], declared: Iterable[int | None]) -> frozenset[int]:
    """Return the ids that end a generation.

    Args:
        matched: the text of each control or user-defined token, to its id: some files have an end as the latter.
        declared: the ids that the file itself calls ends (eos, eot, eom); None where it has none.
    """
    known = {matched[text] for text in _END_OF_TURN if text in matched}
    if "<|return|>" in matched and "<|call|>" in matched:
        known.discard(matched.get("<|end|>"))  # the harmony format ends a message with it, not the turn
    return frozenset(known | {id for id in declared if id is not None})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others count up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _byte_alphabet()
_LETTERS = {byte: letter for letter, byte in _BYTES.items()}


def byte_level_alphabet() -> list[str]:
    """GPT-2's alphabet in the order of its vocabulary, where it comes first."""
    return list(_BYTES)


def to_byte_level(data: bytes) -> str:
    """Bytes as GPT-2's alphabet writes them."""
    return "".join(_LETTERS[byte] for byte in data)


def from_byte_level(text: str) -> bytes:
    """The bytes that a token in GPT-2's alphabet stands for."""
    try:
        return bytes([_BYTES[char] for char in text])
    except KeyError:  # not written in the alphabet: it stands for itself
        return text.encode()
