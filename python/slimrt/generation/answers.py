"""Several answers to one prompt, which is prefilled once: sampled ones, or the best of a beam search."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from slimrt.generation.beams import beam_places, search_beams
from slimrt.generation.drafts import DraftedRun
from slimrt.generation.generate import Run, run_texts
from slimrt.generation.loop import loop_of
from slimrt.generation.options import Options
from slimrt.generation.search import Append, Logits, Logprobs, Task, Wait
from slimrt.generation.sequences import Sequences
from slimrt.plumbing.arguments import positive
from slimrt.results import Generation
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session


class Root:
    """A prompt (ids) shared by several answers. The first of them computes it.

    Attributes:
        session: holds the prompt's rows; every answer forks it, but for the last to begin, which takes it over.
        logits: of the token after the prompt, float32 (vocab,); None: not computed yet.
    """

    def __init__(self, prompt: Sequence[int]):
        self.prompt = prompt
        self.session: Session | None = None
        self.logits: Logits | None = None
        self._computing = False
        self._to_begin: weakref.WeakSet[Answer] = weakref.WeakSet()  # weak: answers may be cancelled before they begin

    def join(self, answer: Answer) -> None:
        """Register an answer, so that the session is kept until it has begun."""
        self._to_begin.add(answer)

    def compute(self, answer: Answer) -> Task[int]:
        """Compute the prompt, or wait until another answer has; returns how many of its tokens this answer reused."""
        while self.logits is None:
            if self._computing:
                yield Wait()
                continue
            self._computing = True
            try:
                self.session = answer.begin_session()
                pending = self.session.keep_common(self.prompt)
                cached = self.session.length
                (self.logits,) = yield Append([(self.session, pending)])
                loop_of(answer.runtime).room.idle.add(self)
                return cached
            finally:
                self._computing = False
                if self.logits is None:
                    self.give_up()
        return len(self.prompt)

    def begin(self, answer: Answer) -> Session:
        """A session with the prompt's rows, for an answer to continue."""
        assert self.session is not None
        self._to_begin.discard(answer)
        if self._to_begin:
            return self.session.fork()
        session, self.session = self.session, None
        return session

    def release(self, answer: Answer) -> None:
        """Free the session unless other answers are still to begin."""
        self._to_begin.discard(answer)
        if not self._to_begin and not self._computing:
            self.give_up()

    def give_up(self) -> None:
        """Free the rows; answers that are still to begin compute them again."""
        if self.session is not None:
            self.session.close()
        self.session = self.logits = None


class Answer(DraftedRun):
    """One of several answers to a prompt.

    Args:
        root: the prompt, shared by all answers.
        index: of this answer; its seed is seed + index.
    """

    def __init__(self, runtime: Runtime, root: Root, index: int, options: Options, seed: int, called: float):
        super().__init__(runtime, root.prompt, options, seed + index, None, called)
        self._root = root
        root.join(self)

    def _begin(self) -> Task[list[int]]:
        self._cached = yield from self._root.compute(self)
        self.session = self._root.begin(self)
        self.session.replaceable = True
        return []

    def _next(self, pending: Sequence[int]) -> Task[tuple[int, Logprobs | None]]:
        if not self.tokens:
            assert self._root.logits is not None
            return self._chosen(self._root.logits)
        self._root.release(self)
        return (yield from super()._next(pending))

    def _end(self) -> None:
        super()._end()
        self._root.release(self)


def answers(
    runtime: Runtime, prompts: Sequence[Sequence[int]], n: int, options: Options, seed: int, called: float
) -> list[list[Generation]]:
    """n answers to each prompt (ids), which is prefilled once; each answer is what it would be alone, with a seed of
    its own. The answers to one prompt are decoded together, n_seqs at a time. With beams: the n most likely texts, or
    all that the search finds if fewer, and all prompts are searched together. Arguments and errors as Model.generate.
    """
    n = positive("n", n)
    if options.num_beams > 1:
        return _likeliest(runtime, prompts, n, options, seed, called)
    return [_drawn(runtime, one, n, options, seed + i * n, called) for i, one in enumerate(prompts)]


def _drawn(
    runtime: Runtime, prompt: Sequence[int], n: int, options: Options, seed: int, called: float
) -> list[Generation]:
    root = Root(prompt)
    return run_texts(runtime, [Answer(runtime, root, i, options, seed, called) for i in range(n)], options)


def _likeliest(
    runtime: Runtime, prompts: Sequence[Sequence[int]], n: int, options: Options, seed: int, called: float
) -> list[list[Generation]]:
    beams = options.num_beams
    if options.lookup:
        raise ValueError("lookup is for sampling, not for beam search: leave out num_beams or lookup")
    if n > beams:
        raise ValueError(f"n={n} answers need as many beams, num_beams is {beams}")
    runs = [Run(runtime, one, options, seed + i * n, None, called) for i, one in enumerate(prompts)]
    taken, engine = [beam_places(one) for one in runs], Sequences(runtime)
    tasks = (search_beams(engine, one, called) for one in runs)
    return [found[:n] for found in loop_of(runtime).run(zip(taken, tasks, strict=True))]
