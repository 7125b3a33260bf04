"""Softmax and quantities derived from it, each in the precision that it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities, along the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def log_softmax_at(logits: NDArray[np.float32], targets: list[int]) -> NDArray[np.float64]:
    """Log softmax of each row at its target, in float64; row by row, since a float64 copy of all rows is large."""
    picked = np.empty(len(targets))
    for i, target in enumerate(targets):
        row = logits[i].astype(np.float64) - logits[i].max()
        picked[i] = row[target] - np.log(np.exp(row).sum())
    return picked


def log_normaliser(logits: NDArray[np.float32]) -> float:
    """log(sum(exp(logits))) of a row (vocab,) with at least one finite value; pairwise float32 sums are enough."""
    largest = logits.max()
    shares = logits - largest
    return float(largest) + float(np.log(np.exp(shares, out=shares).sum()))


def surprise_and_divergence(
    logits: NDArray[np.floating], reference: NDArray[np.floating], targets: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Negative log likelihood -log q(target) and divergence KL(p || q) = sum p (log p - log q), for q = softmax(logits)
    and p = softmax(reference).

    With D = log p - log q the terms are p (e^-D - 1 + D): the sum is the same since p and q both sum to 1, but each
    term is non-negative and keeps its precision when p and q are nearly equal.

    Args:
        logits, reference: (n, vocab). targets: (n,).

    Returns:
        Two float64 arrays (n,), in nats; infinite where logits are not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        log_q, log_p = log_softmax(logits), log_softmax(reference)
        p, difference = np.exp(log_p), log_p - log_q
        near = np.abs(difference) < 1
        small = np.where(near, difference, 0)
        terms = np.where(near, p * (np.expm1(-small) + small), np.exp(log_q) - p + p * difference)
        nll, kl = -log_q[np.arange(len(targets)), targets], terms.sum(-1)
    broken = ~np.isfinite(logits).all(-1)
    nll[broken] = kl[broken] = np.inf
    return nll, kl
