"""A context that is kept: append, fork, truncate, save."""

from __future__ import annotations

import json
import operator
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.cache.planner import BLOCK
from slimrt.errors import ContextOverflowError, ModelFormatError
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.closing import Closing
from slimrt.plumbing.files import written_beside
from slimrt.runtime.runtime import Runtime

# A file: magic, length of the header (uint64), header (JSON), rows, CRC-32 of all before it (uint32).
_MAGIC = b"SLIMRTSE"
_VERSION = 2
_MAX_HEADER = 1 << 28
_CHECKSUM = struct.Struct("<I")

CLOSED = "the session is closed"

TokenIds = Sequence[int] | NDArray[np.integer[Any]]


def as_ids(ids: TokenIds, n_vocab: int) -> list[int]:
    """Token ids as a list of int.

    Raises:
        ValueError: not one-dimensional integers, or one that is not in the vocabulary.
        TypeError: None, bytes, or texts.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return []
    if ids is None or array.dtype.kind in "SU":
        hint = {"S": ": decode() bytes first", "U": ": several texts are given as a list"}.get(array.dtype.kind, "")
        raise TypeError(f"a text is str, or its token ids, got {type(ids).__name__}{hint if array.ndim < 2 else ''}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are a one-dimensional sequence of int, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= n_vocab:
        bad = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"token id {bad} is not in the vocabulary of {n_vocab} tokens")
    return [int(id) for id in array]


def as_prompt(runtime: Runtime, prompt: str | TokenIds) -> list[int]:
    """The ids of a text, or ids as a list: of an empty text BOS alone, if the model has it. Errors as as_ids."""
    return runtime.source.prompt_ids(prompt) if isinstance(prompt, str) else as_ids(prompt, runtime.n_vocab)


def is_batch(prompts: Any) -> bool:
    """Whether a list of texts, or of ids of several, was given, not one."""
    return isinstance(prompts, list) and (not prompts or not isinstance(prompts[0], (int, np.integer)))


def check_length(n_tokens: int, runtime: Runtime, what: str) -> None:
    """Raises ContextOverflowError when so many tokens do not fit a context."""
    if n_tokens > runtime.n_ctx:
        raise ContextOverflowError(
            f"{what} has {n_tokens} tokens, the context holds {runtime.n_ctx}: shorten it; "
            f"{runtime.source.more_context(runtime.n_ctx)}"
        )


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which two lists begin alike."""
    one, other = list(one), list(other)  # which are compared faster than their elements
    most, step, n = min(len(one), len(other)), 256, 0
    while n < most and one[n : n + step] == other[n : n + step]:
        n += step
    while n < most and one[n] == other[n]:
        n += 1
    return min(n, most)


