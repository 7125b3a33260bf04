"""The engine as tasks see it: a sequence is a Session, which knows its tokens, or a handle of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.cache.planner import BLOCK as BLOCK
from slimrt.generation.pace import Pace
from slimrt.generation.search import Append, Choice, Decode, Guess, Logits, Read, Wish
from slimrt.plumbing import progress
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session

Ids = list[int]
Report = Callable[[int, int], object]


class Sequences:
    """A model's engine; each call locks it."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime

    @property
    def n_vocab(self) -> int:
        return self._runtime.n_vocab

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the model for several calls."""
        with self._runtime.lock:
            yield

    def new_sequence(self) -> int:
        with self._runtime.use() as engine:
            return engine.new_sequence()

    def free_sequence(self, sequence: int) -> None:
        with self._runtime.use() as engine:
            engine.free_sequence(sequence)

    def fork(self, sequence: int) -> int:
        with self._runtime.use() as engine:
            return engine.fork(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        with self._runtime.use() as engine:
            engine.truncate(sequence, length)

    def log_normalisers(self, logits: Logits) -> NDArray[np.float64]:
        with self._runtime.use() as engine:
            return engine.log_normalisers(logits)

    def likeliest(self, logits: Logits, count: int) -> NDArray[np.int32]:
        with self._runtime.use() as engine:
            return engine.likeliest(logits, count)

    def alignment(
        self, sequence: int, tokens: NDArray[np.int32], heads: Sequence[tuple[int, int]]
    ) -> NDArray[np.float32]:
        with self._runtime.use() as engine:
            return engine.alignment(sequence, tokens, heads)

    def encode(self, items: Sequence[tuple[Any, ...]], states: bool = False) -> list[NDArray[np.float32]] | None:
        """As core.Engine.encode; sequences may be Sessions."""
        with self._runtime.use() as engine:
            return engine.encode([(_handle(of), *source) for of, *source in items], states=states)

    def append(
        self, items: Sequence[tuple[Any, Ids]], outputs: Sequence[int], on_progress: Report | None, **kind: Any
    ) -> Any:
        """Compute tokens after the rows of their sequences. For a Session these are its own tokens without rows, if it
        has any, then new ones. Returns logits of the last `outputs` tokens of each item, float32 (rows, vocab); with
        states=True hidden states (rows, d_model); with tokens=True the argmax, int32 (rows, 1); with candidates=True
        the likeliest tokens, as core.Engine.sample_candidates takes them, int32 (rows, 2 n)."""
        total = sum(len(ids) for _, ids in items)
        show = self._runtime.show_progress and total > len(items)
        bar = progress.bar(True, total, "prefill", "tok") if show else nullcontext(lambda done, all: None)
        with bar as update, self._runtime.use() as engine:

            def report(done: int, all: int) -> None:
                update(done, all)
                if on_progress is not None:
                    on_progress(done, all)

            lengths = [engine.length(_handle(of)) for of, _ in items]
            arrays = [(_handle(of), np.array(ids, np.int32)) for of, ids in items]
            told = report if show or on_progress is not None else None
            rows = engine.append(arrays, outputs=outputs, on_progress=told, **kind)
            for (of, ids), length in zip(items, lengths, strict=True):
                if isinstance(of, Session):
                    of.note(length, ids)
        return rows.view(np.int32) if kind.keys() & {"tokens", "candidates"} else rows

    def choose(
        self, rows: Sequence[NDArray[Any]], wishes: Sequence[Decode], masks: Sequence[NDArray[np.uint32] | None]
    ) -> Sequence[Choice | Exception]:
        """Answer Decode requests in one call; one whose row cannot be sampled gets its error. rows: for each its logits
        (1, vocab); or, if the engine found the likeliest, for each its token, int32 (1, 1), or its candidates, int32
        (1, 2 n). masks: for each its mask."""
        logits = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if logits.dtype == np.int32 and logits.shape[1] == 1:
            return [(int(token), None) for token in logits[:, 0]]
        samplers = [one.sampler for one in wishes]
        stacked = None if logits.dtype == np.int32 else _stacked(masks, logits.shape[1])
        with self._runtime.use() as engine:
            if logits.dtype == np.int32:
                return engine.sample_candidates(logits, samplers)
            return engine.sample(
                logits, samplers, masks=stacked, logprobs=[one.logprobs for one in wishes],
                joint_from=[one.joint_from for one in wishes],
            )  # fmt: skip

    def guess(self, wishes: Sequence[Guess], pace: Pace) -> list[Ids]:
        """Drafts by the model's drafter."""
        return list(self._runtime.draft.guess(wishes, pace))

    def missing(self, sequence: Any) -> Ids:
        """The tokens of a Session that have no rows; empty for a handle."""
        if not isinstance(sequence, Session):
            return []
        with self._runtime.use() as engine:
            return sequence.missing(engine)

    def stored(self, sequence: Any) -> int:
        """Rows of a sequence in the cache."""
        with self._runtime.use() as engine:
            return engine.length(_handle(sequence))

    def has_room(self, items: Sequence[tuple[Any, Ids]]) -> bool:
        """Whether the pool has room for these tokens; whether they exceed a context is left to the engine."""
        with self._runtime.use() as engine:
            return engine.has_room([(_handle(of), len(ids)) for of, ids in items])

    def free_blocks(self) -> int:
        with self._runtime.use() as engine:
            return engine.free_blocks()

    def gives_up(self, wish: Wish | None) -> bool:
        """Whether a task with this request has rows that can be freed and computed again."""
        sessions = _sessions(wish)
        if not sessions or not all(one.replaceable for one in sessions):
            return False
        with self._runtime.use() as engine:
            return any(engine.length(one.sequence) > 0 for one in sessions)

    def give_up(self, wish: Wish | None) -> None:
        """Free the rows of its sessions."""
        with self._runtime.use() as engine:
            for one in _sessions(wish):
                engine.truncate(one.sequence, 0)

    def sparse_counts(self) -> tuple[int, int]:
        return self._runtime.sparse_counts()


def is_closed(wish: Wish | None) -> bool:
    """Whether a session of this request was closed."""
    return any(one.closed for one in _sessions(wish))


def _handle(sequence: Any) -> int:
    return sequence.sequence if isinstance(sequence, Session) else int(sequence)


def _stacked(masks: Sequence[NDArray[np.uint32] | None], n_vocab: int) -> NDArray[np.uint32] | None:
    """Masks stacked (n, words); rows without a mask allow all tokens. None: no request has a mask."""
    if all(one is None for one in masks):
        return None
    words = (n_vocab + 31) // 32
    rows = np.full((len(masks), words), -1, np.int32).view(np.uint32)
    for row, one in zip(rows, masks, strict=True):
        if one is not None:
            row[:] = one[:words]
    return rows


def _sessions(wish: Wish | None) -> list[Session]:
    """The sequences of a request, if all of them are Sessions; else none."""
    items = wish.items if isinstance(wish, (Append, Decode, Read, Guess)) else ()
    found = [of for of, _ in items if isinstance(of, Session)]
    return found if len(found) == len(items) else []
