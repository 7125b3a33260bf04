# SPDX-License-Identifier: Apache-2.0
"""A model as a list of tensors whose data is read or computed on demand; reading and writing GGUF."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants
from gguf.gguf_writer import GGUFValue

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.plumbing import progress as bars
from slimrt.plumbing.files import followed, written_beside
from slimrt.plumbing.units import format_both

F32 = GGMLQuantizationType.F32
_ALIGNMENT = 32  # bytes, of tensor data in files that GGUFWriter writes


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


@dataclass(frozen=True, eq=False)
class ModelData:
    """A model: GGUF metadata, and tensors by GGUF name in the order of the file. Equal to itself alone."""

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
        """The value of `<architecture>.key`, or the default. ModelFormatError: neither exists."""
        value = self.value(f"{self.arch}.{key}", default)
        if value is None:
            raise ModelFormatError(f"metadata key '{self.arch}.{key}' is missing")
        return value

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. ModelFormatError: there is none."""
        if name not in self.tensors:
            raise ModelFormatError(f"tensor '{name}' is missing")
        return self.tensors[name]

    def with_tensors(self, *tensors: Tensor) -> ModelData:
        """The model with these tensors added, or replacing those of the same names."""
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


GgufPath: TypeAlias = "str | os.PathLike[str] | core.GgufFile"


def opened(file: GgufPath) -> core.GgufFile:
    """The argument if it is an open file, else the opened file at that path. Errors as core.GgufFile."""
    return file if isinstance(file, core.GgufFile) else core.GgufFile(os.fspath(file))


def read_gguf(file: GgufPath) -> ModelData:
    """The model in a GGUF file or in its shards; tensor data stays on disk until it is needed.

    Raises:
        ModelFormatError, UnsupportedError, OSError: as `slimrt.core.GgufFile`.
    """
    file = opened(file)
    metadata = {key: _value(*found) for key, found in file.fields().items()}
    # These keys describe the source's files, not the model: the writer has its own alignment, and writes one file.
    metadata = {key: value for key, value in metadata.items() if not key.startswith(("general.alignment", "split."))}
    data = file.bytes()

    def stored(name: str, number: int, sizes: tuple[int, ...], start: int) -> Tensor:
        shape, kind = tuple(reversed(sizes)), GGMLQuantizationType(number)
        byte_shape = quants.quant_shape_to_byte_shape(shape, kind)
        count = int(np.prod(byte_shape, dtype=np.int64))
        return Tensor(name, shape, kind, lambda: data[start : start + count].reshape(byte_shape))

    return ModelData(metadata, {row[0]: stored(*row) for row in file.tensor_list()})


def _value(kind: int, item: int | None, value: Any) -> GGUFValue:
    """A metadata value. Strings stay bytes if they are in an array, since tokens need not be UTF-8, or not UTF-8."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            value = value.decode()
    elif isinstance(value, np.ndarray):
        value = value.tolist()
    return GGUFValue(value, GGUFValueType(kind), None if item is None else GGUFValueType(item))


def check_room(path: Path, model: ModelData) -> int:
    """Bytes of a model's tensors in a GGUF file. OSError: too little disk space where it is to be written."""
    needed = sum(-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in model.tensors.values())
    free = shutil.disk_usage(followed(path).parent).free
    if needed > free:
        wanted, there = format_both(needed, free)
        message = f"needs {wanted} for the result, {there} free"
        raise OSError(errno.ENOSPC, message, str(path))
    return needed


def write_gguf(path: Path, model: ModelData, *, show_progress: bool) -> None:
    """Write a model, one tensor in memory at a time; `path` appears, or is replaced, only when it is complete.

    Raises:
        OSError: the disk is full, the folder is missing, ...; an old file at `path` is untouched.
    """
    with written_gguf(path, model, show_progress=show_progress):
        pass


@contextmanager
def written_gguf(path: Path, model: ModelData, *, show_progress: bool) -> Iterator[Path]:
    """write_gguf() as a context manager: yields the path of the complete file, which is moved to its place at exit."""
    needed = check_room(path, model)
    with written_beside(path) as partial:
        writer = GGUFWriter(partial, model.arch)
        try:
            _write(writer, model, needed, show_progress)
        finally:
            writer.close()
        yield partial


def _write(writer: GGUFWriter, model: ModelData, n_bytes: int, show_progress: bool) -> None:
    for key, value in model.metadata.items():
        empty = value.type in (GGUFValueType.ARRAY, GGUFValueType.STRING) and not value.value
        if key != "general.architecture" and not empty:  # the writer adds that key itself, and refuses empty values
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
