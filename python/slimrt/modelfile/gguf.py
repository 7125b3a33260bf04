# SPDX-License-Identifier: Apache-2.0
"""A model as a list of tensors that are read, or computed, only when they are written; and GGUF in and out."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.plumbing import progress as bars
from slimrt.plumbing.files import written_beside
from slimrt.plumbing.units import format_bytes

F32 = GGMLQuantizationType.F32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32  # of tensor data, when the file does not say


@dataclass(frozen=True)
class Tensor:
    """A tensor whose data is fetched on demand, so that a model never has to fit in memory.

    Attributes:
        name: its GGUF name.
        shape: elements, outermost dimension first (a linear weight is [out, in]).
        type: how the elements are stored.
        load: returns the stored bytes, uint8 [..., bytes of a row].
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    load: Callable[[], np.ndarray]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return quants.quant_shape_to_byte_shape(self.shape, self.type)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.byte_shape, dtype=np.int64))

    def values(self) -> np.ndarray:
        """The elements as float32 [shape].

        Raises:
            UnsupportedError: the type cannot be unpacked.
        """
        try:
            return quants.dequantize(self.load(), self.type)
        except NotImplementedError as error:
            raise UnsupportedError(f"tensor '{self.name}' is {self.type.name}, which cannot be unpacked") from error

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Tensor:
        """A float32 tensor that is already in memory."""
        array = np.ascontiguousarray(values, np.float32)
        return cls(name, array.shape, F32, lambda: array.view(np.uint8))


@dataclass(frozen=True)
class ModelData:
    """A model: GGUF metadata, and tensors by GGUF name in the order of the file."""

    metadata: dict[str, GGUFValue]
    tensors: dict[str, Tensor]

    @property
    def arch(self) -> str:
        """The value of general.architecture."""
        return str(self.value("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, without its type."""
        return self.metadata[key].value if key in self.metadata else default

    def size(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.key`; ModelFormatError when there is neither it nor a default."""
        value = self.value(f"{self.arch}.{key}", default)
        if value is None:
            raise ModelFormatError(f"metadata key '{self.arch}.{key}' is missing")
        return value

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; ModelFormatError when there is none."""
        if name not in self.tensors:
            raise ModelFormatError(f"tensor '{name}' is missing")
        return self.tensors[name]

    def with_tensors(self, *tensors: Tensor) -> ModelData:
        """The model with these tensors added or put in the place of their namesakes."""
        return replace(self, tensors=self.tensors | {t.name: t for t in tensors})

    def with_metadata(self, values: Mapping[str, GGUFValue]) -> ModelData:
        """The model with these metadata keys added or overwritten."""
        return replace(self, metadata={**self.metadata, **values})


def string(value: str) -> GGUFValue:
    return GGUFValue(value, GGUFValueType.STRING)


def uint32(value: int) -> GGUFValue:
    return GGUFValue(value, GGUFValueType.UINT32)


def float32(value: float) -> GGUFValue:
    return GGUFValue(value, GGUFValueType.FLOAT32)


def boolean(value: bool) -> GGUFValue:
    return GGUFValue(value, GGUFValueType.BOOL)


def array(values: list[Any], kind: GGUFValueType) -> GGUFValue:
    return GGUFValue(values, GGUFValueType.ARRAY, kind)


class _Header:
    """A cursor over a GGUF header that the native reader has already validated."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def bytes(self) -> bytes:
        size = self.scalar("Q")
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self) -> GGUFValue:
        kind = GGUFValueType(self.scalar("I"))
        if kind == GGUFValueType.STRING:
            return GGUFValue(self.bytes().decode(errors="replace"), kind)
        if kind != GGUFValueType.ARRAY:
            return GGUFValue(self.scalar(_SCALARS[kind]), kind)
        item, count = GGUFValueType(self.scalar("I")), self.scalar("Q")
        if item == GGUFValueType.STRING:  # kept as bytes: a token need not be UTF-8
            return GGUFValue([self.bytes() for _ in range(count)], kind, item)
        if item == GGUFValueType.ARRAY:
            raise UnsupportedError(f"metadata at byte {self.at} is an array of arrays")
        values = np.frombuffer(self.data, "<" + _SCALARS[item], count, self.at)
        self.at += values.nbytes
        return GGUFValue(values.tolist(), kind, item)


def read_gguf(path: Path) -> ModelData:
    """Open a GGUF file; tensor data stays on disk until it is asked for.

    Raises:
        ModelFormatError, UnsupportedError: as `slimrt.core.GgufFile`, which validates the file first.
        OSError: it cannot be read.
    """
    from slimrt import core

    core.GgufFile(str(path))
    with path.open("rb") as file:
        header = _Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    header.at = 8  # magic and version
    n_tensors, n_keys = header.scalar("Q"), header.scalar("Q")
    metadata = {header.bytes().decode(errors="replace"): header.value() for _ in range(n_keys)}
    found = []
    for _ in range(n_tensors):
        name = header.bytes().decode(errors="replace")
        dimensions = [header.scalar("Q") for _ in range(header.scalar("I"))]
        kind = GGMLQuantizationType(header.scalar("I"))
        found.append((name, tuple(reversed(dimensions)), kind, header.scalar("Q")))
    # The writer aligns in its own way, so the key must not travel on.
    alignment = metadata.pop("general.alignment", uint32(_ALIGNMENT)).value
    start = -(-header.at // alignment) * alignment

    def stored(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> Tensor:
        byte_shape = quants.quant_shape_to_byte_shape(shape, kind)
        count = int(np.prod(byte_shape, dtype=np.int64))
        return Tensor(
            name, shape, kind, lambda: np.frombuffer(header.data, np.uint8, count, start + offset).reshape(byte_shape)
        )

    return ModelData(metadata, {row[0]: stored(*row) for row in found})


def write_gguf(path: Path, model: ModelData, *, show_progress: bool) -> None:
    """Write a model, one tensor in memory at a time; `path` appears, or is replaced, only when it is complete.

    Raises:
        OSError: the disk is full, the folder is missing, ...; an old file at `path` is untouched.
    """
    needed = sum(-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in model.tensors.values())
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        message = f"needs {format_bytes(needed)} for the result, {format_bytes(free)} free"
        raise OSError(errno.ENOSPC, message, str(path))
    with written_beside(path) as partial:
        writer = GGUFWriter(partial, model.arch)
        try:
            _write(writer, model, needed, show_progress)
        finally:
            writer.close()


def _write(writer: GGUFWriter, model: ModelData, n_bytes: int, show_progress: bool) -> None:
    for key, value in model.metadata.items():
        empty = value.type in (GGUFValueType.ARRAY, GGUFValueType.STRING) and not value.value
        if key != "general.architecture" and not empty:  # the writer has the one and refuses the other
            writer.add_key_value(key, value.value, value.type, value.sub_type)
    for tensor in model.tensors.values():
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    with bars.bar(show_progress, n_bytes, "writing", "B") as update:
        for tensor in model.tensors.values():
            writer.write_tensor_data(np.ascontiguousarray(tensor.load()))
            done += tensor.nbytes
            update(done, n_bytes)
