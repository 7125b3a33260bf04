"""Tasks that search for token sequences: many are batched, and each gives the result that it would give alone.

A task is a generator: it yields what it wants computed (Encode, Append, Decode, Read, Guess), is sent the answer, and
returns its result. The loop batches what all tasks want into one call of the engine: continuous batching, since a task
that ends leaves the batch and a waiting one takes its place. Greedy and sampled texts, beams, transcripts and forecasts
are all made this way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.cache.server_sizes import ROWS_OF_A_PIECE
from slimrt.errors import ModelFormatError
from slimrt.generation.bans import Bans
from slimrt.plumbing.numbers import log_normaliser

Result = TypeVar("Result")
Logits = NDArray[np.float32]
Rules = Callable[[Logits, Sequence[int]], None]
"""Changes a row of logits (vocab,) in place, given the tokens found so far."""
May = Callable[[Sequence[int]], tuple[NDArray[np.uint32], int]]
"""The same rules as the mask and joint_from of a Decode, given the tokens found so far."""

Logprobs = tuple[float, Sequence[tuple[int, float]]]
"""The log probability of a chosen token; and the most likely (token, log probability) pairs."""

Choice = tuple[int, Logprobs | None]
"""A chosen token, and its Logprobs if asked for."""


class Engine(Protocol):
    """The engine's methods that searches call directly."""

    def new_sequence(self) -> int: ...
    def free_sequence(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def log_normalisers(self, logits: Logits) -> NDArray[np.float64]: ...
    def likeliest(self, logits: Logits, count: int) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class Encode:
    """Request: encode a source (int32 ids or float32 rows) into an empty sequence. Answer: None.

    positions: of the rows, int32 (n,), where they are not consecutive, or are of several series.
    states: the answer is the encoder's output, float32 (rows, d_model).
    """

    sequence: Any
    source: NDArray[Any]
    positions: NDArray[np.int32] | None = None
    states: bool = False

    @property
    def item(self) -> tuple[Any, ...]:
        """The arguments in the engine's order."""
        return (self.sequence, self.source) + (() if self.positions is None else (self.positions,))


@dataclass(frozen=True)
class Append:
    """Request: append tokens to sequences. Answer: logits float32 (sequences, vocab), which the task may change.

    If the tokens find no room, even after others were preempted, ContextOverflowError is thrown into the task; nothing
    was computed. The task may return what it has.

    outputs: rows of logits for this many last tokens of each sequence, one sequence after the other.
    """

    items: Sequence[tuple[Any, Sequence[int]]]
    outputs: int = 1


@dataclass(frozen=True)
class Decode:
    """Request: append tokens to a sequence and choose the next one. Answer: (token, its Logprobs or None).

    The tokens of all tasks in a step are sampled in one call, each by its own sampler. Errors as Append.

    logprobs: how many of the most likely tokens to report; 0: none.
    mask: bits (words,) of the allowed tokens, as core.Sampler reads them, or a future of them; None: all are allowed.
    joint_from: as in core.Engine.sample.
    """

    sequence: Any
    tokens: Sequence[int]
    sampler: core.Sampler
    logprobs: int = 0
    mask: Future[NDArray[np.uint32]] | NDArray[np.uint32] | None = None
    joint_from: int = -1

    @property
    def items(self) -> Sequence[tuple[Any, Sequence[int]]]:
        return [(self.sequence, self.tokens)]


@dataclass(frozen=True)
class Read:
    """Request: append tokens to a sequence. Answer: logits of the first tokens, as many as the step had time for,
    float32 (n, vocab); the task asks again for the rest. Errors as Append.

    states: hidden states (n, d_model), the input of the head, in place of logits.
    most: rows of logits in a step at most, since they are large.
    """

    sequence: Any
    tokens: Sequence[int]
    states: bool = False
    most: int = ROWS_OF_A_PIECE

    @property
    def items(self) -> Sequence[tuple[Any, Sequence[int]]]:
        return [(self.sequence, self.tokens)]


@dataclass(frozen=True)
class Guess:
    """Request: draft tokens to follow a text, batched over all tasks that ask in a step. Answer: at most `most` tokens,
    none where drafting does not pay.

    session: of the text; its rows may be given up meanwhile. tokens: the whole text, with tokens that have no rows.
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
    """Request: nothing in this step, since another task computes what this one needs. Answer: None."""


Wish = Encode | Append | Decode | Read | Guess | Wait
Task = Generator[Wish, Any, Result]


@dataclass(frozen=True)
class Hypothesis:
    """A text found, with its log probabilities.

    Attributes:
        tokens: without the end token.
        logprobs: natural log probabilities of the tokens under the rules, and of the end token if `ended`.
        ended: whether an end token came; else the limit was reached.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool

    def score(self, length_penalty: float = 1.0, given: int = 0) -> float:
        """Sum of logprobs / length ** length_penalty; the end token counts in both. given: tokens before these that
        count in the length."""
        return _mean(sum(self.logprobs), len(self.logprobs) + given, length_penalty)


def _mean(total: float, length: int, length_penalty: float) -> float:
    """total / length ** length_penalty."""
    return float(total) / float(max(length, 1) ** length_penalty)


class _Running(Generic[Result]):
    """A task under way, its current request (None: it is done), and its result."""

    result: Result

    def __init__(self, task: Task[Result]):
        self.task = task
        self.wants: Wish | None = None

    def answer(self, value: Any = None) -> None:
        try:
            self.wants = self.task.send(value)
        except StopIteration as end:
            self.wants, self.result = None, end.value


def together(tasks: Sequence[Task[Result]]) -> Task[list[Result]]:
    """One task made of several that yield only Append: they advance in lockstep. Results in order."""
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
    """Generate token by token with a sampler, greedy or random.

    Args:
        sequence: computed up to `logits` (vocab,); the tokens are appended to it.
        rules: applied to each row of logits before sampling; logprobs are those of the resulting distribution.
        limit: tokens at most.
        may: the same rules as masks. Then `rules` are only applied to the first row, and the sampling of all tasks in
            a step is one call on all threads.
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
    """A token sampled from a row (vocab,), to which the rules are applied in place, and its logprob."""
    rules(logits, tokens)
    token = sampler.sample(logits)
    return token, float(logits[token]) - log_normaliser(logits)


@dataclass(frozen=True)
class _Beam:
    """A partial hypothesis. sequence: has the rows of all its tokens but the last."""

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
    given: int = 0,
    on_step: Callable[[int], object] | None = None,
    bans: Bans | None = None,
) -> Task[list[Hypothesis]]:
    """Beam search: the most likely sequences found with num_beams hypotheses at a time, best first.

    Of the best continuations of all beams, those among the first num_beams that end are results, and the first
    num_beams others are the next beams. The search stops when there are num_beams results and the best beam, if it
    ended now, would not be among them; with early_stopping as soon as there are num_beams results; or at the limit,
    where beams become results too. Scores are sums of logprobs / length ** length_penalty, as in Hugging Face's.

    Args:
        root: a sequence computed up to `logits` (vocab,). Beams are forks of it, and its own rows are freed, so that
            num_beams sequences always have room for a full context; only its source may be left in the end.
        limit: tokens at most.
        patience: num_beams * patience results are waited for, and returned (Kasai et al., "A Call for Clarity in Beam
            Search: How It Works and When It Stops", 2022).
        given: tokens that began each text without being chosen, and count in its length, as in Hugging Face's.
        on_step: called after each step with the number of tokens of the beams.
        bans: tokens that may not come, after the rules; None: none.

    Raises:
        ValueError: the rules allow no token. ModelFormatError: a logit is NaN or +infinity.
    """
    beams, rows, enough = [_Beam(root, (), (), 0.0)], logits[None], max(round(num_beams * patience), 1)
    found, owned = list[Hypothesis](), set[int]()
    try:
        while True:
            at_limit = len(beams[0].tokens) + 1 >= limit
            candidates = _continuations(engine, beams, rows, rules, bans, num_beams * (1 + max(len(ends), 1)))
            for _, tokens, logprobs, _ in candidates[:num_beams]:
                if tokens[-1] in ends:
                    found.append(Hypothesis(tokens[:-1], logprobs, True))
                elif at_limit:
                    found.append(Hypothesis(tokens, logprobs, False))
            found = sorted(found, key=lambda one: -one.score(length_penalty, given))[:enough]
            going_on = [one for one in candidates if one[1][-1] not in ends][:num_beams]
            if not found and not going_on:
                raise ValueError("no token is left to choose: every logit is -infinity")
            if at_limit or not going_on or (early_stopping and len(found) == enough):
                return found
            _, longer, _, total = going_on[0]
            best = _mean(total, len(longer) + given, length_penalty)
            if len(found) == enough and best <= found[-1].score(length_penalty, given):
                return found
            if on_step is not None:
                on_step(len(going_on[0][1]))
            beams = _forked(engine, beams, going_on, owned)
            engine.truncate(root, 0)
            rows = yield Append([(beam.sequence, beam.tokens[-1:]) for beam in beams])
    finally:
        for sequence in owned:
            engine.free_sequence(sequence)


_Continuation = tuple[int, tuple[int, ...], tuple[float, ...], float]  # index of the beam, tokens, logprobs, total


def _continuations(
    engine: Engine, beams: Sequence[_Beam], rows: Logits, rules: Rules, bans: Bans | None, count: int
) -> list[_Continuation]:
    """The best `count` continuations of the beams by one token, best first."""
    for beam, row in zip(beams, rows, strict=True):
        rules(row, beam.tokens)
    normalisers = engine.log_normalisers(rows)
    if np.isnan(normalisers).any():
        raise ModelFormatError("a logit is NaN or +infinity: the weights (or a logits_processor) are broken")
    if bans is not None:
        normalisers = np.array(
            [bans.apply(row, beam.tokens, float(one)) for row, beam, one in zip(rows, beams, normalisers, strict=True)]
        )
    options: list[tuple[float, int, int, float]] = []
    for index, tokens in enumerate(engine.likeliest(rows, count)):
        for token in tokens[tokens >= 0]:
            logprob = float(rows[index, token]) - float(normalisers[index])
            options.append((beams[index].total + logprob, index, int(token), logprob))
    options.sort(key=lambda option: (-option[0], option[1], option[2]))
    return [
        (index, (*beams[index].tokens, token), (*beams[index].logprobs, logprob), total)
        for total, index, token, logprob in options[:count]
    ]


def _forked(engine: Engine, beams: Sequence[_Beam], going_on: Sequence[_Continuation], owned: set[int]) -> list[_Beam]:
    """Sequences for the next beams: a beam's first continuation keeps its sequence, the others fork it."""
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
