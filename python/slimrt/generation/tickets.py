"""What a caller gave to the loop: tasks, their tickets, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from slimrt.generation.options import OnProgress
from slimrt.generation.search import Append, Decode, Read, Result, Task, Wait, Wish
from slimrt.generation.sequences import Ids, Report

OnStep = Callable[["Ticket[Any]"], object]


class Cancelled(RuntimeError):
    """Whoever asked for it has cancelled this work."""


class Meter:
    """What the steps took in which a task had a part, since it was last asked.

    Attributes:
        seconds: of these steps.
        rows, skipped: rows of V that they came by, and those that they skipped.
    """

    def __init__(self) -> None:
        self.seconds, self.rows, self.skipped = 0.0, 0, 0

    def add(self, seconds: float, rows: int, skipped: int) -> None:
        self.seconds, self.rows, self.skipped = self.seconds + seconds, self.rows + rows, self.skipped + skipped

    def take(self) -> tuple[float, int, int]:
        """Seconds, rows and skipped; from here on they count anew."""
        taken = self.seconds, self.rows, self.skipped
        self.seconds, self.rows, self.skipped = 0.0, 0, 0
        return taken


class Call:
    """Tasks that one caller asked for together: prompts among them wait for no texts of theirs.

    Args:
        on_progress: told of what the engine computes for them; an exception from it ends them.
        width: sequences that they use at once, at most; None: as many as there are.
    """

    def __init__(self, on_progress: Report | None = None, width: int | None = None):
        self.on_progress, self.width = on_progress, width
        self.failure: Exception | None = None

    @classmethod
    def of(cls, on_progress: OnProgress | None) -> Call:
        """Of texts, whose on_progress is told of prompts as "prefill"."""
        return cls(None if on_progress is None else partial(on_progress, "prefill"))

    def give_up(self, error: Exception) -> None:
        """End its tasks at the next step with this error, whichever thread this is."""
        self.failure = self.failure or error

    def report(self, done: int, total: int) -> None:
        """Tell; what is raised is kept for its tasks."""
        if self.on_progress is None or self.failure is not None:
            return
        try:
            self.on_progress(done, total)
        except Exception as error:
            self.failure = error


class Ticket(Generic[Result]):
    """A task that was given to a loop.

    Attributes:
        begun: it has had a sequence. done: it has a result, has failed, or was cancelled.
        preemptions: how often it gave its rows up.
    """

    def __init__(self, task: Task[Result], needs: int, call: Call, order: int):
        self.begun = self.done = False
        self.preemptions = 0
        self.needs, self.call, self.order, self.key = needs, call, order, ""
        self.meter: Meter | None = None
        self.on_step: OnStep | None = None
        self.eager, self.awaited, self.cancelled = False, 0, False
        self.wants: Wish | None = None
        self.left: list[tuple[Any, Ids]] = []  # tokens of what it wants that are not computed yet
        self.answer: Any = None
        self.answered = False
        self._task = task
        self._result: Result | None = None
        self.error: BaseException | None = None

    def result(self) -> Result:
        """What the task returned. Raises what it raised; Cancelled."""
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End it at the next step, whichever thread this is; nothing of a task that is done."""
        self.cancelled = True

    def resume(self, error: BaseException | None = None) -> None:
        """Go on with the answer, or with an error, up to the next wish."""
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
        """End it now, with this error or Cancelled; for a thread that has the model."""
        if not self.done:
            self._task.close()
            self._finish(error=error or Cancelled("this work was cancelled"))

    def lose(self, error: Exception) -> None:
        """Have it fail without a word to its task, which may be in the hands of a thread that is gone."""
        self._finish(error=error)

    def _finish(self, *, result: Any = None, error: BaseException | None = None) -> None:
        self.wants, self.left, self.done, self._result, self.error = None, [], True, result, error
