"""DRY's sequence breakers: from strings to the token sequences that spell them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from slimrt.tokenizer.tokenizer import Tokenizer

_Breakers = list[list[int]]
_MOST_KNOWN = 4  # results kept for each tokenizer: a long text can be spelt in thousands of ways
_known: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], _Breakers]] = weakref.WeakKeyDictionary()


def breaker_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> _Breakers:
    """The token sequences that contain one of these strings. The last few results are kept, since it searches the
    whole vocabulary.

    As in llama.cpp: each token that contains the string; and each token that ends with a prefix of the string, followed
    by the tokens of the remaining characters.
    """
    of_tokenizer = _known.setdefault(tokenizer, {})
    key = tuple(texts)
    found = of_tokenizer.pop(key, None)
    of_tokenizer[key] = found = list(_sequences(tokenizer, key)) if found is None else found  # now the newest
    for old in list(of_tokenizer)[:-_MOST_KNOWN]:
        of_tokenizer.pop(old, None)  # another thread may have dropped it
    return found


def _sequences(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """In one pass over the vocabulary, however many texts there are."""
    wholes = [text.encode() for text in texts]
    continued: dict[bytes, list[tuple[bytes, list[int]]]] = {}  # a beginning -> the whole text, the rest's ids
    for text, whole in zip(texts, wholes, strict=True):
        for cut in range(1, len(text)):
            continued.setdefault(text[:cut].encode(), []).append((whole, _ids_of(tokenizer, text[cut:])))
    longest = max(map(len, continued), default=0)
    for id in range(tokenizer.vocab_size):
        word = tokenizer.token_bytes(id)
        yield from ([id] for whole in wholes if whole in word)
        for size in range(1, min(len(word), longest) + 1):
            for whole, rest in continued.get(word[-size:], ()):
                if whole not in word:
                    yield [id, *rest]


def _ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in the middle of another one: without the space that SentencePiece puts before a text."""
    wanted = text.encode()
    for before in ("", "\n"):
        ids = tokenizer.encode(before + text, add_special_tokens=False, parse_special=False)
        for start in range(len(ids)):
            if b"".join(tokenizer.token_bytes(id) for id in ids[start:]) == wanted:
                return ids[start:]
    return ids
