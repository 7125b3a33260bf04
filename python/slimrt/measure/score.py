"""Log-probabilities and perplexity of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slimrt.plumbing import progress
from slimrt.plumbing.arguments import whole
from slimrt.plumbing.numbers import log_softmax_at
from slimrt.results import Score
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session, check_length


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
    """Logprobs of ids[first:], each given all ids before it; n_batch at a time, since rows of logits are large."""
    n_batch = int(runtime.info["n_batch"])
    parts = []
    with runtime.lock, Session.new(runtime) as session:
        if first > 1:
            session.append(ids[: first - 1], last_only=True)
        with progress.bar(runtime.show_progress, len(ids) - first, "score", "tok") as update:
            for start in range(first - 1, len(ids) - 1, n_batch):
                end = min(start + n_batch, len(ids) - 1)
                parts.append(log_softmax_at(session.append(ids[start:end]), ids[start + 1 : end + 1]))
                update(end - first + 1, len(ids) - first)
    return np.concatenate(parts)


def _require_two(ids: list[int]) -> None:
    if len(ids) < 2:
        raise ValueError("a text needs at least two tokens to be scored: the first has no probability")
