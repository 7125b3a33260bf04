"""What the routes share: the model, its engine thread, admission, and shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from slimrt.cache.config import kinds
from slimrt.generation.loop import loop_of, prefixes_of
from slimrt.generation.masks import MASKS
from slimrt.generation.search import Task
from slimrt.model import Model
from slimrt.server.engine_thread import EngineThread
from slimrt.server.errors import Refusal, timed_out
from slimrt.server.exchange import ClientGone, Exchange
from slimrt.server.limits import Limits, Places
from slimrt.server.metrics import Metrics
from slimrt.server.texts import Texts

Result = TypeVar("Result")
OnFailure = Callable[[str, BaseException | None], object]
_NEWEST = 0.3  # weight of the newest measurement in a moving average


class Service:
    """A model that is served.

    Args:
        load: loads the model; called in the engine's thread.
        on_failure: called if the server cannot go on, with what failed and the error, if there is one.

    Attributes:
        texts: running requests for texts.
    """

    def __init__(self, load: Callable[[], Model], limits: Limits, on_failure: OnFailure):
        self.limits, self.metrics, self.places = limits, Metrics(), Places(limits.places)
        self.draining = self._over = False
        self.texts = set[Texts]()
        self._others = set[Exchange]()  # that wait for work of another kind
        self.created = int(time.time())
        self._load, self._on_failure = load, on_failure
        self._model: Model | None = None
        self._thread: EngineThread | None = None
        self._executor = ThreadPoolExecutor(2, "slimrt-text")
        self._callers = ThreadPoolExecutor(limits.parallel, "slimrt-call")
        self._turns = asyncio.Semaphore(limits.parallel)
        self._tasks = list[asyncio.Task[None]]()
        self._blocks = (0, 0, 0)  # of the cache: in all, free, held by the prefix cache

    @property
    def state(self) -> str:
        """ "ok", or why requests are refused: "loading", "draining", "stuck"."""
        if self._model is None:
            return "loading"
        if self._thread is None or not self._thread.alive:
            return "stuck"
        return "draining" if self.draining else "ok"

    @property
    def thread(self) -> EngineThread:
        """The engine's thread."""
        assert self._thread is not None
        return self._thread

    def model(self) -> Model:
        """The model. Refusal 503: the state is not "ok"."""
        state = self.state
        if self._model is None or state != "ok":
            raise _refused(state)
        return self._model

    async def start(self) -> None:
        """Start all threads, and to load the model; returns at once."""
        try:
            self._start_threads()
        except RuntimeError as error:
            self._on_failure("loading the model", ValueError(
                f"{error}, and the server needs {self.limits.parallel + 4} beside those that compute: allow more "
                "(ulimit -u, a container's limit of pids), or fewer texts at once (--parallel)"
            ))  # fmt: skip
            return
        self._tasks = [asyncio.create_task(self._become_ready()), asyncio.create_task(self._keep_watch())]

    def _start_threads(self) -> None:
        """Start them now: where few are allowed, it is not a request that fails. RuntimeError: one cannot start."""
        begun = threading.Event()
        try:
            for executor, n in ((self._executor, 2), (self._callers, self.limits.parallel), (MASKS.thread(), 1)):
                for _ in range(n):
                    executor.submit(begun.wait)
            self._thread = EngineThread(lambda error: self._on_failure("the thread that computes", error))
        finally:
            begun.set()

    async def apart(self, work: Callable[[], Result]) -> Result:
        """Run a function that needs no engine (templates, tokenising) in a thread; its notes are shown as ours are."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, work)

    async def calling(self, work: Callable[[], Result], begun: Callable[[], object]) -> Result:
        """Run a call of the library in a thread, at most `parallel` at once; its tasks are batched with the texts.
        begun: called when it is its turn."""
        async with self._turns:  # not the executor's queue, which keeps what is cancelled, with its sound
            begun()
            return await asyncio.get_running_loop().run_in_executor(self._callers, work)

    async def computed(self, exchange: Exchange, tasks: Sequence[Task[Result]]) -> list[Result]:
        """Run tasks, batched with the texts; their results. They are cancelled if the client disconnects.

        Raises:
            Refusal: 503, none has begun within queue_timeout, or not all are done within request_timeout. ClientGone.
            Errors of the tasks.
        """
        tickets = [self.thread.compute(one, exchange.client, exchange.news.set) for one in tasks]

        def are_done() -> bool:
            return all(one.done for one in tickets) or any(one.error for one in tickets)

        try:
            await self.wait(exchange, are_done, lambda: any(one.begun for one in tickets))
            return [one.result() for one in tickets]
        except ClientGone:
            self.metrics.cancelled.labels("gone").inc()
            raise
        finally:
            self.thread.cancel(tickets)

    async def wait(self, exchange: Exchange, is_done: Callable[[], bool], has_begun: Callable[[], bool]) -> None:
        """Wait for work that sets the exchange's news when it begins and when it is done.

        Raises:
            Refusal: 503, it has not begun within queue_timeout, or is not done within request_timeout, or drain_timeout
                of a server that ends. ClientGone.
        """
        called, limits = time.perf_counter(), self.limits
        self._others.add(exchange)
        try:
            while not is_done():
                if self._over:
                    raise _refused("draining")
                begun = has_begun()
                most = limits.request_timeout if begun else limits.queue_timeout
                left = called + most - time.perf_counter()
                if not await exchange.wait(left) and time.perf_counter() >= called + most:
                    self.metrics.cancelled.labels("timeout" if begun else "queue").inc()
                    raise timed_out(most, "request_timeout" if begun else "queue_timeout")
        finally:
            self._others.remove(exchange)

    async def drain(self) -> None:
        """Refuse new requests, and return when the running ones have ended; after drain_timeout texts are cut off, and
        other work, which has no parts, is refused."""
        self.draining = True
        end = time.monotonic() + self.limits.drain_timeout
        while self.places.texts and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._over = True
        for one in self.texts:
            one.end_early(self.thread)
        for waiting in self._others:
            waiting.news.set()
        while self.places.texts and time.monotonic() < end + self.limits.send_timeout:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End the engine's thread, unless it is still loading, and free the model."""
        loading = any(not task.done() for task in self._tasks[:1])  # the task of _become_ready
        for task in self._tasks:
            task.cancel()
        for executor in (self._executor, self._callers):
            executor.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None and not loading:
            self._thread.end()
        if self._model is not None:
            if self._model._runtime.source.kind == "text":
                prefixes_of(self._model._runtime).write()
            self._model.close()

    async def _become_ready(self) -> None:
        try:
            self._model = await self.thread.call(self._loaded)
        except Exception as error:
            self._on_failure("loading the model", error)
            return
        loop, info = self.thread.loop, self._model.info()
        assert loop is not None
        self.metrics.watch("texts_running", "Texts that are decoded now.", lambda: loop.running)
        self.metrics.watch("texts_waiting", "Texts in the queue.", lambda: loop.waiting)
        if self._model._runtime.source.kind == "text":
            prefixes = prefixes_of(self._model._runtime)
            self.metrics.watch("prefixes_found", "Texts that reused a cached prefix.", lambda: prefixes.hits)
            self.metrics.watch(
                "blocks_evicted", "Blocks of cached prefixes that were evicted.", lambda: prefixes.evicted
            )
            self.metrics.watch("blocks", "Blocks of 32 tokens in the cache.", lambda: self._blocks[0])
            self.metrics.watch("blocks_free", "Those that were free a second ago.", lambda: self._blocks[1])
            self.metrics.watch("blocks_left", "Those that cached prefixes held a second ago.", lambda: self._blocks[2])
        self.metrics.watch("masks", "Token masks made for grammars.", lambda: MASKS.made)
        self.metrics.watch(
            "mask_seconds_mean", "Mean time that a mask takes.", lambda: MASKS.seconds / max(MASKS.made, 1)
        )
        self.metrics.watch("mask_wait_seconds", "Time that steps waited for masks, in total.", lambda: MASKS.waited)
        self.metrics.watch("places_taken", "Texts of all accepted requests.", lambda: self.places.texts)
        self.metrics.watch(
            "tokens_per_second", "Tokens computed per second while there was work.", lambda: self.places.rate
        )
        self.metrics.watch(
            "context_tokens", f"Context length of a sequence; cache {kinds(info['layers'])}.", lambda: info["n_ctx"]
        )

    def _loaded(self) -> Model:
        model = self._load()
        self.thread.loop = loop_of(model._runtime)
        return model

    def _count_blocks(self) -> None:
        """In the engine's thread, since a step locks the engine for long."""
        assert self._model is not None
        runtime = self._model._runtime
        left = prefixes_of(runtime).held[0] if runtime.source.kind == "text" else 0
        with runtime.use() as engine:
            self._blocks = (engine.n_blocks(), engine.free_blocks(), left)

    async def _keep_watch(self) -> None:
        """Every second: check that the engine's thread advances, and measure its speed."""
        computed, seconds = 0, 0.0
        counted: asyncio.Future[None] | None = None
        while True:
            began = time.monotonic()
            await asyncio.sleep(1.0)
            self.thread.stood_still += max(time.monotonic() - began - 2.0, 0.0)
            if self._model is not None and (counted is None or counted.done()):
                counted = self.thread.call(self._count_blocks)
            if not self.thread.alive:
                self._on_failure(f"a step of the model that takes {self.thread.step_seconds:.0f} s already", None)
            if self.thread.seconds > seconds and self.places.computed > computed:
                rate = (self.places.computed - computed) / (self.thread.seconds - seconds)
                self.places.rate += (rate - self.places.rate) * (_NEWEST if self.places.rate else 1.0)
            computed, seconds = self.places.computed, self.thread.seconds


def _refused(state: str) -> Refusal:
    """503 in a state other than "ok"."""
    words = {"loading": "the model is being loaded", "draining": "the server is about to end",
             "stuck": "a step of the model does not end"}  # fmt: skip
    return Refusal(503, words[state], state, retry_after=5)
