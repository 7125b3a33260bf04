"""Searches for token sequences over the engine: many at once, each written as if it were alone.

A task is a generator: it yields what it wants computed (Encode, Append, Decode, Read, Guess), is sent the result, and
returns what it found. The loop puts what all tasks want into one call of the engine. So a batch forms by itself: who
ends leaves it, and who waits takes the place. Greedy and sampled texts, beams, transcripts and forecasts are all made
by it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.plumbing.numbers import log_normaliser

Result = TypeVar("Result")
Logits = NDArray[np.float32]
Masks = NDArray[np.uint32]
Rules = Callable[[Logits, Sequence[int]], None]
"""Changes a row of logits (vocab,) in place, given the tokens found so far."""
May = Callable[[Sequence[int]], tuple[NDArray[np.uint32], int]]
"""The mask and the joint_from of a Decode that leave what rules leave, given the tokens found so far."""


Logprobs = tuple[float, Sequence[tuple[int, float]]]
"""Of a chosen token, and of the likeliest ones with theirs."""


class Choosing(Protocol):
    """What chooses tokens."""

    def sample(
        self,
        logits: Logits,
        samplers: Sequence[core.Sampler],
        *,
        masks: Masks | None,
        logprobs: Sequence[int],
        joint_from: Sequence[int],
    ) -> Sequence[tuple[int, Logprobs | None]]: ...


class Engine(Protocol):
    """What searches need of an engine, beside the tokens that they yield."""

    def new_sequence(self) -> int: ...
    def free_sequence(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...


@dataclass(frozen=True)
class Encode:
    """Wanted: a source (int32 ids or float32 rows) encoded into an empty sequence. The answer is nothing.

    positions: of its rows, int32 (n,), where there are gaps between them.
    states: the answer is what the encoder made of it, float32 (rows, d_model).
    """

    sequence: Any
    source: NDArray[Any]
    positions: NDArray[np.int32] | None = None
    states: bool = False

    @property
    def item(self) -> tuple[Any, ...]:
        """As the engine takes it."""
        return (self.sequence, self.source) + (() if self.positions is None else (self.positions,))


@dataclass(frozen=True)
class Append:
    """Wanted: tokens at the ends of sequences. The answer: logits float32 (sequences, vocab), the task's to change.

    Where tokens find no room, even after others have given up their rows, the task is thrown the ContextOverflowError:
    nothing was computed, and a task that is content with what it has returns it, which makes room.

    outputs: rows of logits for so many of each sequence's last tokens, one sequence after the other.
    """

    items: Sequence[tuple[Any, Sequence[int]]]
    outputs: int = 1


@dataclass(frozen=True)
class Decode:
    """Wanted: tokens at the end of a sequence, and one to follow them. The answer: it, and its Logprobs or None.

    All that tasks want in a step are chosen in one call, each by its sampler as if it were alone. Errors as Append.

    logprobs: how many of the likeliest tokens to report; 0: none.
    mask: bits (words,) of those that may be chosen, as core.Sampler reads them, or one that is made while the step
        runs; None: all.
    greedy: the sampler takes the likeliest of these.
    joint_from: as core.Engine.sample has it.
    """

    sequence: Any
    tokens: Sequence[int]
    sampler: core.Sampler
    logprobs: int = 0
    mask: Future[NDArray[np.uint32]] | NDArray[np.uint32] | None = None
    greedy: bool = False
    joint_from: int = -1

    @property
    def items(self) -> Sequence[tuple[Any, Sequence[int]]]:
        return [(self.sequence, self.tokens)]


@dataclass(frozen=True)
class Read:
    """Wanted: tokens at the end of a sequence, and what the model makes of each. The answer: the rows of so many of the
    first ones as a step had time for, float32 (n, vocab) of logits; the task asks again for the rest. Errors as Append.

    states: rows (n, d_model) of what the head reads, in place of logits.
    """

    sequence: Any
    tokens: Sequence[int]
    states: bool = False

    @property
    def items(self) -> Sequence[tuple[Any, Sequence[int]]]:
        return [(self.sequence, self.tokens)]


@dataclass(frozen=True)
class Guess:
    """Wanted: what may follow a text, as a smaller model guesses for all that want this in a step. The answer: so many
    tokens at most, none where that does not pay.

    session: of the text, whose rows may be given up meanwhile. tokens: the text, those without rows included.
    """

    session: Any
    tokens: Sequence[int]
    drafter: Any
    most: int

    @property
    def items(self) -> Sequence[tuple[Any, Sequence[int]]]:
        return [(self.session, ())]


@dataclass(frozen=True)
class Wait:
    """Wanted: nothing in this step, since another task computes what this one needs. The answer is nothing."""


Wish = Encode | Append | Decode | Read | Guess | Wait
Task = Generator[Wish, Any, Result]


@dataclass(frozen=True)
class Hypothesis:
    """Tokens, and how likely they are.

    Attributes:
        tokens: without the end token.
        logprobs: natural logarithms of their probabilities after the rules, and of the end token's if it came.
        ended: an end token came; else there was no room for more.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool

    def score(self, length_penalty: float = 1.0) -> float:
        """Sum of logprobs over length ** length_penalty, the end token counted."""
        return float(sum(self.logprobs)) / float(max(len(self.logprobs), 1) ** length_penalty)


