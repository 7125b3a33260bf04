"""One loop for all callers of a model: tasks enter and leave at any step, and a step computes what all of them want.

A sequence is its tokens, and rows are a cache of them: where the pool has no room the youngest text gives its rows up,
and they are computed again later, so nothing is lost (preemption by recomputation: Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", 2023, section 4.5). Who waits for a task turns the
crank for all; a server has a thread that does. Prompts beside others' texts are computed in pieces that take no longer
than the texts may wait (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference", 2024).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from slimrt.errors import ContextOverflowError
from slimrt.generation.masks import MASKS, Mask
from slimrt.generation.pace import Pace
from slimrt.generation.parts import Part, told_to_all
from slimrt.generation.prefix import PrefixTree
from slimrt.generation.room import Room, is_shared
from slimrt.generation.search import Decode, Encode, Guess, Result, Task, choices
from slimrt.generation.sequences import Sequences, is_closed
from slimrt.generation.store import PrefixStore
from slimrt.generation.tickets import Call, Meter, OnStep, Ticket
from slimrt.modes import AGING
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import CLOSED


class Loop:
    """Steps of one model.

    Args:
        engine: what computes them.
        width: sequences that all running tasks may use at once; one that needs more runs alone.
        pace: how long texts wait for the prompts of others.
        chooses: the engine finds the likeliest token of a row where the row is, which saves a copy of it.

    Attributes:
        room: who finds rows for his tokens.
    """

    def __init__(self, engine: Sequences, width: int, pace: Pace | None = None, chooses: bool = False):
        self.pace = pace or Pace()
        self.room = Room(engine)
        self._engine, self._width, self._chooses = engine, width, chooses
        self._waiting: list[Ticket[Any]] = []
        self._running: list[Ticket[Any]] = []
        self._order = 0
        self._changed = threading.Condition()
        self._stepper: int | None = None  # the thread that computes a step
        self._closed = False

    @property
    def waiting(self) -> int:
        """Tasks that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Tasks that have begun and not ended."""
        return len(self._running)

    def submit(
        self,
        task: Task[Result],
        *,
        needs: int = 1,
        call: Call | None = None,
        meter: Meter | None = None,
        on_step: OnStep | None = None,
        key: str = "",
        eager: bool = False,
    ) -> Ticket[Result]:
        """Hand over a task, from any thread.

        Args:
            needs: sequences that it uses at once.
            on_step: called in the thread that computes, after each step that answered the task, and when it is done.
            key: whose it is; of those who wait he comes first who has the fewest running, then whose call has.
            eager: goes on whoever computes steps; else only while somebody waits for it.

        Raises:
            ValueError: the model is closed.
        """
        with self._changed:
            if self._closed:
                raise ValueError("the model is closed")
            ticket = Ticket(task, needs, call or Call(), self._order)
            ticket.meter, ticket.on_step, ticket.key, ticket.eager = meter, on_step, key, eager
            self._order += 1
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def run(self, tasks: Iterable[tuple[int, Task[Result]]], call: Call | None = None) -> list[Result]:
        """Run tasks, each with the sequences that it needs, together; their results in order. The first error of one
        ends all of them. call: whose they are; None: of this one."""
        call = call or Call()
        tickets = [self.submit(task, needs=needs, call=call) for needs, task in tasks]
        return self.results(tickets)

    def results(self, tickets: Sequence[Ticket[Result]]) -> list[Result]:
        """Wait for tickets; their results in order. The first error ends all of them."""
        try:
            self.wait(tickets, lambda: all(one.done for one in tickets) or any(one.error for one in tickets))
            for failed in (one for one in tickets if one.error):
                failed.result()
            return [one.result() for one in tickets]
        finally:
            self.end(tickets)

    def wait(self, tickets: Sequence[Ticket[Any]], until: Callable[[], bool]) -> None:
        """Return when `until` holds or all tickets are done; compute steps meanwhile, unless another thread does."""

        def is_over() -> bool:
            return until() or all(one.done for one in tickets)

        if self._stepper == threading.get_ident():  # called by a callback of a step: the others wait for this one
            while not is_over():
                self._step(tickets)
            return
        with self._changed:
            for one in tickets:
                one.awaited += 1
        try:
            while not is_over():
                with self._changed:
                    if self._stepper is not None:
                        if not is_over():  # what a step changed is seen before its end is waited for
                            self._changed.wait()
                        continue
                    self._stepper = threading.get_ident()
                self._step_for_all()
        finally:
            with self._changed:
                for one in tickets:
                    one.awaited -= 1
                self._changed.notify_all()  # close() waits for that

    def step(self) -> bool:
        """Compute a step of all that is wanted. False: nothing is, or another thread computes."""
        with self._changed:
            if self._stepper is not None:
                return False
            self._stepper = threading.get_ident()
        return self._step_for_all()

    def end_cancelled(self) -> None:
        """End what was cancelled without waiting for a step: streams that nobody holds any more."""
        if self._stepper != threading.get_ident() and any(one.cancelled for one in (*self._waiting, *self._running)):
            with self._engine.alone():
                self._end_cancelled()

    def end(self, tickets: Sequence[Ticket[Any]], error: Exception | None = None) -> None:
        """End tickets now, which frees their sequences; waits for a step under way. error: what they tell."""
        if all(one.done for one in tickets):
            return
        for one in tickets if error is None else ():
            one.cancel()  # Ctrl-C may end this before the others are done with their step: the next one does it then
        with self._engine.alone():
            for one in tickets:
                self._remove(one)
                one.close(error)

    def close(self) -> None:
        """Wait for all that somebody waits for, end the rest, and refuse what comes later. RuntimeError: in a callback
        of a step, which would wait for itself."""
        if self._stepper == threading.get_ident():
            raise RuntimeError("a callback must not close the model that calls it")
        with self._changed:
            while any(one.awaited for one in (*self._waiting, *self._running)):
                self._changed.wait()
            self._closed = True
        self.end([*self._waiting, *self._running], ValueError("the model is closed"))

    def after_fork(self) -> None:
        """In the child streams go on. Nobody waits for what other threads of the parent asked for, and what one of them
        was computing is lost."""
        at_work = self._stepper is not None
        self._changed, self._stepper = threading.Condition(), None
        for one in [one for one in (*self._waiting, *self._running) if at_work or one.awaited]:
            self._remove(one)
            one.lose(RuntimeError("this text was being computed when the process was forked: begin it again here"))

    def _step_for_all(self) -> bool:
        try:
            return self._step(None)
        finally:
            with self._changed:
                self._stepper = None
                self._changed.notify_all()

    def _step(self, only: Sequence[Ticket[Any]] | None) -> bool:
        with self._engine.alone():
            self._end_cancelled()
            self._admit(only)
            self._end_closed(only)
            asking = [one for one in self._running if _attended(one, only)]
            if not asking:
                return False
            self._encode(asking)
            self._guess(asking)
            self._compute(asking)
            self._choose_tokens(asking)
            for one in asking:
                if one.answered:
                    self._resume(one)
            return True

    def _end_cancelled(self) -> None:
        for one in [one for one in (*self._waiting, *self._running) if one.cancelled]:
            self._remove(one)
            one.close()
            self._tell(one)

    def _end_closed(self, only: Sequence[Ticket[Any]] | None) -> None:
        """Tell those whose session was closed, before it is an error of a step, and so everybody's."""
        for one in [one for one in self._running if _attended(one, only) and is_closed(one.wants)]:
            self._resume(one, ValueError(CLOSED))

    def _admit(self, only: Sequence[Ticket[Any]] | None) -> None:
        """Begin tasks that wait, as far as there are sequences for them."""
        while True:
            of_key, of_call = Counter(one.key for one in self._running), Counter[Call]()
            for one in self._running:  # a stream that nobody reads takes nobody's place
                of_call[one.call] += one.needs if _attended(one, only) else 0
            asking = [
                one
                for one in self._waiting
                if _attended(one, only) and _fits(one.needs, of_call[one.call], one.call.width)
            ]
            if not asking:
                return
            first = min(asking, key=lambda one: (of_key[one.key], of_call[one.call], one.order))
            if not _fits(first.needs, of_call.total(), self._width):
                return
            with self._changed:
                self._waiting.remove(first)
            self._running.append(first)
            self._resume(first)

    def _resume(self, one: Ticket[Any], error: BaseException | None = None) -> None:
        try:
            one.resume(error or one.call.failure)
        finally:  # of a Ctrl-C within the task too
            if one.done:
                self._remove(one)
        self._tell(one)

    def _tell(self, one: Ticket[Any]) -> None:
        if one.on_step is not None:
            one.on_step(one)

    def _remove(self, one: Ticket[Any]) -> None:
        with self._changed:
            for tickets in (self._waiting, self._running):
                if one in tickets:
                    tickets.remove(one)

    def _encode(self, asking: Sequence[Ticket[Any]]) -> None:
        """Give sources to all who have some, in one call; where others wait, to as many as a step has time for."""
        shared = is_shared(asking)
        while wanting := [(one, one.wants) for one in asking if isinstance(one.wants, Encode)]:
            if shared:
                rows = list(accumulate(len(wanted.source) for _, wanted in wanting))
                wanting = wanting[: max(sum(n <= self.pace.batch for n in rows), 1)]
            started, states = time.perf_counter(), any(wanted.states for _, wanted in wanting)
            try:
                made = self._engine.encode([wanted.item for _, wanted in wanting], *([True] if states else []))
            except Exception as error:
                for one, _ in wanting:
                    self._resume(one, error)
                return
            for i, (one, wanted) in enumerate(wanting):
                if one.meter is not None:
                    one.meter.add(time.perf_counter() - started, 0, 0)
                one.answer = made[i] if made and wanted.states else None
                self._resume(one)
            if shared:
                return

    def _guess(self, asking: Sequence[Ticket[Any]]) -> None:
        """Give guesses to all who want some, in one call: they have them checked in this step."""
        wanting = [(one, one.wants) for one in asking if isinstance(one.wants, Guess)]
        if not wanting:
            return
        started = time.perf_counter()
        try:
            guessed = self._engine.guess([wanted for _, wanted in wanting], self.pace)
        except Exception as error:
            for one, _ in wanting:
                self._resume(one, error)
            return
        seconds = time.perf_counter() - started
        for (one, _), guesses in zip(wanting, guessed, strict=True):
            if one.meter is not None:
                one.meter.add(seconds, 0, 0)
            one.answer = guesses
            self._resume(one)

    def _compute(self, asking: Sequence[Ticket[Any]]) -> None:
        """Compute the tokens of a step, and keep the rows for those who have all of theirs."""
        parts = self.room.parts([one for one in asking if one.left], self._running, self.pace)
        for states in (False, True):
            if some := [part for part in parts if part.states == states]:
                self._compute_parts(some, states)

    def _compute_parts(self, parts: Sequence[Part], states: bool) -> None:
        """The same of those who want rows of one kind, in one call."""
        items = [item for part in parts for item in part.items]
        outputs = [n for part in parts for n in part.outputs]
        calls = {part.ticket.call for part in parts}
        chosen = not states and self._chooses and all(part.greedy for part in parts)
        kind = {"states": True} if states else {"tokens": True} if chosen else {}
        started, counts = time.perf_counter(), self._engine.sparse_counts()
        try:
            rows = self._engine.append(items, outputs, told_to_all(parts, calls), **kind)
        except ContextOverflowError as error:
            self._resume(parts[-1].ticket, error)
            return
        except Exception as error:
            for part in parts:
                self._resume(part.ticket, part.ticket.call.failure or error)
            return
        seconds, now, at = time.perf_counter() - started, self._engine.sparse_counts(), 0
        few = [part for part in parts if part.few]
        n_tokens = sum(map(len, few))
        self.pace.note(seconds, sum(map(len, parts)) - n_tokens, sum(len(part.items) for part in few), n_tokens)
        if self.room.prefixes is not None:
            self.room.prefixes.note_rate(self.pace.tokens_per_second)
        for part in parts:
            if part.ticket.meter is not None:
                part.ticket.meter.add(seconds, now[0] - counts[0], now[1] - counts[1])
            at = part.take(rows, at)

    def _choose_tokens(self, asking: Sequence[Ticket[Any]]) -> None:
        """Answer all who want a token chosen, in one call."""
        wanting, wishes, masks = list[Ticket[Any]](), list[Decode](), list[Mask | None]()
        for one in asking:
            if isinstance(one.wants, Decode) and one.answer is not None and not one.answered:
                try:
                    masks.append(MASKS.wait(one.wants.mask))
                except Exception as error:
                    self._resume(one, error)
                else:
                    wanting.append(one)
                    wishes.append(one.wants)
        if not wanting:
            return
        try:
            chosen = choices(self._engine, [one.answer for one in wanting], wishes, masks)
        except Exception as error:
            for one in wanting:
                self._resume(one, error)
            return
        for one, choice in zip(wanting, chosen, strict=True):
            one.answer, one.answered = choice, True


