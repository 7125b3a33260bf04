# SPDX-License-Identifier: Apache-2.0
"""A model's own generation settings, in transformers' names and meaning: keys "slimrt.generation." of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from slimrt import core
from slimrt.errors import ModelFormatError

PREFIX = "slimrt.generation."
SUPPRESSED = "tokenizer.ggml.suppress_tokens"  # llama.cpp's key for one of them, in its files of Gemma 4
_MOST = 1 << 31


@dataclass(frozen=True)
class Settings:
    """How a model's authors generate with it. The defaults are those of a file that says nothing.

    Lengths are in tokens; with an encoder they count what the output begins with, else the prompt.

    Attributes:
        no_repeat_ngram_size: no sequence of so many tokens occurs twice; 0: off.
        encoder_no_repeat_ngram_size: none of the source's comes in the text; 0: off.
        min_length, min_new_tokens: no end before; the latter counts neither the prompt nor a decoder's start.
        max_length, max_new_tokens: as these, the most; 0: not said.
        forced_eos_token_id: the last token of a text that reaches its most tokens; None: any.
        suppress_tokens, begin_suppress_tokens: ids that never come, and that do not come first.
        bad_words_ids: sequences of ids that never come.
        num_beams: 0: not said. length_penalty, early_stopping: of beam search.
        renormalize_logits: scores of beams are normalised without the tokens that may not come.
    """

    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0
    max_length: int = 0
    max_new_tokens: int = 0
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    num_beams: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    renormalize_logits: bool = False

    @classmethod
    def of(cls, file: core.GgufFile, n_vocab: int) -> Settings:
        """Those of a file. ModelFormatError: one is of another kind, or not a token of the vocabulary."""
        said = {one.name: PREFIX + one.name for one in fields(cls)}
        known = set(file.keys())
        values = {name: _checked(key, file.value(key), n_vocab) for name, key in said.items() if key in known}
        if SUPPRESSED in known and "suppress_tokens" not in values:
            ids = file.value(SUPPRESSED)
            if isinstance(ids, list):  # without those of no token
                ids = [id for id in ids if type(id) is not int or 0 <= id < n_vocab]
            values["suppress_tokens"] = _checked(SUPPRESSED, ids, n_vocab)
        return cls(**values)


SEARCH = ("num_beams", "length_penalty", "early_stopping")
"""Settings that are options of a beam search too."""


def _checked(key: str, value: Any, n_vocab: int) -> Any:
    """A value in the kind of its field."""
    name = key.removeprefix(PREFIX)
    if name == "length_penalty":
        fits = isinstance(value, float) and -40 <= value <= 40
    elif name in ("early_stopping", "renormalize_logits"):
        fits = isinstance(value, bool)
    elif name.endswith(("_tokens", "_ids")) and not name.endswith("new_tokens"):
        low = -1 if name == "bad_words_ids" else 0
        fits = isinstance(value, list) and all(type(id) is int and low <= id < n_vocab for id in value)
        value = (words_of(value) if name == "bad_words_ids" else tuple(value)) if fits else value
    else:
        fits = type(value) is int and 0 <= value < (n_vocab if name == "forced_eos_token_id" else _MOST)
    if not fits:
        raise ModelFormatError(f"{key} is {value!r:.80}, which is not such a setting of a vocabulary of {n_vocab}")
    return value


def words_of(ids: list[int]) -> tuple[tuple[int, ...], ...]:
    """Sequences of ids from one list, in which -1 stands behind each."""
    words, word = list[tuple[int, ...]](), list[int]()
    for id in ids:
        if id >= 0:
            word.append(id)
        elif word:
            words.append(tuple(word))
            word = []
    return (*words, tuple(word)) if word else tuple(words)