class Session(Closing):
    """A sequence of tokens whose cache rows stay in memory. Made by Model.session() and Model.load_session().

    Every session takes rows from the cache of its model, which holds cache_tokens of them; forks share theirs
    until they differ. Use it as a context manager, or close() it.

    A model with a sliding window keeps the rows of the window and of about n_batch tokens before it: a session that is
    truncated to a text that looks further back computes its rows again, when it is next used.

    A text that goes on in it, such as a stream that is not done, has it for itself until it ends: appending, truncating
    and beginning another one are a ValueError until then.

    Attributes:
        replaceable: its rows may be dropped to make room, and are computed again when it goes on.
        text: what goes on in it; None: nothing.
    """

    replaceable = False
    text: object = None

    def __init__(self, runtime: Runtime, sequence: int, tokens: list[int]):
        self.runtime = runtime
        self.sequence = sequence
        self._tokens = tokens
        self._free = weakref.finalize(self, runtime.drop, sequence)
        self._free.atexit = False

    @classmethod
    def new(cls, runtime: Runtime) -> Session:
        with runtime.use() as engine:
            return cls(runtime, engine.new_sequence(), [])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids whose rows it holds."""
        return tuple(self._tokens)

    @property
    def length(self) -> int:
        """Tokens it holds."""
        return len(self._tokens)

    def append(self, ids: TokenIds, *, last_only: bool = False) -> NDArray[np.float32]:
        """Compute the tokens and keep their rows.

        Returns:
            logits float32 (n, vocab), a row for each appended token; (1, vocab) with last_only, which saves the
            memory of the others.

        Raises:
            ContextOverflowError: they do not fit; nothing was computed.
            ValueError: no ids, or one outside the vocabulary; or the session or the model is closed; or a text goes on
                in it.
        """
        new = as_ids(ids, self.runtime.n_vocab)
        if not new:
            raise ValueError("append needs at least one token")
        with self.runtime.lock:
            self._require_idle()
            check_length(self.length + len(new), self.runtime, "the session with what is appended")
            return append_together(self.runtime, [(self, new)], all_logits=not last_only)

    def fork(self) -> Session:
        """A second session with the same content; the rows are shared until one of them changes."""
        with self._completed() as engine:
            return Session(self.runtime, engine.fork(self.sequence), list(self._tokens))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens.

        Raises:
            ValueError: it has fewer; or a text goes on in it.
            ContextOverflowError: rows that have aged become recent again, and forks hold the blocks that this takes;
                the session is as it was.
        """
        with self.runtime.lock:
            self._require_idle()
            if not 0 <= whole("length", length) <= self.length:
                raise ValueError(f"cannot keep {length} tokens of {self.length}")
            self.cut(length)

    def cut(self, length: int) -> None:
        """The same for the text that goes on in it."""
        with self.runtime.use() as engine:
            dropped = self._tokens[length:]
            del self._tokens[length:]
            try:
                self._agree(engine)
            except ContextOverflowError:
                self._tokens += dropped
                raise

    def lend(self, text: object) -> None:
        """Have a text go on in it. ValueError: another one does."""
        self._require_idle()
        self.text = text

    def _require_idle(self) -> None:
        if self.runtime.loop is not None:
            self.runtime.loop.end_cancelled()  # streams that nobody holds any more
        if self.text is not None:
            raise ValueError("a text goes on in this session: read its stream to the end, or close() it, first")

    def keep_common(self, ids: Sequence[int]) -> list[int]:
        """Truncate to what it has in common with ids; returns the ids that are still to be computed, at least one."""
        common = common_length(self._tokens, ids[:-1])
        with self.runtime.use() as engine:
            self._agree(engine)
            if common < self.length and not engine.can_truncate(self.sequence, common):  # rows behind a window are gone
                common = 0
        self.cut(common)
        return list(ids[common:])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokens and rows to a file, complete or not at all. It loads only into the same model and cache.

        Raises:
            OSError: the file cannot be written. ValueError: the session is closed.
        """
        with self._completed() as engine:
            rows, tokens = engine.save_sequence(self.sequence), list(self._tokens)
        header = _kind(self.runtime) | {"version": _VERSION, "tokens": tokens, "bytes": int(rows.nbytes)}
        text = json.dumps(header).encode()
        with written_beside(Path(path)) as partial, partial.open("wb") as file:
            start = _MAGIC + struct.pack("<Q", len(text)) + text
            file.write(start)
            file.write(rows.data)
            file.write(_CHECKSUM.pack(zlib.crc32(rows.data, zlib.crc32(start))))

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def close(self) -> None:
        """Give the rows back. A text that goes on in it ends with a ValueError at its next token."""
        with self.runtime.lock:  # not within a step that computes them
            self._free()

    def hand_over(self, engine: core.Engine) -> tuple[int, list[int]]:
        """Closes the session, but leaves its sequence to the caller, with the tokens whose rows that has."""
        self._agree(engine)
        self._free.detach()
        return self.sequence, self._tokens[: engine.length(self.sequence)]

    def _agree(self, engine: core.Engine) -> None:
        """Drop rows beyond our tokens: Ctrl-C may strike between a step of the engine and our note of it. Where a
        window has given back what the others look back to, drop all."""
        if self.closed:
            raise ValueError(CLOSED)
        if engine.length(self.sequence) > self.length:
            kept = self.length if engine.can_truncate(self.sequence, self.length) else 0
            engine.truncate(self.sequence, kept)

    def missing(self, engine: core.Engine) -> list[int]:
        """The last tokens, which have no rows, where the others have and nothing else does."""
        self._agree(engine)
        return self._tokens[engine.length(self.sequence) :]

    def note(self, begin: int, ids: Sequence[int]) -> None:
        """Know of these tokens that they were computed, from the begin-th on: some may be known already."""
        self._tokens[begin : begin + len(ids)] = ids

    def _complete(self, engine: core.Engine) -> None:
        """Rows for all our tokens, and no others."""
        if missing := self.missing(engine):
            engine.append([(self.sequence, np.array(missing, np.int32))])

    @contextmanager
    def _completed(self) -> Iterator[core.Engine]:
        """The engine, with that; rows that only wait for a use make room."""
        with self.runtime.lock:
            _make_room(self.runtime, [(self, [])])
            with self.runtime.use() as engine:
                self._complete(engine)
                yield engine

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session's rows belong to this process: save() it, and load_session() it in the other one")

    def __repr__(self) -> str:
        return f"<slimrt.Session of {self.runtime.source.name}: {self.length} of {self.runtime.n_ctx} tokens>"


def append_together(
    runtime: Runtime,
    items: Sequence[tuple[Session, list[int]]],
    *,
    all_logits: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> NDArray[np.float32]:
    """One step of the engine for several sessions; logits as Engine.append."""
    _make_room(runtime, items)
    with runtime.use() as engine:
        for session, _ in items:
            session._complete(engine)
        arrays = [(session.sequence, np.array(ids, np.int32)) for session, ids in items]
        logits = engine.append(arrays, all_logits=all_logits, on_progress=on_progress)
        for session, ids in items:  # before another thread may look: it would drop the rows as not agreed on
            session._tokens.extend(ids)
    return logits


def _make_room(runtime: Runtime, items: Sequence[tuple[Session, list[int]]]) -> None:
    """Take blocks that only wait for a use, or that nobody holds any more, where these tokens need them."""
    if runtime.loop is not None:
        runtime.loop.end_cancelled()
    while runtime.reclaim is not None:
        with runtime.use() as engine:
            growth = [(session.sequence, len(session.missing(engine)) + len(ids)) for session, ids in items]
            has_room = engine.has_room(growth)
        if has_room or not runtime.reclaim(sum(n // BLOCK + 1 for _, n in growth)):
            return


def is_session(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a session file does, of whatever version, sound or not."""
    with Path(path).open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a session file: version, model, cache, tokens, bytes (of rows). Its checksum is not looked at.

    Raises:
        ModelFormatError: not a session file, of another version, or cut off.
    """
    with Path(path).open("rb") as file:
        return _read_start(file, path)[0]


def _read_start(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """The header, and all that precedes the rows as it stands in the file. Errors as read_header."""
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
        raise ModelFormatError(f"{path}: this session file is cut off: {length} bytes, not {expected}")
    return header, start + text


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Header and rows. Errors as read_header, or the checksum is another."""
    with Path(path).open("rb") as file:
        header, start = _read_start(file, path)
        rows = np.fromfile(file, np.uint8, int(header["bytes"]))
        checksum = file.read(_CHECKSUM.size)
    if checksum != _CHECKSUM.pack(zlib.crc32(rows.data, zlib.crc32(start))):
        raise ModelFormatError(
            f"{path}: this session file is damaged (its checksum is another): save the session again"
        )
    return header, rows