class _Running(Generic[Result]):
    """A task under way, what it wants next (None: it is done), and its result."""

    result: Result

    def __init__(self, task: Task[Result]):
        self.task = task
        self.wants: Wish | None = None

    def answer(self, value: Any = None) -> None:
        try:
            self.wants = self.task.send(value)
        except StopIteration as end:
            self.wants, self.result = None, end.value


def choices(
    engine: Choosing, rows: Sequence[NDArray[Any]], wishes: Sequence[Decode], masks: Sequence[NDArray[np.uint32] | None]
) -> Sequence[tuple[int, Logprobs | None]]:
    """The answers to wishes, all in one call. rows: of each its logits (1, vocab), or of all the tokens that the engine
    has chosen, int32 (1, 1); masks: of each its mask."""
    logits = rows[0] if len(rows) == 1 else np.concatenate(rows)
    if logits.dtype == np.int32:
        return [(int(token), None) for token in logits[:, 0]]
    return engine.sample(
        logits, [one.sampler for one in wishes], masks=_masks(masks, logits.shape[1]),
        logprobs=[one.logprobs for one in wishes], joint_from=[one.joint_from for one in wishes],
    )  # fmt: skip


def _masks(masks: Sequence[NDArray[np.uint32] | None], n_vocab: int) -> Masks | None:
    """A row for each; those without a mask may choose any token. None: no one has a mask."""
    if all(one is None for one in masks):
        return None
    words = (n_vocab + 31) // 32
    rows = np.full((len(masks), words), -1, np.int32).view(np.uint32)
    for row, one in zip(rows, masks, strict=True):
        if one is not None:
            row[:] = one[:words]
    return rows


def together(tasks: Sequence[Task[Result]]) -> Task[list[Result]]:
    """One task of several that only append: they go in step, and their results come in order."""
    running = [_Running(task) for task in tasks]
    try:
        for one in running:
            one.answer()
        while active := [(one, one.wants) for one in running if isinstance(one.wants, Append)]:
            logits, at = (yield Append([item for _, wanted in active for item in wanted.items])), 0
            for one, wanted in active:
                one.answer(logits[at : at + len(wanted.items)])
                at += len(wanted.items)
    finally:
        for one in running:
            one.task.close()
    return [one.result for one in running]


