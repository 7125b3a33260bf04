"""Several answers to one prompt, which is computed once; and the likeliest ones that a beam search finds."""

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
from slimrt.plumbing.arguments import whole
from slimrt.results import Generation
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session


class Root:
    """A prompt (ids) that several answers follow, computed once, by the first of them.

    Attributes:
        session: where it is computed; the last answer to begin goes on in it.
        logits: of what follows, float32 (vocab,); None: not there yet.
    """

    def __init__(self, prompt: Sequence[int]):
        self.prompt = prompt
        self.session: Session | None = None
        self.logits: Logits | None = None
        self._computing = False
        self._to_begin: weakref.WeakSet[Answer] = weakref.WeakSet()  # one that is cancelled before is gone

    def join(self, answer: Answer) -> None:
        """Know of an answer."""
        self._to_begin.add(answer)

    def compute(self, answer: Answer) -> Task[int]:
        """Return when the prompt is computed: how many of its tokens that answer did not have to."""
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
        """A session for an answer."""
        assert self.session is not None
        self._to_begin.discard(answer)
        if self._to_begin:
            return self.session.fork()
        session, self.session = self.session, None
        return session

    def release(self, answer: Answer) -> None:
        """Give up the session if no answer but this one is still to begin."""
        self._to_begin.discard(answer)
        if not self._to_begin and not self._computing:
            self.give_up()

    def give_up(self) -> None:
        """Free the rows; an answer that is still to begin computes them again."""
        if self.session is not None:
            self.session.close()
        self.session = self.logits = None


class Answer(DraftedRun):
    """One of the texts that follow a prompt.

    Args:
        index: its place; the seed is that many above the call's.
        root: the prompt's.
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
    root = Root(prompt)
    return run_texts(runtime, [Answer(runtime, root, i, options, seed, called) for i in range(n)], options)


def _likeliest(
    runtime: Runtime, prompts: Sequence[Sequence[int]], n: int, options: Options, seed: int, called: float
) -> list[list[Generation]]:
    beams = options.num_beams
    if options.lookup:
        raise ValueError("lookup goes with texts that are drawn, not with beams: leave out num_beams, or lookup")
    if n > beams:
        raise ValueError(f"n={n} answers need as many beams, num_beams is {beams}")
    runs = [Run(runtime, one, options, seed + i * n, None, called) for i, one in enumerate(prompts)]
    taken, engine = [beam_places(one) for one in runs], Sequences(runtime)
    tasks = (search_beams(engine, one, called) for one in runs)
    return [found[:n] for found in loop_of(runtime).run(zip(taken, tasks, strict=True))]
