"""Tasks that callers submitted to the loop: tickets, calls, and their progress."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from slimrt.generation.options import OnProgress
from slimrt.generation.search import Append, Decode, Read, Result, Task, Wait, Wish
from slimrt.generation.sequences import Ids, Report

OnStep = Callable[["Ticket[Any]"], object]


class Cancelled(RuntimeError):
    """The caller has cancelled this work."""


class Meter:
    """What the steps of a task cost since the last take().

    Attributes:
        seconds: of these steps.
        rows, skipped: rows of V within reach of sparse attention, and those that it skipped.
    """

    def __init__(self) -> None:
        self.seconds, self.rows, self.skipped = 0.0, 0, 0

    def add(self, seconds: float, rows: int = 0, skipped: int = 0) -> None:
        self.seconds, self.rows, self.skipped = self.seconds + seconds, self.rows + rows, self.skipped + skipped

    def take(self) -> tuple[float, int, int]:
        """Seconds, rows and skipped; all are reset to 0."""
        taken = self.seconds, self.rows, self.skipped
        self.seconds, self.rows, self.skipped = 0.0, 0, 0
        return taken


class Call:
    """The tasks that one caller submitted together. Its prompts are not slowed down for its own texts.

    Args:
        on_progress: called with the tokens done and in all; an exception from it ends the tasks.
        width: sequences that they use at once, at most; None: no limit of its own.
    """

    def __init__(self, on_progress: Report | None = None, width: int | None = None):
        self.on_progress, self.width = on_progress, width
        self.failure: Exception | None = None

    @classmethod
    def of(cls, on_progress: OnProgress | None) -> Call:
        """A call for texts, whose on_progress gets "prefill" as the stage."""
        return cls(None if on_progress is None else partial(on_progress, "prefill"))

    def give_up(self, error: Exception) -> None:
        """End its tasks with this error at the next step; from any thread."""
        self.failure = self.failure or error

    def report(self, done: int, total: int) -> None:
        """Call on_progress; an exception from it is kept, to end the tasks."""
        if self.on_progress is None or self.failure is not None:
            return
        try:
            self.on_progress(done, total)
        except Exception as error:
            self.failure = error


class Ticket(Generic[Result]):
    """A task submitted to a loop.

    Attributes:
        begun: it has started. done: it has a result, has failed, or was cancelled.
        preemptions: how often its rows were given up.
        needs: sequences that it uses at once. order: smaller for older tickets. awaited: threads that wait for it.
        wants: its current request; answer: to that, complete once `answered` is set.
    """

    def __init__(self, task: Task[Result], needs: int, call: Call, order: int, meter: Meter):
        self.begun = self.done = False
        self.preemptions = 0
        self.needs, self.call, self.order, self.meter, self.key = needs, call, order, meter, ""
        self.on_step: OnStep | None = None
        self.eager, self.awaited, self.cancelled = False, 0, False
        self.wants: Wish | None = None
        self.left: list[tuple[Any, Ids]] = []  # tokens of its request that are not computed yet
        self.answer: Any = None
        self.answered = False
        self._task = task
        self._result: Result | None = None
        self.error: BaseException | None = None

    def result(self) -> Result:
        """The task's result. Raises the task's error, or Cancelled."""
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End it at the next step, from any thread; no effect if it is done."""
        self.cancelled = True

    def resume(self, error: BaseException | None = None) -> None:
        """Send the task its answer, or throw an error into it, and take its next request."""
        answer, self.answer, self.answered, self.begun = self.answer, None, False, True
        try:
            self.wants = self._task.send(answer) if error is None else self._task.throw(error)
        except StopIteration as end:
            self._finish(result=end.value)
        except Exception as failure:
            self._finish(error=failure)
        except BaseException as failure:
            self._finish(error=failure)
            raise
        else:
            wish = self.wants
            items = wish.items if isinstance(wish, (Append, Decode, Read)) else ()
            self.left = [(of, list(ids)) for of, ids in items]
            self.answered = isinstance(wish, Wait)

    def close(self, error: Exception | None = None) -> None:
        """End it now with this error or Cancelled; the caller holds the model's lock."""
        if not self.done:
            self._task.close()
            self._finish(error=error or Cancelled("this work was cancelled"))

    def lose(self, error: Exception) -> None:
        """Fail it without closing its generator, which may have been running in a thread that a fork did not copy."""
        self._finish(error=error)

    def _finish(self, *, result: Any = None, error: BaseException | None = None) -> None:
        self.wants, self.left, self.done, self._result, self.error = None, [], True, result, error