def follow(
    sequence: int,
    logits: Logits,
    rules: Rules,
    sampler: core.Sampler,
    ends: frozenset[int],
    limit: int,
    may: May | None = None,
) -> Task[Hypothesis]:
    """One token after the other, as the sampler picks them: greedy or by chance.

    Args:
        sequence: computed up to `logits` (vocab,); the tokens are appended to it.
        rules: applied to every row before the sampler; logprobs are what they leave of the model's distribution.
        limit: tokens at most.
        may: the same rules, which only the first row needs then; those of all tasks are applied, and tokens chosen, in
            one call on all threads.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    token, logprob = _pick(logits, tokens, rules, sampler)
    while True:
        sampler.accept([token])
        logprobs.append(logprob)
        if token in ends:
            return Hypothesis(tuple(tokens), tuple(logprobs), True)
        tokens.append(token)
        if len(tokens) >= limit:
            return Hypothesis(tuple(tokens), tuple(logprobs), False)
        if may is None:
            rows = yield Append([(sequence, [token])])
            token, logprob = _pick(rows[0], tokens, rules, sampler)
        else:
            mask, joint_from = may(tokens)
            token, (logprob, _) = yield Decode(sequence, [token], sampler, 1, mask, joint_from=joint_from)


def _pick(logits: Logits, tokens: Sequence[int], rules: Rules, sampler: core.Sampler) -> tuple[int, float]:
    """A token of a row (vocab,), which the rules change, and its logprob."""
    rules(logits, tokens)
    token = sampler.sample(logits)
    return token, float(logits[token]) - log_normaliser(logits)


@dataclass(frozen=True)
class _Beam:
    """A beginning. sequence: where it is computed, but for its last token."""

    sequence: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float


def beam_search(
    engine: Engine,
    root: int,
    logits: Logits,
    rules: Rules,
    ends: frozenset[int],
    limit: int,
    *,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    patience: float = 1.0,
    on_step: Callable[[int], object] | None = None,
) -> Task[list[Hypothesis]]:
    """The likeliest sequences that a search with a few beginnings at a time finds, best first.

    Of the likeliest continuations of all beams, those that end within the first num_beams places are results, and the
    first num_beams others are the next beams. The search is over when there are num_beams results and the best beam,
    ended now, would not be among them; with early_stopping as soon as there are num_beams results; or at the limit,
    where beams are results too. Scores are sums of logprobs over length ** length_penalty, as Hugging Face has them.
    patience: so many times num_beams results are waited for, and returned (Kasai et al., "A Call for Clarity in Beam
    Search: How It Works and When It Stops", 2022).

    Args:
        root: a sequence computed up to `logits` (vocab,). Beams are its forks and take its rows, so that num_beams
            sequences always have room for a full context; it may end up with its source alone.
        limit: tokens at most.
        on_step: told after each step how many tokens the beams have.

    Raises:
        ValueError: the rules leave nothing that may come.
    """
    beams, rows, enough = [_Beam(root, (), (), 0.0)], logits[None], max(round(num_beams * patience), 1)
    found, owned = list[Hypothesis](), set[int]()
    try:
        while True:
            at_limit = len(beams[0].tokens) + 1 >= limit
            candidates = _continuations(beams, rows, rules, num_beams * (1 + max(len(ends), 1)))
            for _, tokens, logprobs, _ in candidates[:num_beams]:
                if tokens[-1] in ends:
                    found.append(Hypothesis(tokens[:-1], logprobs, True))
                elif at_limit:
                    found.append(Hypothesis(tokens, logprobs, False))
            found = sorted(found, key=lambda one: -one.score(length_penalty))[:enough]
            going_on = [one for one in candidates if one[1][-1] not in ends][:num_beams]
            if not found and not going_on:
                raise ValueError("no token is left to choose: every logit is -infinity")
            if at_limit or not going_on or _enough(found, going_on[0], enough, length_penalty, early_stopping):
                return found
            if on_step is not None:
                on_step(len(going_on[0][1]))
            beams = _forked(engine, beams, going_on, owned)
            engine.truncate(root, 0)
            rows = yield Append([(beam.sequence, beam.tokens[-1:]) for beam in beams])
    finally:
        for sequence in owned:
            engine.free_sequence(sequence)


_Continuation = tuple[int, tuple[int, ...], tuple[float, ...], float]  # beam it continues, tokens, logprobs, total


def _continuations(beams: Sequence[_Beam], rows: Logits, rules: Rules, count: int) -> list[_Continuation]:
    """The likeliest `count` continuations of beams by a token, best first."""
    options: list[tuple[float, int, int, float]] = []
    for index, (beam, row) in enumerate(zip(beams, rows, strict=True)):
        rules(row, beam.tokens)
        normaliser = log_normaliser(row)
        best = np.argpartition(-row, min(count, len(row)) - 1)[:count]  # slow from the end where many are -inf
        for token in best[np.isfinite(row[best])]:
            logprob = float(row[token]) - normaliser
            options.append((beam.total + logprob, index, int(token), logprob))
    options.sort(key=lambda option: (-option[0], option[1], option[2]))
    return [
        (index, (*beams[index].tokens, token), (*beams[index].logprobs, logprob), total)
        for total, index, token, logprob in options[:count]
    ]


def _enough(
    found: Sequence[Hypothesis], best: _Continuation, count: int, length_penalty: float, early_stopping: bool
) -> bool:
    if len(found) < count:
        return False
    _, tokens, _, total = best
    return early_stopping or total / len(tokens) ** length_penalty <= found[-1].score(length_penalty)


def _forked(engine: Engine, beams: Sequence[_Beam], going_on: Sequence[_Continuation], owned: set[int]) -> list[_Beam]:
    """Sequences for the next beams: a beam's own for its first continuation, forks for the others."""
    for sequence in owned - {beams[index].sequence for index, *_ in going_on}:
        owned.remove(sequence)
        engine.free_sequence(sequence)
    result, taken = list[_Beam](), set[int]()
    for index, tokens, logprobs, total in going_on:
        sequence = beams[index].sequence
        if sequence in taken or sequence not in owned:
            sequence = engine.fork(sequence)
            owned.add(sequence)
        taken.add(sequence)
        result.append(_Beam(sequence, tokens, logprobs, total))
    return result
