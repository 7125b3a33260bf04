"""Softmax and what is made of it, in the precision that each use needs."""

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
    """log softmax of each row at its target; row by row, since float64 copies of all would be large."""
    picked = np.empty(len(targets))
    for i, target in enumerate(targets):
        row = logits[i].astype(np.float64) - logits[i].max()
        picked[i] = row[target] - np.log(np.exp(row).sum())
    return picked


def log_normaliser(logits: NDArray[np.float32]) -> float:
    """log(sum(exp(logits))) of a row (vocab,), of which at least one is finite. Pairwise sums in float32 will do."""
    largest = logits.max()
    shares = logits - largest
    return float(largest) + float(np.log(np.exp(shares, out=shares).sum()))


def surprise_and_divergence(
    logits: NDArray[np.floating], reference: NDArray[np.floating], targets: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """-log q(target), and KL(p || q) = sum p (log p - log q), of q = softmax(logits) and p = softmax(reference).

    With D = log p - log q the sum is taken as p (e^-D - 1 + D), which is the same since p and q add up to 1 alike, is
    never negative, and keeps its digits when p and q are nearly the same.

    Args:
        logits, reference: (n, vocab). targets: (n,).

    Returns:
        two arrays float64 (n,), nats; infinite where logits are not finite.
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
