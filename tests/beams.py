# SPDX-License-Identifier: Apache-2.0
"""Beam search in a few lines, as transformers does it by default: length penalty 1, no early stop, one prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# advance(parents, tokens) -> logits [len(tokens), n_vocab]: beam i is beam parents[i] of the last call and a token.
Advance = Callable[[list[int], list[int]], np.ndarray]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def beam_search(advance: Advance, start: int, end: int, n_beams: int, n_new: int) -> tuple[list[int], float]:
    """The best sequence of up to n_new tokens after `start`, with `end` if it ends, and its mean log probability."""
    beams, totals, finished = [[]], np.zeros(1), []
    rows = log_softmax(advance([0], [start]))
    for length in range(1, n_new + 1):
        scores = totals[:, None] + rows
        # Twice as many, so that enough are left when half of them end.
        best = np.argsort(-scores, axis=None, kind="stable")[: 2 * n_beams]
        places = [(int(at) // scores.shape[1], int(at) % scores.shape[1]) for at in best]
        for parent, token in places[:n_beams]:
            if token == end or length == n_new:
                finished.append((scores[parent, token] / length, [*beams[parent], token]))
        places = [(parent, token) for parent, token in places if token != end][:n_beams]
        totals = np.array([scores[place] for place in places])
        beams = [[*beams[parent], token] for parent, token in places]
        if length < n_new:
            rows = log_softmax(advance([parent for parent, _ in places], [token for _, token in places]))
    score, tokens = max(finished)
    return tokens, score
