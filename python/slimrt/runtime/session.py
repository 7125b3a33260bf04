"""Sessions: a context whose cache rows stay in memory; append, fork, truncate, save."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.cache.planner import BLOCK
from slimrt.errors import ContextOverflowError, ModelFormatError
from slimrt.plumbing.arguments import check_bool, whole
from slimrt.plumbing.closing import Closing
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session_file import check_replaced, read, write

CLOSED = "the session is closed"

TokenIds = Sequence[int] | NDArray[np.integer[Any]]


def as_ids(ids: TokenIds, n_vocab: int) -> list[int]:
    """Token ids as a list of int.

    Raises:
        ValueError: not a one-dimensional sequence of integers, or one of them is not in the vocabulary.
        TypeError: bytes, texts, or what is no sequence of numbers.
    """
    if isinstance(ids, str):
        raise TypeError(f"token ids are wanted here, got a text: tokenize() it first: {ids[:40]!r}")
    array = np.asarray(ids)
    if array.size == 0:
        return []
    if array.ndim == 1 and array.dtype == object and all(isinstance(id, (int, np.integer)) for id in array):
        if abs(largest := max(map(int, array), key=abs)) >= 1 << 63:
            raise ValueError(f"token id {largest} is not in the vocabulary of {n_vocab} tokens")
        array = array.astype(np.int64)
    if ids is None or array.dtype.kind in "SUO" or array.ndim == 0:
        hint = {"S": ": decode() bytes first", "U": ": several texts are given as a list"}.get(array.dtype.kind, "")
        raise TypeError(f"a text is str, or its token ids, got {type(ids).__name__}{hint if array.ndim < 2 else ''}")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are a one-dimensional sequence of int, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= n_vocab:
        bad = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"token id {bad} is not in the vocabulary of {n_vocab} tokens")
    return [int(id) for id in array]


def as_prompt(runtime: Runtime, prompt: str | TokenIds) -> list[int]:
    """The ids of a text (of an empty one BOS alone, if the model has it), or ids as a list. Errors as as_ids."""
    return runtime.source.prompt_ids(prompt) if isinstance(prompt, str) else as_ids(prompt, runtime.n_vocab)


def is_batch(prompts: Any) -> bool:
    """Whether an argument is a list of prompts rather than one prompt."""
    return isinstance(prompts, list) and (not prompts or not isinstance(prompts[0], (int, np.integer)))


def check_length(n_tokens: int, runtime: Runtime, what: str) -> None:
    """Raises ContextOverflowError if n_tokens tokens do not fit a context. what: subject of the message."""
    if n_tokens > runtime.n_ctx:
        raise ContextOverflowError(
            f"{what} has {n_tokens} tokens, the context holds {runtime.n_ctx}: shorten it; "
            f"{runtime.source.more_context(runtime.n_ctx)}"
        )


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists of tokens."""
    one, other = list(one), list(other)  # slices of lists are compared faster than their elements
    most, step, n = min(len(one), len(other)), 256, 0
    while n < most and one[n : n + step] == other[n : n + step]:
        n += step
    while n < most and one[n] == other[n]:
        n += 1
    return min(n, most)


