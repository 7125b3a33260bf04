"""Streams: the pieces of a text as they are generated."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NoReturn

from slimrt.generation.generate import Run
from slimrt.generation.loop import loop_of
from slimrt.generation.tickets import Call, Cancelled, Ticket
from slimrt.plumbing.closing import Closing
from slimrt.results import Generation
from slimrt.runtime.runtime import Runtime


class Stream(Closing, Iterator[str]):
    """Iterator over the pieces of a text as they are generated.

    `result` is the Generation so far, complete after the last piece. Close the stream (or use it as a context manager)
    to stop early and free its part of the cache; then `result` has the text of all tokens, also what was held back
    because a stop string or a character might have begun there.
    """

    def __init__(self, runtime: Runtime, run: Run):
        self._run, self._loop, self._text, self._ended = run, loop_of(runtime), "", False
        call = Call.of(run.options.on_progress)
        self._ticket = self._loop.submit(run.task(), call=call, meter=run.meter)
        weakref.finalize(self, _cancel, weakref.ref(self._ticket)).atexit = False

    @property
    def result(self) -> Generation:
        return self._run.result()

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        try:
            self._loop.wait([self._ticket], self._has_text)
        except BaseException:
            self.close()
            raise
        if self._has_text():
            text, self._text = self._text, ""
            return text
        self._ended = True
        try:
            self._ticket.result()
        except Cancelled:  # by another thread
            self.close()
        raise StopIteration

    def cancel(self) -> None:
        """End the text at the next step, from any thread, without waiting for that. Iteration ends as after close()."""
        self._ticket.cancel()

    def close(self) -> None:
        self._ended = True
        self._loop.end([self._ticket])
        if self._run.finish_reason is None:
            self._run.end_unfinished()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a stream cannot be copied or pickled: its text is computed in this process; pass on the pieces"
        )

    def _has_text(self) -> bool:
        self._text += self._run.take()
        return self._text != ""


def _cancel(ticket: weakref.ref[Ticket[Generation]]) -> None:
    """End the task of a stream that was garbage-collected. A finalizer that held the ticket would keep what its
    callbacks refer to, such as an object that holds the stream."""
    if (task := ticket()) is not None:
        task.cancel()
