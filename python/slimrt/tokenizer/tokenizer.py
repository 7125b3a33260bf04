"""Text to token ids and back, from the vocabulary a model file carries."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, pre_tokenizers

from slimrt.errors import ModelFormatError
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.forking import watch
from slimrt.tokenizer import gguf, hf
from slimrt.tokenizer.detokenizer import IncrementalDetokenizer
from slimrt.tokenizer.vocabulary import Vocabulary, typed


class Tokenizer:
    """A model's tokenizer.

    Args:
        path: a GGUF file (a model, or only a vocabulary), a Hugging Face directory, or a tokenizer.json.

    Attributes:
        vocab_size: one more than the largest id.
        bos_id, eos_id, unk_id, pad_id: the ids the file declares, or None.
        add_bos, add_eos: whether `encode` puts ids before and after a text.
        eog_ids: every id that ends a generation: end of text, of a turn, of a message.
        special_tokens: the text of each control token, to its id.
        chat_template: the file's chat template (jinja2), or None.
        chat_templates: others of the file's, by name.
        vocabulary: the loaded facts, for `slimrt.tokenizer.detokenizer` and `slimrt.tokenizer.chat`.

    Raises:
        FileNotFoundError: there is no such path.
        ModelFormatError: the file is broken.
        UnsupportedError: an unknown kind of vocabulary or pre-tokenizer; the message lists the supported ones.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._adopt(_load(Path(path)))

    @classmethod
    def from_gguf_fields(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF's metadata that is already read.

        Args:
            fields: each `tokenizer.*` key and `general.architecture`, to its value (arrays as lists or NumPy arrays).

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
        # The backend keeps "control tokens are plain text" as a setting, not as an argument of encode.
        self._lock = threading.Lock()
        watch(self)

    def after_fork(self) -> None:
        """In the child nobody is encoding."""
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any string.
            add_special_tokens: add BOS and EOS as the model wants them; never a second one next to one in the text.
            parse_special: read the text of a control token ("<s>") as that token; False for untrusted text.

        Raises:
            ValueError: the text has lone surrogates, which no UTF-8 can write.
            ModelFormatError: the tokenizer has no token for a part of it, not even an unknown one.
            TypeError: it is not str.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text must be str, got {type(text).__name__}")
        with self._lock:
            ids = self._ids(self._encoded(text, parse_special))
        if not add_special_tokens:
            return ids
        suffix = list(self.vocabulary.suffix)
        ends = bool(suffix) and ids[-len(suffix) :] == suffix
        return self.with_bos(ids) + ([] if ends else suffix)

    def _encoded(self, text: str, parse_special: bool) -> Encoding:
        """What the backend makes of a text. The caller holds the lock. Errors as encode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the backend calls it a TypeError
            raise ValueError(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None
        backend = self.vocabulary.backend
        with typed("the tokenizer cannot encode this text"):
            backend.encode_special_tokens = not parse_special
            return backend.encode(text, add_special_tokens=False)

    def _ids(self, encoded: Encoding) -> list[int]:
        """The vocabulary's ids. Offsets, a fifth of the time that a long text takes, are read only where needed."""
        aliases = self.vocabulary.aliases
        return [aliases.get(id, id) for id in encoded.ids] if aliases else encoded.ids

    @cached_property
    def spelled_out(self) -> frozenset[str]:
        """The texts that `encode` reads as one token each unless told parse_special=False."""
        added = self.vocabulary.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special and token.content)

    def encode_plain(self, text: str, plain: Callable[[str], str]) -> list[int]:
        """Return the ids of a text whose parts between control tokens are turned into plain text.

        Args:
            text: as for `encode`, without add_special_tokens.
            plain: makes of each part what is to be encoded with parse_special=False.

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
        return made

    @contextmanager
    def _after_start(self, position: int) -> Iterator[None]:
        """Has a Metaspace that marks the first word of a whole text leave alone that of a part which begins later."""
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
        """Return the ids with the model's BOS in front, unless it has none or it is already there."""
        prefix = list(self.vocabulary.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: a list, tuple or array of ids.
            skip_special_tokens: leave control tokens out.

        Raises:
            ValueError: an id is negative. TypeError: it is no whole number.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.feed(whole("a token id", id)) for id in ids]) + detokenizer.flush()

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes one token stands for; empty for an id without a token, ValueError if negative."""
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
