"""Prefix cache on disk: rows that the tree evicts, one file for each block of 32 tokens, for later and after restarts.

A file's name is a hash of everything that its rows depend on: the model, the cache's formats, fold and rotary
frequencies, the key, and all tokens up to the block's end, chained block by block. Where rows cannot be saved in parts
(sliding windows, aging rows) a file holds all rows of a text.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import ContextOverflowError, ModelFormatError, UnsupportedError
from slimrt.modes import AGING
from slimrt.plumbing.closing import Closing
from slimrt.plumbing.notes import note
from slimrt.plumbing.units import format_bytes
from slimrt.runtime.runtime import Runtime

BLOCK = 32  # tokens of a block of the cache

# A file: magic, CRC-32 of all that follows, length of the header (uint32 both), header (JSON), rows.
_MAGIC = b"SLIMRTPF"
_START = struct.Struct("<8sII")
_VERSION = 1
_MAX_HEADER = 1 << 20
_WHOLE = "-whole"
_PARTIAL = ".partial"

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Found:
    """Files with the rows [begin, end) of a text, in order."""

    names: tuple[str, ...]
    begin: int
    end: int

    @property
    def blocks(self) -> int:
        return (self.end - self.begin) // BLOCK


class PrefixStore(Closing):
    """A directory of row files for one model; only one process may use it. Not thread-safe.

    Attributes:
        prefill_rate: tokens per second of prefill, set by the caller; 0: unknown, then files are always read.
        disk_rate: bytes per second of loading; 0: not measured yet.
        keeps_whole: rows of this cache can only be saved for a whole text.
        files, bytes: in the directory, those of other models included.
        loaded, written, damaged: tokens read from files, tokens written, damaged files removed.

    Raises:
        OSError: the directory cannot be made or written to, or another process uses it.
        ValueError: size is not positive.
    """

    def __init__(self, runtime: Runtime, directory: str | os.PathLike[str], size: int):
        if size <= 0:
            raise ValueError(f"the size of the prefix store must be positive, got {size}")
        self.prefill_rate = self.disk_rate = 0.0
        self.keeps_whole, self._refused = any(layer["mode"] in AGING for layer in runtime.info["layers"]), False
        self.loaded = self.written = self.damaged = 0
        self._directory, self._size = Path(directory), size
        if os.path.lexists(directory) and not self._directory.is_dir():
            raise NotADirectoryError(f"{directory} is not a directory: name one to keep prefixes in")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock: int | None = _locked(self._directory)
        with runtime.use() as engine:
            self._identity = _identity(runtime, engine)
        self._model_name = runtime.source.name
        self._start = blake2b(json.dumps(self._identity).encode(), digest_size=16)
        self._index = self._list_files()  # name -> bytes, least recently used first
        self.bytes = sum(self._index.values())
        self._note_others()
        self._make_room(0)

    @property
    def files(self) -> int:
        return len(self._index)

    def find(self, ids: Sequence[int], length: int, key: str = "") -> Found | None:
        """The files that extend a text beyond its first `length` tokens, if there are any and loading them is faster
        than computing."""
        hashes = self._hashes(np.array(ids, np.int32), key)
        begin = end = length // BLOCK
        while end < len(hashes) and self._name(hashes[end]) in self._index:
            end += 1
        found = Found(tuple(map(self._name, hashes[begin:end])), begin * BLOCK, end * BLOCK)
        for i in range(len(hashes), end, -1):
            if (name := self._name(hashes[i - 1], whole=True)) in self._index:
                found = Found((name,), 0, i * BLOCK)
                break
        return found if found.end > length and self._is_faster(found, found.end - length) else None

    def load(self, engine: core.Engine, found: Found, sequence: int | None, length: int) -> tuple[int | None, int]:
        """Append found rows to a sequence of `length` tokens (None: none yet). Returns the sequence, which may be
        another one, and its length: less than found.end if there is no room or a file is damaged, which is then named
        in a warning and removed."""
        target = engine.fork(sequence) if sequence is not None and found.begin > 0 else engine.new_sequence()
        engine.truncate(target, found.begin)
        for name in found.names:
            started = time.perf_counter()
            try:
                engine.load_rows(target, self._read(name))
            except FileNotFoundError:
                self._forget(name)
                break
            except (ModelFormatError, OSError) as error:
                self._remove(name, str(error))
                break
            except ContextOverflowError:
                break
            self._measure(self._index[name] / (time.perf_counter() - started))
        for name in reversed(found.names):  # the first block is used last, so that it is removed last
            self._use(name)
        if (reached := engine.length(target)) <= length:
            engine.free_sequence(target)
            return sequence, length
        if sequence is not None:
            engine.free_sequence(sequence)
        self.loaded += reached - length
        return target, reached

    def save(self, engine: core.Engine, sequence: int, ids: Ids, begin: int, key: str = "") -> None:
        """Write the whole blocks of a sequence of these tokens that end after `begin`, unless they are there already.
        If the disk is full they are dropped, with one warning; also if there is no block free to cut a copy to whole
        blocks, as rows that age may need."""
        hashes = self._hashes(ids, key)
        first = begin // BLOCK
        try:
            for i in reversed(range(first, 0 if self.keeps_whole else len(hashes))):  # the first is removed last
                name = self._name(hashes[i])
                if not self._use(name):
                    self._write(name, _rows(engine, sequence, i * BLOCK, (i + 1) * BLOCK), BLOCK)
        except UnsupportedError:
            self.keeps_whole = True
        if self.keeps_whole and hashes and not self._use(name := self._name(hashes[-1], whole=True)):
            end = len(hashes) * BLOCK
            if engine.can_truncate(sequence, end):
                with suppress(ContextOverflowError):
                    self._write(name, _rows(engine, sequence, 0, end), end)

    def close(self) -> None:
        """Unlock the directory; the files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hashes(self, ids: Ids, key: str) -> list[bytes]:
        """A hash for each whole block, over it and all blocks before it."""
        hashed, hashes = self._start.copy(), []
        hashed.update(blake2b(key.encode(), digest_size=16).digest())
        for i in range(len(ids) // BLOCK):
            hashed.update(ids[i * BLOCK : (i + 1) * BLOCK].astype("<i4").tobytes())
            hashes.append(hashed.digest())
            hashed = blake2b(hashes[-1], digest_size=16)
        return hashes

    def _name(self, hashed: bytes, whole: bool = False) -> str:
        return f"{self._start.hexdigest()[:16]}-{hashed.hex()}{_WHOLE if whole else ''}"

    def _is_faster(self, found: Found, tokens: int) -> bool:
        if not self.prefill_rate or not self.disk_rate:
            return True
        size = sum(self._index[name] for name in found.names)
        if size / self.disk_rate < tokens / self.prefill_rate:
            return True
        self.disk_rate *= 1.1  # decays the estimate, so that a disk that was busy once is tried again
        return False

    def _measure(self, rate: float) -> None:
        self.disk_rate = 0.8 * self.disk_rate + 0.2 * rate if self.disk_rate else rate

    def _use(self, name: str) -> bool:
        """Mark a file as recently used. False: there is no file of this name."""
        if name not in self._index:
            return False
        self._index.move_to_end(name)
        now = time.time_ns()
        with suppress(OSError):
            os.utime(self._directory / name, ns=(now, now))
        return True

    def _forget(self, name: str) -> None:
        self.bytes -= self._index.pop(name, 0)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until `size` more bytes fit. OSError: one cannot be removed."""
        while self._index and self.bytes + size > self._size:
            name = next(iter(self._index))
            (self._directory / name).unlink(missing_ok=True)
            self._forget(name)

    def _write(self, name: str, rows: NDArray[np.uint8], tokens: int) -> None:
        header = json.dumps(self._identity | {"name": name, "model_name": self._model_name}).encode()
        size = _START.size + len(header) + rows.nbytes
        if size > self._size:
            return
        path, partial = self._directory / name, self._directory / (name + _PARTIAL)
        checksum = zlib.crc32(rows.data, zlib.crc32(header, zlib.crc32(struct.pack("<I", len(header)))))
        try:
            self._make_room(size)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_START.pack(_MAGIC, checksum, len(header)))
                file.write(header)
                file.write(rows.data)
            os.replace(partial, path)  # without fsync: a file that a system crash cut off fails its checksum
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            if not self._refused:
                why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
                note(f"{self._directory}: prefixes are not written there: {why}", logging.WARNING)
            self._refused = True
            return
        self._index[name] = size
        self._use(name)
        self.bytes += size
        self.written += tokens

    def _read(self, name: str) -> NDArray[np.uint8]:
        """The rows in a file. ModelFormatError: it is damaged."""
        header, rows = _parts((self._directory / name).read_bytes())
        if {**header, **self._identity, "name": name} != header:
            raise ModelFormatError("it is another file, renamed")
        return rows

    def _remove(self, name: str, why: str) -> None:
        note(f"{self._directory / name}: this file of a prefix is not usable and was removed: {why}", logging.WARNING)
        with suppress(OSError):
            (self._directory / name).unlink()
        self._forget(name)
        self.damaged += 1

    def _list_files(self) -> OrderedDict[str, int]:
        """The files in the directory, of other models too, since they count. Partial files of killed writers go."""
        found = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(_PARTIAL):
                    os.unlink(entry.path)
                elif entry.is_file(follow_symlinks=False) and _is_name(entry.name):
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns, entry.name, stat.st_size))
        return OrderedDict((name, size) for _, name, size in sorted(found))

    def _note_others(self) -> None:
        """Note which files belong to other models or caches, and are not used here."""
        others: dict[str, list[str]] = {}
        for name in self._index:
            others.setdefault(name[:16], []).append(name)
        others.pop(self._start.hexdigest()[:16], None)
        for names in others.values():
            size = format_bytes(sum(self._index[name] for name in names))
            note(f"{self._directory}: {len(names)} files ({size}) are not used here: {self._what_differs(names[0])}")

    def _what_differs(self, name: str) -> str:
        try:
            other = _parts((self._directory / name).read_bytes())[0]
        except (OSError, ModelFormatError) as error:
            return str(error)
        if other.get("version") != _VERSION:
            return f"they are of version {other.get('version')} of this format"
        if other.get("model") != self._identity["model"]:
            return f"they are of another model, {other.get('model_name')}"
        if other.get("cache") != self._identity["cache"]:
            return f"they are of another cache, {other.get('cache')}"
        if other.get("rows") != self._identity["rows"]:
            return "their rows are folded otherwise"
        return "they were computed under other rotary frequencies, which the model chooses by its n_ctx"


def _locked(directory: Path) -> int:
    """Lock a directory until the descriptor is closed or the process ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise
        raise OSError(
            error.errno, "another process keeps its prefixes in this directory: name another", str(directory)
        ) from None
    return descriptor


def _identity(runtime: Runtime, engine: core.Engine) -> dict[str, Any]:
    """What rows depend on besides tokens: hashes of the core's own description, layout and fold apart from rotation."""
    sequence = engine.new_sequence()
    saved = engine.save_rows(sequence, 0).tobytes()
    words, _, rotation = saved[saved.index(b"slimrt") :].rpartition(b" rope:")
    engine.free_sequence(sequence)
    layers = runtime.info["layers"]
    caches = dict.fromkeys(":".join(filter(None, (layer["mode"], layer["type"]))) for layer in layers)
    return {
        "version": _VERSION,
        "model": runtime.source.fingerprint,
        "cache": "+".join(caches),
        "rows": blake2b(words, digest_size=16).hexdigest(),
        "rotation": blake2b(rotation, digest_size=16).hexdigest(),
    }


def _rows(engine: core.Engine, sequence: int, begin: int, end: int) -> NDArray[np.uint8]:
    """The rows [begin, end) of a sequence, as bytes."""
    part = engine.fork(sequence)
    try:
        engine.truncate(part, end)
        return engine.save_rows(part, begin)
    finally:
        engine.free_sequence(part)


def _is_name(name: str) -> bool:
    kind, _, hashed = name.removesuffix(_WHOLE).partition("-")
    return len(kind) == 16 and len(hashed) == 32 and set(kind + hashed) <= set("0123456789abcdef")


def _parts(data: bytes) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Header and rows of a file. ModelFormatError: it is damaged."""
    if len(data) < _START.size or data[:8] != _MAGIC:
        raise ModelFormatError("it does not begin as such a file does")
    _, checksum, size = _START.unpack_from(data)
    if zlib.crc32(memoryview(data)[12:]) != checksum or size > min(_MAX_HEADER, len(data) - _START.size):
        raise ModelFormatError("its checksum is another")
    try:
        header = dict(json.loads(data[_START.size : _START.size + size]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelFormatError("its header is broken") from error
    return header, np.frombuffer(data, np.uint8, offset=_START.size + size)
