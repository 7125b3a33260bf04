"""Logits, log-probabilities and perplexity of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slimrt.generation.loop import loop_of
from slimrt.generation.search import Append, Read, Task
from slimrt.plumbing import progress
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.numbers import log_softmax_at
from slimrt.results import Score
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session, check_length


def logits(runtime: Runtime, ids: list[int]) -> NDArray[np.float32]:
    """Logits after each token; see Model.logits."""
    if not ids:
        raise ValueError("logits need at least one token")
    check_length(len(ids), runtime, "the text")
    return loop_of(runtime).run([(1, _logits(runtime, ids))])[0]


def _logits(runtime: Runtime, ids: list[int]) -> Task[NDArray[np.float32]]:
    """The same as a task: in one step, or beside others in pieces."""
    with Session.new(runtime) as session:
        session.replaceable = True
        part: NDArray[np.float32] = yield Read(session, ids, most=len(ids))
        if (at := len(part)) == len(ids):
            return part
        made = np.empty((len(ids), part.shape[1]), np.float32)
        made[:at] = part
        while at < len(ids):
            part = yield Read(session, ids[at:], most=len(ids))
            made[at : at + len(part)] = part
            at += len(part)
        return made


def score(runtime: Runtime, ids: list[int]) -> Score:
    """Logprobs of every token but the first; see Model.score."""
    _require_two(ids)
    check_length(len(ids), runtime, "the text")
    return Score(tuple(ids), _window(runtime, ids, 1).astype(np.float32))


def perplexity(runtime: Runtime, ids: list[int], stride: int | None) -> float:
    """exp of the mean negative logprob over overlapping windows; see Model.perplexity."""
    _require_two(ids)
    if runtime.n_ctx < 2:
        raise ValueError(f"perplexity needs a context of at least 2 tokens (n_ctx, --ctx), got {runtime.n_ctx}")
    window = min(runtime.n_ctx, len(ids))
    stride = max(window // 2, 1) if stride is None else whole("stride", stride)
    if not 0 < stride < max(window, 2):
        raise ValueError(f"stride must be from 1 to {window - 1} (the window is {window} tokens), got {stride}")
    total, scored, end = 0.0, 1, window
    with progress.bar(runtime.show_progress, len(ids), "perplexity", "tok") as update:
        while scored < len(ids):
            first = end - window
            total += float(_window(runtime, ids[first:end], scored - first).sum())
            update(end, len(ids))
            scored, end = end, min(end + stride, len(ids))
    return float(np.exp(-total / (len(ids) - 1)))


def _window(runtime: Runtime, ids: list[int], first: int) -> NDArray[np.float64]:
    """Logprobs of ids[first:], each given all ids before it."""
    return loop_of(runtime).run([(1, _scored(runtime, ids, first))])[0]


def _scored(runtime: Runtime, ids: list[int], first: int) -> Task[NDArray[np.float64]]:
    """The same as a task; n_batch at a time, since rows of logits are large."""
    n_batch, parts, at = int(runtime.info["n_batch"]), list[NDArray[np.float64]](), first
    with (
        Session.new(runtime) as session,
        progress.bar(runtime.show_progress, len(ids) - first, "score", "tok") as update,
    ):
        session.replaceable = True
        if first > 1:
            yield Append([(session, ids[: first - 1])])
        while at < len(ids):
            logits = yield Read(session, ids[at - 1 : -1], most=n_batch)
            parts.append(log_softmax_at(logits, ids[at : at + len(logits)]))
            at += len(logits)
            update(at - first, len(ids) - first)
    return np.concatenate(parts)


def _require_two(ids: list[int]) -> None:
    if len(ids) < 2:
        raise ValueError("a text needs at least two tokens to be scored: the first has no probability")
