"""A loaded model: the engine, the lock with which one thread at a time uses it, and their state."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from slimrt import core, machine
from slimrt.cache.config import CacheChoice, check_cache, kinds
from slimrt.cache.cross import describe_cross
from slimrt.cache.fastest import asks_for_fastest, fastest
from slimrt.cache.plan_result import MemorySizes
from slimrt.cache.planner import Planner, wont_fit
from slimrt.errors import WontFitError
from slimrt.info import Info, encoder_of
from slimrt.modelfile.sharing import NOT_UPTRAINED
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING
from slimrt.plumbing import progress
from slimrt.plumbing.forking import watch
from slimrt.plumbing.notes import note, tell
from slimrt.plumbing.units import format_both, format_bytes
from slimrt.runtime.fold_at_load import fold, refusal, require_precise
from slimrt.runtime.huge_pages import HugePages

_NEXT = 4  # threads of async calls beyond the sequences of a model

_LAST_STEP = 30.0  # seconds that a process that ends waits for a step of another thread

_living: weakref.WeakSet[Runtime] = weakref.WeakSet()
_lost: list[core.Engine | None] = []  # engines that were in use when the process was forked: never freed


class Runtime:
    """The engine behind one Model, its Sessions and its Streams.

    Attributes:
        source: the model's files.
        info: Engine.info().
        lock: held for calls that must not be interleaved with others; reentrant.
        show_progress: whether long work shows a progress bar.
        lossy: sentences on modes over the limit that allow_lossy permits; "": none.
        access: prefetch policies that differ from the default (slimrt.machine), as text.
        huge_pages: moves the weights there while the engine is used; None: they stay where they are.
        loop: the scheduling loop of all its tasks (generation.loop); None: not started yet.
        draft: a draft model, closed with this one (generation.draft_model); None: none.
        reclaim: frees this many cache blocks that are kept for reuse only, or all of them; returns 0 if there are none.
        drop: frees a sequence at the next use(); the garbage collector may call it during one.
        compared: for cache "fastest", the compared caches with their times, as text; else "".
        choice: of the cache, as it was loaded.
    """

    def __init__(self, source: ModelSource, engine: core.Engine, *, show_progress: bool):
        self.source = source
        self.info: Info = engine.info()
        self.lock = threading.RLock()
        self.show_progress = show_progress
        self.lossy = ""
        self.access = ""
        self.huge_pages: HugePages | None = None
        self.compared = ""
        self.choice = CacheChoice.of()
        self.loop: Any = None
        self.draft: Any = None
        self.reclaim: Callable[[int], int] | None = None
        self._engine: core.Engine | None = engine
        self._user: int | None = None  # the thread that is inside use()
        self._forked_at_work = False
        self._dropped: deque[int] = deque()
        self.drop = self._dropped.append  # has no reference to the runtime: finalizers of its sessions hold this
        watch(self)
        _living.add(self)

    @property
    def closed(self) -> bool:
        return self._engine is None

    @property
    def n_ctx(self) -> int:
        return int(self.info["n_ctx"])

    @property
    def n_vocab(self) -> int:
        return int(self.info["n_vocab"])

    @cached_property
    def callers(self) -> ThreadPoolExecutor:
        """Threads of the async methods: for all texts that are decoded together, and a few that come next. asyncio's
        own pool may have fewer, and is also waited for by others."""
        return ThreadPoolExecutor(int(self.info["n_seqs"]) + _NEXT, "slimrt-call")

    def sparse_counts(self) -> tuple[int, int]:
        """(row, head) pairs that sparse decoding has considered so far, and how many of them it skipped."""
        if not (self.info["sparse_threshold"] or self.info["sparse_delta"]):
            return 0, 0
        with self.use() as engine:
            counts = engine.sparse_counts()
        return counts["rows"], counts["skipped"]

    def cache_bytes(self, n_tokens: int) -> int:
        """Bytes of the rows of a text of n_tokens tokens: layers with a sliding window keep at most max_rows, and rows
        that age are of several sizes (bytes_per_token is that of the oldest)."""
        layers = self.info["layers"]
        if n_tokens and any(layer["mode"] in AGING for layer in layers):
            n_batch = self.info["n_batch"]
            planned = core.plan(self.source.file, n_ctx=n_tokens, n_batch=n_batch, **self.choice.arguments(self.source))
            return sum(layer["bytes_held"] for layer in planned["layers"])
        return sum(layer["bytes_per_token"] * min(n_tokens, layer["max_rows"]) for layer in layers)

    @contextmanager
    def use(self) -> Iterator[core.Engine]:
        """Context manager: the engine, for exclusive use by this thread.

        Raises:
            ValueError: the model is closed.
            RuntimeError: called from a progress callback of the engine; or another thread was using the engine when
                this process was forked from its parent.
        """
        with self.lock:
            if self._engine is None:
                raise ValueError("the model is closed")
            if self._forked_at_work:
                raise RuntimeError(
                    "another thread was at work with this model when the process was forked: load it again here"
                )
            if self._user is not None:
                raise RuntimeError("a progress callback must not use the model that calls it")
            started = perf_counter()
            try:
                self._user = threading.get_ident()
                while self._dropped:
                    self._engine.free_sequence(self._dropped.popleft())
                yield self._engine
            finally:
                self._user = None
                for said in core.take_notes():
                    note(said, logging.WARNING)
            if self.huge_pages:
                self.huge_pages.after(perf_counter() - started)

    def after_fork(self) -> None:
        """Called in a forked child: a model that no other thread was using continues to work, with new threads; else it
        is unusable."""
        self.lock = threading.RLock()
        self.__dict__.pop("callers", None)
        if self.loop is not None:
            self.loop.after_fork()
        if self._user not in (None, threading.get_ident()):
            self._forked_at_work = True
            _lost.append(self._engine)

    def close(self) -> None:
        """Free all memory; waits for calls in progress."""
        if self.loop is not None:
            self.loop.close()
        with self.lock:
            self._engine = None
            if self.draft is not None:
                self.draft.close()


def _stop_at_exit() -> None:
    """Keep daemon threads from beginning another step. Python unwinds them when they come back from one while it ends,
    which aborts the process where C++ is on their stack. Models with drafts come first: they use those of the drafts.
    """
    for runtime in sorted(_living, key=lambda one: one.draft is None):
        runtime.lock.acquire(timeout=_LAST_STEP)


atexit.register(_stop_at_exit)

LEAST_FITTED = 256  # tokens; a context is not reduced below this automatically


def load(
    source: ModelSource,
    choice: CacheChoice,
    planner: Planner,
    *,
    n_ctx: int,
    memory_limit: int,
    show_progress: bool | None,
    calibration: str | os.PathLike[str] | None = None,
) -> Runtime:
    """Load a model.

    Args:
        n_ctx: 0: the model's own context, or as much of it as fits. memory_limit: bytes; 0: what is available now.
        calibration: as slimrt.Model.

    Raises:
        WontFitError: its options would fit instead.
        CacheUnsupportedError, UnsupportedError, ModelFormatError: as slimrt.Model.
        FileNotFoundError, ValueError: no such calibration text, or one for an encoder-decoder.
    """
    if "cuda" in planner.device and (said := core.cuda_devices()[1]):
        note(said)
    asked, n_ctx = n_ctx, source.n_ctx(n_ctx)
    choice, compared = settle(planner, choice, n_ctx)
    check_cache(source, choice)
    _check_calibration(source, calibration)
    if not asked and not source.has_encoder:
        n_ctx = _what_fits(planner, choice, n_ctx)
    if NOT_UPTRAINED in source.file.keys():
        note(
            f"{source.name} shares K and V and was not trained since: it is not usable yet (training/uptrain.py)",
            logging.WARNING,
        )
    sizes = planner.sizes(choice, n_ctx)
    try:
        _require_room(planner, choice, sizes)
        lossy = require_precise(source, choice)
        derived, folded_lossy = fold(source, choice, calibration, show_progress)
        access = _follow_machine(source, planner)
        engine = core.Engine(
            source.file,
            n_ctx=n_ctx,
            n_seqs=planner.n_seqs,
            cache_tokens=planner.cache_tokens,
            n_batch=planner.n_batch,
            n_threads=planner.n_threads,
            device=planner.device,
            derived=derived or None,
            memory_limit=memory_limit if planner.draft is None else max(planner.limit - sizes.draft, 1),
            **choice.arguments(source),
        )
    except WontFitError as error:
        raise wont_fit(
            error, planner, choice, n_ctx, lambda other: not refusal(source, other, only_cheap=True)
        ) from None
    runtime = Runtime(source, engine, show_progress=progress.wanted(show_progress))
    runtime.compared, runtime.choice = compared, choice
    runtime.lossy = "; ".join(lossy + folded_lossy)
    runtime.access = access
    # Types that are kept in another layout are no longer read from the file. A plan counts mapped weights in any case.
    if planner.device == "cpu" and 2 * engine.memory()["mapped"] >= source.file.bytes().size:
        runtime.huge_pages = HugePages(source.file, planner.n_threads)
    if cross := runtime.info.get("cross"):
        cross["reason"] = choice.cross.reason(source, cross["mode"])
    return runtime


def _require_room(planner: Planner, choice: CacheChoice, sizes: MemorySizes) -> None:
    """WontFitError: as the core would raise it, but before minutes of folding, and with what a draft model takes."""
    if sizes.total > planner.limit and planner.draft is not None:
        raise WontFitError(
            f"needs {format_bytes(sizes.total - sizes.draft)}, and drafts by {planner.draft.name} "
            f"{format_bytes(sizes.draft)} ({sizes.drafting()}): {format_bytes(planner.limit)} available",
            sizes.total,
            planner.limit,
        )
    if not planner.fit(sizes) and sizes.folding:
        most = max(sizes.total, sizes.folding)
        needed, there = format_both(most, planner.limit)
        message = f"needs {needed}, {there} available"
        if sizes.total <= planner.limit:
            message = (
                f"needs {needed} while it is folded, {there} available: converted for this cache (slimrt convert), it "
                f"needs {format_bytes(sizes.total)} and loads without folding"
            )
        raise WontFitError(message, most, planner.limit)


def _what_fits(planner: Planner, choice: CacheChoice, n_ctx: int) -> int:
    """A default context reduced to what fits, with a note; unchanged if less than LEAST_FITTED would fit."""
    sizes = planner.sizes(choice, n_ctx)
    if planner.fit(sizes) or (largest := planner.largest_n_ctx(choice)) < LEAST_FITTED:
        return n_ctx
    while_folded, way = "", "give n_ctx (--ctx) to require it"
    if sizes.total <= planner.limit < sizes.folding:
        while_folded = " while the model is folded"
        way = "converted for this cache (slimrt convert), it has room for all of them"
    tell(
        f"the context is {largest} tokens, the most that fits in {format_bytes(planner.limit)}{while_folded}, not "
        f"{n_ctx}: {way}"
    )
    return largest


def settle(planner: Planner, choice: CacheChoice, n_ctx: int) -> tuple[CacheChoice, str]:
    """The choice with "fastest" resolved, and the comparison as text; another choice unchanged, and ""."""
    if not asks_for_fastest(choice):
        return choice, ""
    found = fastest(planner, choice, n_ctx, lambda one: refusal(planner.source, one, only_cheap=True))
    return found.choice, str(found)


def _follow_machine(source: ModelSource, planner: Planner) -> str:
    """Set the fastest prefetch policies for the engine to be created, and return those that differ from the default, as
    text."""
    if "cpu" not in planner.device:
        return ""
    found = machine.follow(machine.bytes_by_type(source.file), planner.n_threads)
    return ", ".join(f"{kind} {one.best} ({one.gain:.2f} times as fast)" for kind, one in found.items())


def _check_calibration(source: ModelSource, calibration: str | os.PathLike[str] | None) -> None:
    """Refuse a text that does not exist or cannot be used, even if nothing is folded with it."""
    if calibration in (None, "none"):
        return
    if source.has_encoder:
        raise ValueError(
            f"a text says nothing of a decoder beside an encoder ('{source.name}'): leave out the calibration"
        )
    if not Path(calibration).is_file():
        raise FileNotFoundError(f"{calibration}: no such calibration text")


def describe(runtime: Runtime, memory: Mapping[str, int], say: Callable[[str], object]) -> None:
    """Report what the options of a load resolved to, by calling `say` with sentences."""
    info = runtime.info
    if not info["layers"]:
        encoder = encoder_of(info)
        say(
            f"{runtime.source.name}: {info['architecture']}, an encoder of {encoder['n_layers']} layers, "
            f"{info['device']}, {encoder['n_source']} rows at once, no cache, "
            f"{format_bytes(memory['total'])} allocated, {format_bytes(memory['mapped'])} mapped"
        )
        return
    cross = f"{describe_cross(crossed)}, " if (crossed := info.get("cross")) else ""
    tokens = info["cache_tokens"]
    pool = f" in {tokens} tokens" if tokens != info["n_ctx"] * info["n_seqs"] else ""
    say(
        f"{runtime.source.name}: {info['architecture']}, {info['n_layers']} layers, "
        f"{info['device']}, context {info['n_ctx']} of {info['n_ctx_train']} trained"
        f"{' x ' + str(info['n_seqs']) if info['n_seqs'] > 1 else ''}{pool}, cache {kinds(info['layers'])} "
        f"({memory['cache_bytes_per_token']} bytes a token), "
        f"{cross}{format_bytes(memory['total'])} allocated, "
        f"{format_bytes(memory['mapped'])} mapped"
    )
    if runtime.compared:
        say(runtime.compared)
    if runtime.access:
        say(f"access to memory, measured here: {runtime.access}")
