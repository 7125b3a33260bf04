"""Text to token ids and back, with the tokenizer in a model's files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import Encoding, pre_tokenizers

from slimrt.errors import ModelFormatError
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.forking import watch
from slimrt.plumbing.memory import give_back
from slimrt.tokenizer import gguf, hf
from slimrt.tokenizer.charsmap import exact
from slimrt.tokenizer.detokenizer import IncrementalDetokenizer
from slimrt.tokenizer.languages import languages
from slimrt.tokenizer.vocabulary import Vocabulary, typed

_LONG = 1 << 18  # characters; the backend takes some 150 bytes for each, in small pieces


class Tokenizer:
    """A model's tokenizer.

    Args:
        path: a GGUF file (a model, or only a vocabulary), a Hugging Face directory, or a tokenizer.json.

    Attributes:
        vocab_size: the largest id + 1.
        bos_id, eos_id, unk_id, pad_id: the ids that the file declares, or None.
        add_bos, add_eos: whether `encode` adds ids before and after a text.
        eog_ids: all ids that end generation: end of text, of a turn, of a message.
        special_tokens: the name of each control token -> its id.
        chat_template: the file's default chat template (jinja2), or None.
        chat_templates: its further templates, by name.
        vocabulary: the underlying data, for `slimrt.tokenizer.detokenizer` and `slimrt.tokenizer.chat`.

    Raises:
        FileNotFoundError: there is no such path.
        ModelFormatError: the file is broken.
        UnsupportedError: an unknown kind of vocabulary or pre-tokenizer; the message lists the supported ones.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._adopt(_load(Path(path)))

    @classmethod
    def from_gguf_fields(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata that was already read.

        Args:
            fields: each `tokenizer.*` key and `general.architecture` -> its value (arrays as lists or NumPy arrays).

        Raises:
            ModelFormatError, UnsupportedError: as for a path.
        """
        tokenizer = cls.__new__(cls)
        tokenizer._adopt(gguf.build(fields))
        return tokenizer

    def _adopt(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.special_ids.get("bos")
        self.eos_id = vocabulary.special_ids.get("eos")
        self.unk_id = vocabulary.special_ids.get("unk")
        self.pad_id = vocabulary.special_ids.get("pad")
        self.add_bos = bool(vocabulary.prefix)
        self.add_eos = bool(vocabulary.suffix)
        self.eog_ids = vocabulary.eog_ids
        self.special_tokens = {vocabulary.tokens[id]: id for id in sorted(vocabulary.control)}
        self.chat_template = vocabulary.chat_template
        self.chat_templates = dict(vocabulary.chat_templates)
        self._written = vocabulary.backend.normalizer if vocabulary.exact_charsmap else None
        if self._written is not None:
            vocabulary.backend.normalizer = exact(self._written)
        # parse_special is a setting of the backend, not an argument of its encode.
        self._lock = threading.Lock()
        watch(self)

    def __getstate__(self) -> Vocabulary:
        """What is pickled, such as for encode() in another process: with a normalizer that the library can write."""
        if self._written is None:
            return self.vocabulary
        backend = self.vocabulary.backend
        with self._lock:
            ours, backend.normalizer = backend.normalizer, self._written
            text = backend.to_str()
            backend.normalizer = ours
        return replace(self.vocabulary, backend=tokenizers.Tokenizer.from_str(text))

    def __setstate__(self, vocabulary: Vocabulary) -> None:
        self._adopt(vocabulary)

    def __copy__(self) -> Self:
        return self  # a copy would share the backend, but not its lock

    def after_fork(self) -> None:
        """In the child process the lock is free: the thread that held it does not exist there."""
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any string.
            add_special_tokens: add BOS and EOS if the model uses them, but not next to one that the text has already.
            parse_special: read the name of a control token ("<s>") as that token; use False for untrusted text.

        Raises:
            ValueError: the text has lone surrogates, which UTF-8 cannot encode.
            ModelFormatError: the tokenizer has no token for a part of it, not even an unknown one.
            TypeError: it is not str.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text must be str, got {type(text).__name__}")
        with self._lock:
            ids = self._ids(self._encoded(text, parse_special))
        if len(text) > _LONG:
            give_back()
        if not add_special_tokens:
            return ids
        suffix = list(self.vocabulary.suffix)
        ends = bool(suffix) and ids[-len(suffix) :] == suffix
        return self.with_bos(ids) + ([] if ends else suffix)

    def _encoded(self, text: str, parse_special: bool) -> Encoding:
        """The backend's encoding of a text. The caller holds the lock. Errors as encode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the backend would raise TypeError
            raise ValueError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None
        backend = self.vocabulary.backend
        with typed("the tokenizer cannot encode this text"):
            backend.encode_special_tokens = not parse_special
            return backend.encode(text, add_special_tokens=False)

    def _ids(self, encoded: Encoding) -> list[int]:
        """An encoding's ids, aliases resolved. Offsets, which take a fifth of the time, are only read where needed."""
        aliases, texts, unknown = self.vocabulary.aliases, self.vocabulary.unknown_texts, self.unk_id
        ids = [aliases.get(id, id) for id in encoded.ids] if aliases else encoded.ids
        if texts and unknown in ids:
            pairs = zip(ids, encoded.tokens, strict=True)
            return [texts.get(text, id) if id == unknown else id for id, text in pairs]
        return ids

    @cached_property
    def spelled_out(self) -> frozenset[str]:
        """Names of the tokens that `encode` matches in a text unless parse_special=False."""
        added = self.vocabulary.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special and token.content)

    @cached_property
    def languages(self) -> Mapping[str, int]:
        """The code of each language that the model translates from or to -> its token; empty for other models."""
        return languages(self.vocabulary)

    def encode_plain(self, text: str, plain: Callable[[str], str]) -> list[int]:
        """Return the ids of a text whose parts between control tokens are encoded as plain text.

        Args:
            text: as in `encode` with add_special_tokens=False.
            plain: applied to each part; the result is encoded with parse_special=False.

        Raises:
            Errors as encode.
        """
        made, start, special = list[int](), 0, self.spelled_out
        with self._lock:
            encoded = self._encoded(text, True)
            places = zip(self._ids(encoded), encoded.offsets, strict=True)
            for id, (begin, end) in [*places, (-1, (len(text), len(text)))]:
                if id >= 0 and text[begin:end].strip() not in special:
                    continue
                if begin > start:
                    with self._after_start(start):
                        made += self._ids(self._encoded(plain(text[start:begin]), False))
                made, start = made + [id] * (id >= 0), end
        if len(text) > _LONG:
            del encoded
            give_back()
        return made

    @contextmanager
    def _after_start(self, position: int) -> Iterator[None]:
        """Keep a Metaspace that prepends a space to the first word of a text from doing so to a part in its middle."""
        space = self.vocabulary.backend.pre_tokenizer
        if not position or not isinstance(space, pre_tokenizers.Metaspace) or space.prepend_scheme != "first":
            yield
            return
        space.prepend_scheme = "never"
        try:
            yield
        finally:
            space.prepend_scheme = "first"

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return the ids with the model's BOS in front, unless it uses none or they begin with it."""
        prefix = list(self.vocabulary.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: a list, tuple or array of ids.
            skip_special_tokens: omit control tokens.

        Raises:
            ValueError: an id is negative. TypeError: an id is not a whole number.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.feed(whole("a token id", id)) for id in ids]) + detokenizer.flush()

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token; empty for an id without a token. ValueError: the id is negative."""
        return self.vocabulary.token_bytes(id)

    def detokenizer(
        self, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = False, shown: Container[int] = ()
    ) -> IncrementalDetokenizer:
        """Return a detokenizer for ids that follow `prompt_ids` (see IncrementalDetokenizer)."""
        return IncrementalDetokenizer(self.vocabulary, prompt_ids, skip_special_tokens, shown)


def _load(path: Path) -> Vocabulary:
    if path.is_dir():
        return hf.load_directory(path)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return gguf.build(gguf.read_file(path))
    if path.suffix == ".json":
        return hf.load_file(path)
    raise ModelFormatError(f"{path}: not a GGUF file, a tokenizer.json or a Hugging Face directory")
