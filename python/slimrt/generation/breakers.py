"""DRY's sequence breakers: from strings to the token sequences that spell them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from slimrt.tokenizer.tokenizer import Tokenizer

_Breakers = list[list[int]]
_known: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], _Breakers]] = weakref.WeakKeyDictionary()


def breaker_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> _Breakers:
    """The token sequences that contain one of these strings. Cached, since it searches the whole vocabulary.

    As in llama.cpp: each token that contains the string; and each token that ends with a prefix of the string, followed
    by the tokens of the remaining characters.
    """
    of_tokenizer = _known.setdefault(tokenizer, {})
    key = tuple(texts)
    if key not in of_tokenizer:
        words = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        of_tokenizer[key] = [sequence for text in key for sequence in _sequences(tokenizer, words, text)]
    return of_tokenizer[key]


def _sequences(tokenizer: Tokenizer, words: Sequence[bytes], text: str) -> Iterator[list[int]]:
    whole = text.encode()
    yield from ([id] for id, word in enumerate(words) if whole in word)
    for cut in range(1, len(text)):
        begins, rest = text[:cut].encode(), _ids_of(tokenizer, text[cut:])
        yield from ([id, *rest] for id, word in enumerate(words) if word.endswith(begins) and whole not in word)


def _ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in the middle of another one: without the space that SentencePiece puts before a text."""
    wanted = text.encode()
    for before in ("", "\n"):
        ids = tokenizer.encode(before + text, add_special_tokens=False, parse_special=False)
        for start in range(len(ids)):
            if b"".join(tokenizer.token_bytes(id) for id in ids[start:]) == wanted:
                return ids[start:]
    return ids
