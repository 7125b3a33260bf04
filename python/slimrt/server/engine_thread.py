"""The thread that computes all steps, and the hand-over of its results to asyncio, batched by step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slimrt.generation.generate import Run
from slimrt.generation.loop import Loop
from slimrt.generation.search import Task
from slimrt.generation.tickets import Cancelled, Ticket
from slimrt.results import Generation, TokenLogprob

Result = TypeVar("Result")
_POLL = 0.02  # seconds between checks whether another thread that computes a step has finished
_STUCK = 60.0  # seconds of one step after which the engine counts as stuck


@dataclass(frozen=True)
class News:
    """What a step added to a text.

    Attributes:
        text: new text that may be shown. tokens: number of new tokens.
        logprobs: of new tokens, if they were asked for.
        result: set once the text is complete or cancelled. error: set if it failed.
        at: time.perf_counter() of the step.
    """

    text: str
    tokens: int
    logprobs: Sequence[TokenLogprob]
    result: Generation | None
    error: BaseException | None
    at: float


class Making:
    """A text being generated, as the event loop sees it.

    Args:
        tell: called with the News, in the event loop.
    """

    def __init__(self, run: Run, tell: Callable[[Making, News], object]):
        self.run, self.tell = run, tell
        self.ticket: Ticket[Generation] | None = None
        self._begun = False
        self._tokens = self._logprobs = 0

    def news(self, ticket: Ticket[Generation], at: float) -> News | None:
        """What is new since the last call; the first call reports that it has begun. For the engine's thread."""
        cancelled = isinstance(ticket.error, Cancelled)
        if cancelled:
            self.run.end_unfinished()
        text, count = self.run.take(), len(self.run.tokens)
        logprobs = self.run.logprobs[self._logprobs :]
        new, self._tokens, self._logprobs = count - self._tokens, count, self._logprobs + len(logprobs)
        result, error = None, ticket.error
        if ticket.done and (error is None or cancelled):
            result, error = self.run.result(), None
        begun, self._begun = self._begun, True
        if begun and not (new or text or ticket.done):
            return None
        return News(text, new, logprobs, result, error, at)

    def cancel(self) -> None:
        """End it; its result is the text so far."""
        if self.ticket is not None:
            self.ticket.cancel()


class EngineThread:
    """The thread that computes all steps of a model. Public methods are for the event loop's thread.

    Args:
        on_death: called in the event loop with the error that ended the thread.

    Attributes:
        loop: the model's; None: not loaded yet.
        seconds: of all steps.
        stood_still: seconds in which the process did not run at all, such as in a paused container.
    """

    def __init__(self, on_death: Callable[[BaseException], object]):
        self.loop: Loop | None = None
        self.seconds = self.stood_still = 0.0
        self._on_death = on_death
        self._events = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="slimrt-engine", daemon=True)
        self._calls: deque[Callable[[], object]] = deque()
        self._outbox: deque[tuple[Making, News]] = deque()
        self._wake = threading.Event()
        self._since: float | None = None  # _now() at the start of the current step
        self._ending = False
        self._thread.start()

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0.0: there is none."""
        since = self._since
        return 0.0 if since is None else self._now() - since

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and its current step, if any, does not take too long."""
        return self._thread.is_alive() and self.step_seconds < _STUCK

    def call(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function in this thread, between two steps."""
        done: Future[Result] = Future()

        def do() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        self._calls.append(do)
        self._wake.set()
        return asyncio.wrap_future(done)

    def submit(self, making: Making, key: str) -> None:
        """Start generating a text. key: its owner, for fair scheduling."""
        assert self.loop is not None

        def on_step(ticket: Ticket[Any]) -> None:
            if (news := making.news(ticket, time.perf_counter())) is not None:
                self._outbox.append((making, news))
                if threading.get_ident() != self._thread.ident:  # another thread computed the step: wake this one
                    self._wake.set()

        run = making.run
        making.ticket = self.loop.submit(
            run.task(), needs=run.needs, meter=run.meter, on_step=on_step, key=key, eager=True
        )
        self._wake.set()

    def compute(self, task: Task[Result], key: str, told: Callable[[], object]) -> Ticket[Result]:
        """Start another task, batched with the texts. told: called in the event loop when it has begun, and when it is
        done."""
        assert self.loop is not None
        begun = False

        def on_step(ticket: Ticket[Any]) -> None:
            nonlocal begun
            if ticket.done or not begun:
                begun = True
                self._post(told)

        ticket = self.loop.submit(task, on_step=on_step, key=key, eager=True)
        self._wake.set()
        return ticket

    def cancel(self, makings: Sequence[Making | Ticket[Any]]) -> None:
        """End texts, whose results are what they have so far, and other tasks."""
        for one in makings:
            one.cancel()
        self._wake.set()

    def end(self) -> None:
        """End the thread after its current step, and wait for that."""
        self._ending = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._ending:
                self._wake.clear()
                if not self._work_once():
                    self._wake.wait(_POLL if self.loop is not None and self.loop.running else None)
        except BaseException as error:
            self._post(partial(self._on_death, error))

    def _work_once(self) -> bool:
        """Run at most one call and one step. False: there was nothing to do."""
        called = bool(self._calls)
        if called:
            self._calls.popleft()()
        if self.loop is None:
            return called
        started, self._since = time.monotonic(), self._now()
        stepped = self.loop.step()
        self._since = None
        if stepped:
            self.seconds += time.monotonic() - started
        if self._outbox:
            self._post(partial(_deliver, [self._outbox.popleft() for _ in range(len(self._outbox))]))
        return called or stepped

    def _now(self) -> float:
        return time.monotonic() - self.stood_still

    def _post(self, what: Callable[[], object]) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(what)


def _deliver(outbox: Sequence[tuple[Making, News]]) -> None:
    for making, news in outbox:
        making.tell(making, news)
