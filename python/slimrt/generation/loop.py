"""Continuous batching: one loop for all callers of a model. Tasks enter and leave at any step; a step serves them all.

Where the cache is full the youngest text gives up its rows, which are computed again later from its tokens (preemption
by recomputation: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023,
section 4.5). There is no worker thread: a thread that waits for its task computes steps for all tasks (a server has a
thread that does). Prompts beside other callers' texts are prefilled in chunks, sized so that these do not wait too long
(Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", 2024).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from slimrt.errors import ContextOverflowError
from slimrt.generation.masks import MASKS, Mask
from slimrt.generation.pace import Pace
from slimrt.generation.parts import Part, told_to_all
from slimrt.generation.prefix import PrefixTree
from slimrt.generation.queue import Queue, attended
from slimrt.generation.room import Room, is_shared
from slimrt.generation.search import Decode, Encode, Guess, Result, Task
from slimrt.generation.sequences import Sequences, is_closed
from slimrt.generation.store import PrefixStore
from slimrt.generation.tickets import Call, Meter, OnStep, Ticket
from slimrt.modes import AGING
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import CLOSED


class Loop:
    """The scheduler of one model's steps.

    Args:
        engine: computes the steps.
        width: sequences that all running tasks may use at once; a task that needs more runs alone.
        pace: how long texts wait for the prompts of others.
        finds: the engine finds the likeliest tokens on the device, which saves copying the logits where these decide.

    Attributes:
        room: finds cache rows for the tokens of a step.
    """

    def __init__(self, engine: Sequences, width: int, pace: Pace | None = None, finds: bool = False):
        self.pace = pace or Pace()
        self.room = Room(engine)
        self._engine, self._width, self._finds = engine, width, finds
        self._waiting = Queue()
        self._running: list[Ticket[Any]] = []
        self._order = 0
        self._changed = threading.Condition()
        self._stepper: int | None = None  # the thread that computes a step now
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
            on_step: called in the computing thread after each step that answered the task, and when the task is done.
            key: its owner. Among waiting tasks the owner with the fewest running ones comes first, then the call with
                the fewest sequences in use, then the oldest.
            eager: it advances whenever any thread computes steps; else only while some thread waits for it.

        Raises:
            ValueError: the model is closed.
        """
        with self._changed:
            if self._closed:
                raise ValueError("the model is closed")
            ticket = Ticket(task, needs, call or Call(), self._order, meter or Meter())
            ticket.on_step, ticket.key, ticket.eager = on_step, key, eager
            self._order += 1
            self._waiting.add(ticket)
            self._changed.notify_all()
        return ticket

    def run(self, tasks: Iterable[tuple[int, Task[Result]]], call: Call | None = None) -> list[Result]:
        """Run tasks, each given with the number of sequences it needs, together; results in order. The first error
        ends all of them. call: that they belong to; None: a new one."""
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
        """Return when until() is true or all tickets are done; compute steps meanwhile, unless another thread does."""

        def is_over() -> bool:
            return until() or all(one.done for one in tickets)

        if self._stepper == threading.get_ident():  # within a callback of a step: only these tickets advance
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
                        if not is_over():  # checked again under the lock: the step may have just ended
                            self._changed.wait()
                        continue
                    self._stepper = threading.get_ident()
                self._step_for_all()
        finally:
            with self._changed:
                for one in tickets:
                    one.awaited -= 1
                self._changed.notify_all()  # close() waits until `awaited` is 0

    def step(self) -> bool:
        """Compute one step for all tasks. False: there is nothing to compute, or another thread computes."""
        with self._changed:
            if self._stepper is not None:
                return False
            self._stepper = threading.get_ident()
        return self._step_for_all()

    def end_cancelled(self) -> None:
        """End cancelled tasks without computing a step, such as streams that were garbage-collected."""
        if self._stepper != threading.get_ident() and any(one.cancelled for one in (*self._waiting, *self._running)):
            with self._engine.alone():
                self._end_cancelled()

    def end(self, tickets: Sequence[Ticket[Any]], error: Exception | None = None) -> None:
        """End tickets now, which frees their sequences; waits for a step under way. error: raised by their result()."""
        if all(one.done for one in tickets):
            return
        for one in tickets if error is None else ():
            one.cancel()  # if Ctrl-C interrupts the wait for the lock below, the next step ends them
        with self._engine.alone():
            for one in tickets:
                self._remove(one)
                one.close(error)

    def close(self) -> None:
        """Wait for the tasks that some thread waits for, end the others, and refuse new ones.

        RuntimeError: called in a callback of a step, which would wait for itself.
        """
        if self._stepper == threading.get_ident():
            raise RuntimeError("a callback must not close the model that calls it")
        with self._changed:
            while any(one.awaited for one in (*self._waiting, *self._running)):
                self._changed.wait()
            self._closed = True
        self.end([*self._waiting, *self._running], ValueError("the model is closed"))

    def after_fork(self) -> None:
        """In the child process: streams continue. Tasks that other threads of the parent waited for are ended, and all
        of them if a step was being computed."""
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
            asking = [one for one in self._running if attended(one, only)]
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
        """Fail tasks whose session was closed, before the engine refuses it, which would fail the whole step."""
        for one in [one for one in self._running if attended(one, only) and is_closed(one.wants)]:
            self._resume(one, ValueError(CLOSED))

    def _admit(self, only: Sequence[Ticket[Any]] | None) -> None:
        """Begin waiting tasks, as far as there are sequences for them."""
        while (first := self._waiting.next(self._running, only, self._width)) is not None:
            with self._changed:
                self._waiting.discard(first)
            self._running.append(first)
            self._resume(first)

    def _resume(self, one: Ticket[Any], error: BaseException | None = None) -> None:
        try:
            one.resume(error or one.call.failure)
        finally:  # also after a Ctrl-C within the task
            if one.done:
                self._remove(one)
        self._tell(one)

    def _tell(self, one: Ticket[Any]) -> None:
        if one.on_step is not None:
            one.on_step(one)

    def _remove(self, one: Ticket[Any]) -> None:
        with self._changed:
            if one in self._running:
                self._running.remove(one)
            else:
                self._waiting.discard(one)

    def _encode(self, asking: Sequence[Ticket[Any]]) -> None:
        """Run the encoder for all tasks that want it, in one call; beside other callers for one batch a step."""
        shared = is_shared(asking)
        while wanting := [(one, one.wants) for one in asking if isinstance(one.wants, Encode)]:
            if shared:
                rows = list(accumulate(len(wanted.source) for _, wanted in wanting))
                wanting = wanting[: max(sum(n <= self.pace.batch for n in rows), 1)]
            started, states = time.perf_counter(), any(wanted.states for _, wanted in wanting)
            try:
                made = self._engine.encode([wanted.item for _, wanted in wanting], states)
            except Exception as error:
                for one, _ in wanting:
                    self._resume(one, error)
                return
            for i, (one, wanted) in enumerate(wanting):
                one.meter.add(time.perf_counter() - started)
                one.answer = made[i] if made and wanted.states else None
                self._resume(one)
            if shared:
                return

    def _guess(self, asking: Sequence[Ticket[Any]]) -> None:
        """Draft for all tasks that want it, in one call; they have the drafts verified in the same step."""
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
            one.meter.add(seconds)
            one.answer = guesses
            self._resume(one)

    def _compute(self, asking: Sequence[Ticket[Any]]) -> None:
        """Compute the tokens of a step, and hand the rows to tasks whose tokens are all computed."""
        parts = self.room.parts([one for one in asking if one.left], self._running, self.pace)
        for states in (False, True):
            if some := [part for part in parts if part.states == states]:
                self._compute_parts(some, states)

    def _compute_parts(self, parts: Sequence[Part], states: bool) -> None:
        """Compute the parts that want rows of one kind (logits or hidden states), in one call."""
        items = [item for part in parts for item in part.items]
        outputs = [n for part in parts for n in part.outputs]
        calls = {part.ticket.call for part in parts}
        kind = {"states": True} if states else self._found(parts)
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
            part.ticket.meter.add(seconds, now[0] - counts[0], now[1] - counts[1])
            at = part.take(rows, at)

    def _found(self, parts: Sequence[Part]) -> dict[str, bool]:
        """What to ask of the engine in place of logits: the likeliest tokens or candidates, if they decide all."""
        if not self._finds:
            return {}
        numbers = [part.n_deciding(self._engine.n_vocab) for part in parts]
        return {"tokens": True} if set(numbers) == {1} else {"candidates": True} if all(numbers) else {}

    def _choose_tokens(self, asking: Sequence[Ticket[Any]]) -> None:
        """Sample the next tokens of all tasks that want one, in one call."""
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
            chosen = self._engine.choose([one.answer for one in wanting], wishes, masks)
        except Exception as error:
            for one in wanting:
                self._resume(one, error)
            return
        for one, choice in zip(wanting, chosen, strict=True):
            if isinstance(choice, Exception):
                self._resume(one, choice)
            else:
                one.answer, one.answered = choice, True


def prefixes_of(runtime: Runtime, store: PrefixStore | None = None) -> PrefixTree:
    """The prefix cache of a model. store: where evicted rows go, only used by the first call.

    UnsupportedError: a model with an encoder.
    """
    loop = loop_of(runtime)
    with runtime.lock:
        if loop.room.prefixes is None:
            loop.room.prefixes = PrefixTree(runtime, store)
            runtime.reclaim = loop.room.prefixes.give_way
        return loop.room.prefixes


def loop_of(runtime: Runtime) -> Loop:
    """The loop of a model, shared by all its callers; made at the first call."""
    with runtime.lock:
        if runtime.loop is None:
            modes = {layer["mode"] for layer in runtime.info["layers"]}
            pace = Pace(batch=int(runtime.info["n_batch"]), recomputes=bool(modes - {"kv", *AGING}))
            on_device = str(runtime.info.get("device")).startswith("cuda")
            engine = Sequences(weakref.proxy(runtime))  # no cycle: a model that nobody holds is freed at once
            runtime.loop = Loop(engine, int(runtime.info["n_seqs"]), pace, on_device)
        loop: Loop = runtime.loop
    return loop