def prefixes_of(runtime: Runtime, store: PrefixStore | None = None) -> PrefixTree:
    """What texts of a model have left for others that begin alike. store: where it goes from memory, as the first call
    says. UnsupportedError: a model with an encoder."""
    loop = loop_of(runtime)
    with runtime.lock:
        if loop.room.prefixes is None:
            loop.room.prefixes = PrefixTree(runtime, store)
            runtime.reclaim = loop.room.prefixes.give_way
        return loop.room.prefixes


def _attended(one: Ticket[Any], only: Sequence[Ticket[Any]] | None) -> bool:
    """Whether a step is for this one: whom somebody waits for, or, in a callback of a step, those of the callback."""
    return one in only if only is not None else one.eager or one.awaited > 0


def _fits(needs: int, used: int, width: int | None) -> bool:
    """Whether a task finds its sequences; one that needs more than there are runs alone."""
    return width is None or used == 0 or used + needs <= width


def loop_of(runtime: Runtime) -> Loop:
    """The loop of a model, for all who use it."""
    with runtime.lock:
        if runtime.loop is None:
            modes = {layer["mode"] for layer in runtime.info["layers"]}
            pace = Pace(batch=int(runtime.info["n_batch"]), recomputes=bool(modes - {"kv", *AGING}))
            on_device = str(runtime.info.get("device")).startswith("cuda")
            runtime.loop = Loop(Sequences(runtime), int(runtime.info["n_seqs"]), pace, on_device)
        loop: Loop = runtime.loop
    return loop
