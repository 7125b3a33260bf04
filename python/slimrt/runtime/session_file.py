"""The files of saved sessions: tokens, and the rows of their cache."""

from __future__ import annotations

import json
import operator
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import ModelFormatError
from slimrt.plumbing.files import check_target, written_beside

# File format: magic, length of the header (uint64), header (JSON), rows, CRC-32 of all preceding bytes (uint32).
_MAGIC = b"SLIMRTSE"
_VERSION = 2
_MAX_HEADER = 1 << 28
_CHECKSUM = struct.Struct("<I")


def check_replaced(target: Path, model: Sequence[str], overwrite: bool) -> None:
    """Refuse a path whose file a session must not replace.

    Raises:
        FileExistsError: there is one that is no session, unless `overwrite`; an empty one may be replaced.
        ValueError: it is one of the model's. OSError: as check_target.
    """
    check_target(target)
    if not target.exists():
        return
    if any(os.path.exists(file) and target.samefile(file) for file in model):
        raise ValueError(f"{target}: the session would replace the model; name another file")
    if not overwrite and target.stat().st_size and not is_session(target):
        raise FileExistsError(
            f"{target} would be replaced, and is no session: name another file, or replace it: --force, "
            "overwrite=True in Python"
        )


def write(target: Path, header: dict[str, Any], rows: NDArray[np.uint8]) -> None:
    """Write a session file. OSError: it cannot be written; it is not there then."""
    text = json.dumps(header | {"version": _VERSION, "bytes": int(rows.nbytes)}).encode()
    with written_beside(target) as partial, partial.open("wb") as file:
        start = _MAGIC + struct.pack("<Q", len(text)) + text
        file.write(start)
        file.write(rows.data)
        file.write(_CHECKSUM.pack(zlib.crc32(rows.data, zlib.crc32(start))))


def is_session(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts like a session file, of any version, intact or not."""
    with Path(path).open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a session file: version, model, cache, tokens, bytes (of rows). The checksum is not verified.

    Raises:
        ModelFormatError: not a session file, of another version, or truncated.
    """
    with Path(path).open("rb") as file:
        return _read_start(file, path)[0]


def _read_start(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """The header, and the bytes of the file that precede the rows. Errors as read_header."""
    start = file.read(16)
    if len(start) < 16 or start[:8] != _MAGIC:
        raise ModelFormatError(f"{path}: not a slimrt session file")
    size = struct.unpack("<Q", start[8:])[0]
    text = file.read(size) if size <= _MAX_HEADER else b""
    try:
        header = dict(json.loads(text))
        version, n_bytes = int(header["version"]), int(header["bytes"])
        if version == _VERSION:
            header["tokens"] = [operator.index(id) for id in header["tokens"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelFormatError(f"{path}: the header of this session file is broken") from error
    if version != _VERSION:
        raise ModelFormatError(
            f"{path}: session format {version}; this slimrt reads {_VERSION}: save the session again with it"
        )
    length, expected = os.fstat(file.fileno()).st_size, 16 + size + n_bytes + _CHECKSUM.size
    if length != expected or n_bytes < 0:
        what = "cut off" if length < expected else "damaged"
        raise ModelFormatError(f"{path}: this session file is {what}: {length} bytes, not {expected}")
    return header, start + text


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Header and rows. Errors as read_header; ModelFormatError for a wrong checksum."""
    with Path(path).open("rb") as file:
        header, start = _read_start(file, path)
        rows = np.fromfile(file, np.uint8, int(header["bytes"]))
        checksum = file.read(_CHECKSUM.size)
    if checksum != _CHECKSUM.pack(zlib.crc32(rows.data, zlib.crc32(start))):
        raise ModelFormatError(
            f"{path}: this session file is damaged (its checksum is another): save the session again"
        )
    return header, rows
