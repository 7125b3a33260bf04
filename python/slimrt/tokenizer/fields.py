"""The fields of a GGUF that describe its tokenizer, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from slimrt.errors import ModelFormatError

_NO_TOKEN = 0xFFFFFFFF


class Type(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Fields:
    """The fields of one group (`tokenizer.ggml.*`); each getter checks the type, and raises ModelFormatError."""

    def __init__(self, fields: Mapping[str, Any], group: str = "tokenizer.ggml"):
        self._fields, self._group = fields, group

    def _get(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self._fields.get(f"{self._group}.{name}")
        if value is not None and not isinstance(value, kind):
            raise ModelFormatError(f"{self._group}.{name} is {type(value).__name__}, which it cannot be")
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._get(name, str)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, bool)
        return default if value is None else value

    def id(self, name: str, n_tokens: int) -> int | None:
        value: int | None = self._get(f"{name}_token_id", int)
        if value is None or value in (_NO_TOKEN, -1):
            return None
        if not 0 <= value < n_tokens:
            raise ModelFormatError(f"{self._group}.{name}_token_id is {value}, the vocabulary has {n_tokens} tokens")
        return value

    def special_ids(self, n_tokens: int) -> dict[str, int]:
        """The declared ids of "bos", "eos", "unk" and "pad"."""
        named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {name: self.id(field, n_tokens) for name, field in named.items()}
        return {name: id for name, id in found.items() if id is not None}

    def further_ends(self, n_tokens: int) -> list[int | None]:
        """The declared ids that end a text or a message, beside EOS."""
        return [self.id(name, n_tokens) for name in ("eot", "eom")]

    def ids(self, name: str, n_tokens: int) -> list[int]:
        """A list of token ids; empty if there is none."""
        value = self._get(name, (np.ndarray, Sequence))
        array = np.asarray([] if value is None else value)
        if array.ndim != 1 or array.size and array.dtype.kind not in "iu":
            raise ModelFormatError(f"{self._group}.{name} is not a list of token ids")
        if array.size and not 0 <= array.min() <= array.max() < n_tokens:
            raise ModelFormatError(f"{self._group}.{name} has an id outside of the vocabulary of {n_tokens} tokens")
        return [int(id) for id in array.tolist()]

    def strings(self, name: str) -> list[str]:
        value: list[str] | None = self._get(name, list)
        if not value or not all(isinstance(item, str) for item in value):
            raise ModelFormatError(f"{self._group}.{name} is missing, empty or not a list of strings")
        return value

    def numbers(self, name: str, count: int, default: float | None = None) -> list[Any]:
        value = self._get(name, (np.ndarray, Sequence))
        if value is None and default is not None:
            return [default] * count
        array = np.asarray([] if value is None else value)
        if array.shape != (count,) or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise ModelFormatError(f"{self._group}.{name} is not {count} finite numbers, one for each token")
        return list(array.tolist())

    def bytes(self, name: str) -> bytes:
        value = self._get(name, (np.ndarray, bytes, list))
        try:
            return b"" if value is None else bytes(value)
        except (TypeError, ValueError) as error:
            raise ModelFormatError(f"{self._group}.{name} is not a list of bytes: {error}") from error

    def chat_template(self) -> str | None:
        value = self._fields.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def chat_templates(self) -> dict[str, str]:
        """The named templates: tokenizer.chat_template.NAME."""
        prefix = "tokenizer.chat_template."
        return {
            key.removeprefix(prefix): value
            for key, value in self._fields.items()
            if key.startswith(prefix) and isinstance(value, str)
        }
