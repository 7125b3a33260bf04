# SPDX-License-Identifier: Apache-2.0
"""Importance matrices as llama.cpp's llama-imatrix writes them: for each weight matrix the mean squares of the columns
of its input over a text.

In GGUF a matrix has the tensors NAME.in_sum2 [1 or experts, columns], sums of squares, and NAME.counts [1 or experts,
1], numbers of tokens. The older binary format, little-endian: the number of matrices; for each the length of its name,
the name, a factor, the number of values, and the values f32: mean squares times the factor; then, of newer files, the
number of chunks, the length of the text's name, and that name.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import ModelFormatError
from slimrt.modelfile.gguf import ModelData, Tensor, array, string, uint32, write_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MOST_MATRICES, _LONGEST_NAME = 1 << 20, 1 << 16  # of the binary format, to tell it from any other file

Squares = Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64]]]


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix.

    Attributes:
        path: its file.
        means: name of a weight matrix -> mean squares of its input's columns, float64 [experts * columns]; 1 for
            experts that no token took, as in llama.cpp.
        dataset: name of the text; "": not said. chunks: how many parts of it were run; 0: not said.
    """

    path: Path
    means: dict[str, NDArray[np.float64]]
    dataset: str
    chunks: int


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """Read an importance matrix in either format.

    Raises:
        ModelFormatError: it is none, or damaged: a negative or not finite number, a tensor without its counterpart.
        OSError: it cannot be read.
    """
    file = Path(path)
    with file.open("rb") as stream:
        start = stream.read(4)
    found = _read_gguf(file) if start == b"GGUF" else _read_binary(file)
    if not found.means:
        raise ModelFormatError(f"{file}: not an importance matrix: it has no sums of squares ('NAME{_SUMS}')")
    for name, means in found.means.items():
        if not (np.isfinite(means).all() and (means >= 0).all()):
            raise ModelFormatError(f"{file}: the mean squares of '{name}' hold a negative or not finite number")
    return found


def write_imatrix(path: Path, squares: Squares, dataset: str, chunks: int, chunk_size: int) -> None:
    """Write an importance matrix as GGUF; `path` appears, or is replaced, only when it is complete.

    Args:
        squares: name of a weight matrix -> sums of squares [1 or experts, columns] and counts [1 or experts].

    Raises:
        OSError: as `write_gguf`.
    """
    metadata = {
        "general.architecture": string("imatrix"),
        "general.type": string("imatrix"),
        _DATASETS: array([dataset], GGUFValueType.STRING),
        _CHUNKS: uint32(chunks),
        _CHUNK_SIZE: uint32(chunk_size),
    }
    tensors = dict[str, Tensor]()
    for name, (sums, counts) in sorted(squares.items()):
        for tensor in (Tensor.of(name + _SUMS, sums), Tensor.of(name + _COUNTS, counts[:, None])):
            tensors[tensor.name] = tensor
    write_gguf(path, ModelData(metadata, tensors), show_progress=False)


def _read_gguf(path: Path) -> Imatrix:
    file = core.GgufFile(str(path))
    shapes, means = file.tensors(), dict[str, NDArray[np.float64]]()
    for name in shapes:
        matrix, _, kind = name.rpartition(".")
        other = f"{matrix}{_COUNTS if kind == _SUMS[1:] else _SUMS}"
        if f".{kind}" in (_SUMS, _COUNTS) and other not in shapes:
            raise ModelFormatError(f"{path}: tensor '{name}' is there, and '{other}' is missing")
        if f".{kind}" == _SUMS:
            means[matrix] = _means(path, matrix, file.read(name), file.read(other))
    keys = set(file.keys())
    datasets = file.value(_DATASETS) if _DATASETS in keys else []
    chunks = file.value(_CHUNKS) if _CHUNKS in keys else 0
    if not isinstance(chunks, int) or not 0 <= chunks < 1 << 32:
        raise ModelFormatError(f"{path}: key '{_CHUNKS}' is {chunks!r}, not a number of chunks")
    return Imatrix(path, means, str(datasets[0]) if isinstance(datasets, list) and datasets else "", chunks)


def _means(path: Path, name: str, sums: np.ndarray, counts: np.ndarray) -> NDArray[np.float64]:
    """Mean squares of sums [n, columns] and counts, n numbers in any shape."""
    counts = counts.astype(np.float64).reshape(-1, 1)
    if len(counts) != len(sums):
        raise ModelFormatError(f"{path}: '{name}' has {len(sums)} rows of sums and {len(counts)} counts")
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ModelFormatError(f"{path}: the counts of '{name}' hold a negative or not finite number")
    return np.where(counts > 0, sums.astype(np.float64) / np.maximum(counts, 1), 1.0).ravel()


def _read_binary(path: Path) -> Imatrix:
    data, at = path.read_bytes(), 0

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(data) - at:
            raise ModelFormatError(
                f"{path}: not an importance matrix (imatrix.gguf, imatrix.dat), or cut off: {size} bytes are to follow "
                f"byte {at} of {len(data)}"
            )
        at += size
        return data[at - size : at]

    def number(low: int, high: int) -> int:
        value: int = struct.unpack("<i", take(4))[0]
        if not low <= value <= high:
            raise ModelFormatError(
                f"{path}: not an importance matrix (imatrix.gguf, imatrix.dat), or damaged: {value} before byte {at}, "
                f"where a number from {low} to {high} must be"
            )
        return value

    means, most = dict[str, NDArray[np.float64]](), (1 << 31) - 1
    for _ in range(number(1, _MOST_MATRICES)):
        name = take(number(1, _LONGEST_NAME)).decode(errors="replace")
        factor, n = number(0, most), number(1, most)
        means[name] = np.frombuffer(take(4 * n), "<f4").astype(np.float64) / max(factor, 1)
    chunks, dataset = 0, ""
    if at < len(data):
        chunks, dataset = number(0, most), take(number(0, most)).decode(errors="replace")
    if at < len(data):
        raise ModelFormatError(f"{path}: {len(data) - at} bytes follow the end of the importance matrix")
    return Imatrix(path, means, dataset, chunks)
