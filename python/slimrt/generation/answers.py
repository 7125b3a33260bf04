"""Several answers to one prompt, which is computed once; and the likeliest ones that a beam search finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimrt.generation.beams import search_beams
from slimrt.generation.generate import Run, SessionEngine
from slimrt.generation.options import Options
from slimrt.generation.search import Logits, Logprobs, Task, run
from slimrt.plumbing.arguments import whole
from slimrt.results import Generation
from slimrt.runtime.kinds import check_sequences
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session


class _Answer(Run):
    """One of the texts that follow a prompt.

    Args:
        index: its place; the seed is that many above the call's.
        root: the session in which the prompt is computed, up to `logits` (vocab,). The last answer goes on in it, the
            others in forks of it.
    """

    logits: Logits

    def __init__(
        self, runtime: Runtime, prompt: Sequence[int], index: int, n: int, options: Options, seed: int, called: float,
        root: Session,
    ):  # fmt: skip
        super().__init__(runtime, prompt, options, seed + index, root if index == n - 1 else None, called)
        self._root, self._first = root, index == 0

    def _begin(self) -> list[int]:
        self.session = self.session or self._root.fork()
        self._cached = 0 if self._first else len(self.prompt)
        return []

    def _next(self, pending: Sequence[int]) -> Task[tuple[int, Logprobs | None]]:
        if not pending:
            return self._chosen(self.logits)
        return (yield from super()._next(pending))


def answers(
    runtime: Runtime, prompts: Sequence[Sequence[int]], n: int, options: Options, seed: int, called: float
) -> list[list[Generation]]:
    """n texts that follow each prompt (ids), which is computed once: each as it would be alone, with a seed of its own.
    Those of a prompt are decoded together, n_seqs at a time. With beams the n likeliest, or as many as there are, and
    prompts go together. Arguments and errors as Model.generate."""
    if whole("n", n) < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if options.num_beams > 1:
        return _likeliest(runtime, prompts, n, options, seed, called)
    return [_drawn(runtime, one, n, options, seed + i * n, called) for i, one in enumerate(prompts)]


def _drawn(
    runtime: Runtime, prompt: Sequence[int], n: int, options: Options, seed: int, called: float
) -> list[Generation]:
    engine = SessionEngine(runtime, options.on_progress)
    with runtime.lock, Session.new(runtime) as root:
        runs = [_Answer(runtime, prompt, i, n, options, seed, called, root) for i in range(n)]
        (logits,) = engine.append([(root, np.array(prompt, np.int32))])
        for one in runs:
            one.logits = logits
        return run(engine, [(1, one.task(engine)) for one in runs], int(runtime.info["n_seqs"]))


def _likeliest(
    runtime: Runtime, prompts: Sequence[Sequence[int]], n: int, options: Options, seed: int, called: float
) -> list[list[Generation]]:
    beams = options.num_beams
    if n > beams:
        raise ValueError(f"n={n} answers need as many beams, num_beams is {beams}")
    runs = [Run(runtime, one, options, seed + i * n, None, called) for i, one in enumerate(prompts)]
    check_sequences(runtime, beams)
    with runtime.use() as engine:
        tasks = [(beams, search_beams(engine, one, called)) for one in runs]
        return [found[:n] for found in run(engine, tasks, int(runtime.info["n_seqs"]))]
