# SPDX-License-Identifier: Apache-2.0
"""The weights of a Hugging Face directory: safetensors files, one or many, read a tensor at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.tokenizer.hf import check_fetched, read_json

# bfloat16, which NumPy lacks, as its bits.
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """Where a tensor is: its file, dtype as safetensors calls it, shape and first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def as_float32(elements: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of one of DTYPES as float32."""
    return (elements.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else elements.astype(np.float32)


def as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in one of DTYPES, to the nearest, ties to even; infinite where that has no such values."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[dtype])
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Checkpoint:
    """All tensors of a directory, by name.

    Raises:
        ModelFormatError: no weights, a missing shard, a truncated or corrupted file, a tensor that its shard lacks.
        UnsupportedError: weights in another format.
    """

    def __init__(self, directory: Path):
        self.entries: dict[str, Entry] = {}
        for file, names in _shards(directory).items():
            found = read_entries(file)
            missing = sorted(names - found.keys())
            if missing:
                raise ModelFormatError(f"{file}: tensor '{missing[0]}' is missing, which {_INDEX} places there")
            self.entries |= found

    def elements(self, name: str) -> np.ndarray:
        """The elements of a tensor of DTYPES or U8, mapped from the file [shape]; bfloat16 as its bits (uint16)."""
        return stored_elements(self.entries[name])


class Alias:
    """The tensors of a checkpoint, of which `other` has a second name."""

    def __init__(self, checkpoint: Checkpoint | Alias, name: str, other: str):
        self._checkpoint, self._name, self._other = checkpoint, name, other
        self.entries: dict[str, Entry] = {**checkpoint.entries, name: checkpoint.entries[other]}

    def elements(self, name: str) -> np.ndarray:
        """As `Checkpoint.elements`."""
        return self._checkpoint.elements(self._other if name == self._name else name)


def _shards(directory: Path) -> dict[Path, set[str]]:
    """Each safetensors file, and the tensors that must be in it."""
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: set()}
    if not (directory / _INDEX).is_file():
        others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in directory.glob(pattern))
        if others:
            raise UnsupportedError(
                f"{directory} holds {others[0]}, which can run code when it is read; save it as safetensors: "
                "model.save_pretrained(DIR) in transformers"
            )
        raise ModelFormatError(f"{directory}: neither {_SINGLE} nor {_INDEX}")
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{directory / _INDEX}: no weight_map")
    shards: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelFormatError(f"{directory / _INDEX}: '{name}' is in {file!r}, which is not a file name")
        shards.setdefault(directory / file, set()).add(name)
    for file in shards:
        if not file.is_file():
            raise ModelFormatError(f"{file} is missing: {len(shards)} shards are named in {_INDEX}")
    return shards


def stored_elements(entry: Entry) -> np.ndarray:
    """As `Checkpoint.elements`."""
    return np.memmap(entry.file, DTYPES.get(entry.dtype, np.uint8), "r", entry.offset, entry.shape)


def read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of one file; the library checks lengths, offsets and overlaps. ModelFormatError: a broken file."""
    check_fetched(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.keys())
    except SafetensorError as error:
        raise ModelFormatError(f"{file}: not a safetensors file, or a damaged one: {error}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    entries = {}
    for name in names:
        tensor = header[name]
        offset = 8 + length + tensor["data_offsets"][0]
        entries[name] = Entry(file, tensor["dtype"], tuple(tensor["shape"]), offset)
    return entries