def load_session(runtime: Runtime, path: str | os.PathLike[str]) -> Session:
    """A session from a file; see Model.load_session."""
    header, rows = _read(path)
    for key, value in _kind(runtime).items():
        if header.get(key) != value:
            what = "another model file" if key == "model" else f"another cache ({header.get(key)}, here {value})"
            raise ModelFormatError(f"{path}: this session is of {what} and cannot continue here")
    try:
        tokens = as_ids(header["tokens"], runtime.n_vocab)
    except ValueError as error:
        raise ModelFormatError(f"{path}: the token ids of this session file are broken: {error}") from error
    check_length(len(tokens), runtime, f"{path}")
    with Session.new(runtime) as empty:
        _make_room(runtime, [(empty, tokens)])
    with runtime.use() as engine:
        try:
            sequence = engine.load_sequence(rows)
        except ModelFormatError as error:
            raise ModelFormatError(f"{path}: {error}") from error
        session = Session(runtime, sequence, tokens)
        length = engine.length(sequence)
    if length != len(tokens):
        raise ModelFormatError(f"{path}: {len(tokens)} tokens but {length} rows")
    return session


def _kind(runtime: Runtime) -> dict[str, Any]:
    """What a session's rows depend on."""
    cache = [
        [layer["mode"], layer["type"], *([layer["rank"], layer["residual_type"]] if layer.get("rank") else [])]
        for layer in runtime.info["layers"]
    ]
    return {"model": runtime.source.fingerprint, "cache": cache}
