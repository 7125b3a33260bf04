# SPDX-License-Identifier: Apache-2.0
"""Whisper's tokens: names for rows that a tokenizer leaves unnamed, and merges where a file has only tokens.

After the text come <|endoftext|>, <|startoftranscript|>, the languages, six tasks, and timestamps 0.02 s apart (Radford
et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", section 2.3; names as Hugging Face has them).
"""

from __future__ import annotations

from slimrt.errors import ModelFormatError
from slimrt.tokenizer.vocabulary import byte_level_alphabet, from_byte_level

END, NO_TIMESTAMPS = "<|endoftext|>", "<|notimestamps|>"
N_TIMESTAMPS = 1501  # 0.00 to 30.00 s
_LOST = "\ufffd".encode()
# In the order of their tokens; the hundredth came with large-v3.
LANGUAGES = tuple(
    """
    en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml cy
    sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am yi lo
    uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue
    """.split()
)


def is_special(text: str) -> bool:
    """Whether a token is a command or a time, not text."""
    return text.startswith("<|") and text.endswith("|>")


def timestamp(index: int) -> str:
    return f"<|{index / 50:.2f}|>"


def with_timestamps(tokens: list[str | None]) -> list[str | None]:
    """Names of timestamps for unnamed rows behind <|notimestamps|>, which early tokenizers did not list."""
    if NO_TIMESTAMPS not in tokens:
        return tokens
    first = tokens.index(NO_TIMESTAMPS) + 1
    last = first + N_TIMESTAMPS
    return [timestamp(id - first) if text is None and first <= id < last else text for id, text in enumerate(tokens)]


def special_tokens(n_text: int, n_vocab: int) -> list[str]:
    """The tokens that follow `n_text` tokens of text in a vocabulary of n_vocab.

    Raises:
        ModelFormatError: that leaves no sensible number of languages.
    """
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nocaptions", "notimestamps"]
    n_languages = n_vocab - n_text - 2 - len(tasks) - N_TIMESTAMPS
    if not 0 <= n_languages <= len(LANGUAGES):
        raise ModelFormatError(
            f"{n_text} tokens of text in a vocabulary of {n_vocab} leave {n_languages} languages; Whisper has up to "
            f"{len(LANGUAGES)}"
        )
    if n_languages == len(LANGUAGES):
        tasks[4] = "nospeech"  # large-v3's name for it
    names = ["endoftext", "startoftranscript", *LANGUAGES[:n_languages], *tasks]
    return [f"<|{name}|>" for name in names] + [timestamp(index) for index in range(N_TIMESTAMPS)]


def restored(tokens: list[bytes]) -> list[bytes]:
    """The tokens with the 256 bytes in their places, if what is not UTF-8 was replaced, as early converters did.

    Longer tokens that end inside a character stay lost.
    """
    if len(tokens) < 256 or all(bytes([byte]) in tokens[:256] for byte in range(256)):
        return tokens
    order = [from_byte_level(letter) for letter in byte_level_alphabet()]
    known = all(token in (byte, _LOST) for token, byte in zip(tokens, order, strict=False))
    return order + tokens[256:] if known else tokens


def merges_of_ranks(tokens: list[bytes], *, lost: bool = False) -> list[tuple[bytes, bytes]]:
    """The merges of a byte-level BPE whose tokens are listed in the order they were learned, bytes first.

    A token is the union of the two tokens into which the merges before it cut its bytes.

    Args:
        lost: some tokens are not what they were (`restored`); they, and what they are parts of, have no merge.

    Raises:
        ModelFormatError: a token is no union of two earlier ones, or a byte is missing.
    """
    ranks = {token: rank for rank, token in reversed(list(enumerate(tokens)))}
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFormatError("the vocabulary lacks some of the 256 bytes")
    merges = []
    for rank, token in enumerate(tokens):
        if len(token) < 2:  # a byte, or the empty token that ends Whisper's multilingual list
            continue
        parts = _cut(token, rank, ranks)
        if len(parts) != 2 and lost:
            continue
        if len(parts) != 2:
            raise ModelFormatError(f"token {rank}, {token!r}, is no union of two tokens before it")
        merges.append((parts[0], parts[1]))
    return merges


def _cut(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts of a token after all merges of a rank below `limit`."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 1:
        unions = [ranks.get(one + other, limit) for one, other in zip(parts, parts[1:], strict=False)]
        best = min(unions)
        if best >= limit:
            break
        at = unions.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