class Session(Closing):
    """A sequence of tokens whose cache rows stay in memory. Made by Model.session() and Model.load_session().

    All sessions of a model share its cache, which has room for cache_tokens tokens; forks share rows until they differ.
    Use it as a context manager, or call close().

    A model with a sliding window keeps the rows of the window and of about n_batch tokens before it. A session that is
    truncated further back than that computes its rows again when it is next used.

    A generation in progress, such as a stream that has not ended, has the session for itself: until it ends, appending,
    truncating and starting another one raise ValueError.

    Attributes:
        replaceable: its rows may be dropped to make room; they are computed again when it is next used.
        text: the generation in progress; None: none.
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
        """The token ids of the session."""
        return tuple(self._tokens)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def append(self, ids: TokenIds, *, last_only: bool = False) -> NDArray[np.float32]:
        """Compute tokens and add their rows to the session.

        Returns:
            logits float32 (n, vocab), a row for each appended token; with last_only (1, vocab), which saves the memory
            of the others.

        Raises:
            ContextOverflowError: they do not fit; nothing was computed.
            ValueError: no ids, or one outside the vocabulary; the session or the model is closed; or a generation is in
                progress in it.
        """
        new = as_ids(ids, self.runtime.n_vocab)
        check_bool("last_only", last_only)
        if not new:
            raise ValueError("append needs at least one token")
        with self.runtime.lock:
            self._require_idle()
            check_length(self.length + len(new), self.runtime, "the session with what is appended")
            return append_together(self.runtime, [(self, new)], all_logits=not last_only)

    def fork(self) -> Session:
        """A new session with the same content; rows are shared until one of the two changes them."""
        with self._completed() as engine:
            return Session(self.runtime, engine.fork(self.sequence), list(self._tokens))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens.

        Raises:
            ValueError: it has fewer tokens, or a generation is in progress in it.
            ContextOverflowError: in an aging cache mode, rows become recent again and need blocks that forks occupy;
                the session is unchanged.
        """
        with self.runtime.lock:
            self._require_idle()
            if not 0 <= whole("length", length) <= self.length:
                raise ValueError(f"cannot keep {length} tokens of {self.length}")
            self.cut(length)

    def cut(self, length: int) -> None:
        """truncate(), called by the generation in progress."""
        with self.runtime.use() as engine:
            dropped = self._tokens[length:]
            del self._tokens[length:]
            try:
                self._agree(engine)
            except ContextOverflowError:
                self._tokens += dropped
                raise

    def lend(self, text: object) -> None:
        """Start a generation in it. ValueError: another one is in progress."""
        self._require_idle()
        self.text = text

    def _require_idle(self) -> None:
        if self.runtime.loop is not None:
            self.runtime.loop.end_cancelled()  # streams that were garbage-collected
        if self.text is not None:
            raise ValueError("a text goes on in this session: read its stream to the end, or close() it, first")

    def keep_common(self, ids: Sequence[int]) -> list[int]:
        """Truncate to the longest common prefix with ids; returns the ids still to be computed, at least one."""
        common = common_length(self._tokens, ids[:-1])
        with self.runtime.use() as engine:
            self._agree(engine)
            # with a sliding window the rows that a shorter sequence needs may be freed already
            if common < self.length and not engine.can_truncate(self.sequence, common):
                common = 0
        self.cut(common)
        return list(ids[common:])

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write tokens and rows to a file, which appears only when complete. It can be loaded only with the same model
        file and cache. A session file that is there is replaced; another file only with `overwrite`.

        Raises:
            FileExistsError: a file that is no session is there. OSError: the file cannot be written.
            ValueError: the session is closed, or the path is that of the model.
        """
        check_bool("overwrite", overwrite)
        check_replaced(Path(path), self.runtime.source.file.paths, overwrite)
        with self._completed() as engine:
            rows, tokens = engine.save_sequence(self.sequence), list(self._tokens)
        write(Path(path), _kind(self.runtime) | {"tokens": tokens}, rows)

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def close(self) -> None:
        """Free the rows. A generation in progress in it ends with a ValueError at its next token."""
        with self.runtime.lock:  # not during a step that computes them
            self._free()

    def hand_over(self, engine: core.Engine) -> tuple[int, list[int]]:
        """Close the session, but pass its sequence on to the caller: (sequence, tokens whose rows it has)."""
        self._agree(engine)
        self._free.detach()
        return self.sequence, self._tokens[: engine.length(self.sequence)]

    def _agree(self, engine: core.Engine) -> None:
        """Drop the engine's rows beyond our tokens: Ctrl-C may interrupt between a step of the engine and the update of
        our tokens. If a sliding window has already freed rows that the remaining ones need, drop all."""
        if self.closed:
            raise ValueError(CLOSED)
        if engine.length(self.sequence) > self.length:
            kept = self.length if engine.can_truncate(self.sequence, self.length) else 0
            engine.truncate(self.sequence, kept)

    def missing(self, engine: core.Engine) -> list[int]:
        """The last tokens, those without rows in the engine."""
        self._agree(engine)
        return self._tokens[engine.length(self.sequence) :]

    def note(self, begin: int, ids: Sequence[int]) -> None:
        """Record tokens that were computed, from index `begin` on; some may be recorded already."""
        self._tokens[begin : begin + len(ids)] = ids

    def _complete(self, engine: core.Engine) -> None:
        """Make the engine's rows match our tokens: drop surplus ones, compute missing ones."""
        if missing := self.missing(engine):
            engine.append([(self.sequence, np.array(missing, np.int32))])

    @contextmanager
    def _completed(self) -> Iterator[core.Engine]:
        """Context manager: the engine, after _complete(); rows kept for reuse only are dropped if need be."""
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
    """Append tokens to several sessions in one step of the engine; logits as Engine.append."""
    _make_room(runtime, items)
    with runtime.use() as engine:
        for session, _ in items:
            session._complete(engine)
        arrays = [(session.sequence, np.array(ids, np.int32)) for session, ids in items]
        logits = engine.append(arrays, all_logits=all_logits, on_progress=on_progress)
        for session, ids in items:  # before another thread uses the engine: _agree() would drop the new rows
            session._tokens.extend(ids)
    return logits


def _make_room(runtime: Runtime, items: Sequence[tuple[Session, list[int]]]) -> None:
    """Free blocks that are kept for reuse only, or belong to cancelled streams, as far as these tokens need them."""
    if runtime.loop is not None:
        runtime.loop.end_cancelled()
    while runtime.reclaim is not None:
        with runtime.use() as engine:
            growth = [(session.sequence, len(session.missing(engine)) + len(ids)) for session, ids in items]
            has_room = engine.has_room(growth)
        if has_room or not runtime.reclaim(sum(n // BLOCK + 1 for _, n in growth)):
            return


def load_session(runtime: Runtime, path: str | os.PathLike[str]) -> Session:
    """Load a session from a file; see Model.load_session."""
    header, rows = read(path)
    for key, value in _kind(runtime).items():
        if header.get(key) != value:
            what = "another model file" if key == "model" else f"another cache ({header.get(key)}, here {value})"
            raise ModelFormatError(f"{path}: this session is of {what} and cannot continue here")
    try:
        tokens = as_ids(header["tokens"], runtime.n_vocab)
    except (ValueError, TypeError) as error:
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
    """What rows of a session depend on, and must be the same where it is loaded: the model file and the cache."""
    cache = [
        [layer["mode"], layer["type"], *([layer["rank"], layer["residual_type"]] if layer.get("rank") else [])]
        for layer in runtime.info["layers"]
    ]
    return {"model": runtime.source.fingerprint, "cache": cache}
