"""The async methods: the synchronous calls in a thread, stopped when the awaiting task is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from slimrt.generation.options import GenerateOptions
from slimrt.generation.stream import Stream
from slimrt.runtime.runtime import Runtime

Result = TypeVar("Result")


class _Cancelled(Exception):
    """Raised in the thread between two steps, to stop the work."""


async def run_in_thread(
    runtime: Runtime, generate: Callable[[GenerateOptions], Result], options: GenerateOptions
) -> Result:
    """Await generate(options) in a thread; cancelling stops it after the current step."""
    cancelled = threading.Event()
    try:
        return await asyncio.wrap_future(_begin(runtime, lambda: generate(_stopping(options, cancelled))))
    finally:
        cancelled.set()


async def iterate_in_thread(
    runtime: Runtime, stream: Callable[[GenerateOptions], Stream], options: GenerateOptions
) -> AsyncGenerator[str, None]:
    """Iterate over stream(options) from a thread; leaving the loop stops it after the current step."""
    loop, queue, cancelled = asyncio.get_running_loop(), asyncio.Queue[str | None](), threading.Event()
    begun: list[Stream] = []

    def work() -> None:
        try:
            with suppress(_Cancelled), stream(_stopping(options, cancelled)) as pieces:
                begun.append(pieces)
                for piece in pieces if not cancelled.is_set() else ():
                    loop.call_soon_threadsafe(queue.put_nowait, piece)
        finally:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    worker = _begin(runtime, work)
    try:
        while (piece := await queue.get()) is not None:
            yield piece
    finally:
        cancelled.set()
        for pieces in begun:
            pieces.cancel()  # it may wait for the texts of others
        if not worker.cancel():  # else it waited for a thread
            await asyncio.wrap_future(worker)


def _begin(runtime: Runtime, work: Callable[[], Result]) -> Future[Result]:
    """Start work() in one of the model's threads, with the caller's context variables, as asyncio.to_thread does."""
    return runtime.callers.submit(contextvars.copy_context().run, work)


def _stopping(options: GenerateOptions, cancelled: threading.Event) -> GenerateOptions:
    """The options with an on_progress that also stops the work once `cancelled` is set."""
    on_progress = options.get("on_progress")

    def report(stage: str, done: int, total: int) -> None:
        if cancelled.is_set():
            raise _Cancelled
        if on_progress is not None:
            on_progress(stage, done, total)

    return options | {"on_progress": report}
