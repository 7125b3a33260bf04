# SPDX-License-Identifier: Apache-2.0
"""A window of text in one layer: exact rows, softmax weights, and how errors of keys and values change the output.

The output of attention is here that of the heads, before W_O. A query's own row is not read from the cache in its own
step, so it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slimrt.folding.rotation import Rotation
from slimrt.folding.weights import LayerWeights

_QUERIES = 256  # query rows whose attention is computed, spread over the window


@dataclass(frozen=True)
class KeyNoise:
    """Noise of a window's keys (after norm and RoPE) from the rounding of the stored rows.

    It differs between tokens: floats round large elements more, and a token that is attended to has large elements in
    the channels where the query has.

    Attributes:
        channels: variance in each channel of each key, independent of the others [n, e_k].
        row: variance in each channel of each stored row [n, w], from which keys are computed by `reads` [w, e_k]; None:
            they are not.
        repeats: equal tokens have equal noise (it is not rotated).
    """

    channels: np.ndarray
    row: np.ndarray | None = None
    reads: np.ndarray | None = None
    repeats: bool = False

    def of_scores(self, queries: np.ndarray, columns: slice) -> np.ndarray:
        """Variance of q . k [queries, n], unscaled, for queries [queries, head_dim] of one head."""
        variance = queries**2 @ self.channels[:, columns].T
        if self.row is not None and self.reads is not None:
            variance = variance + (queries @ self.reads[:, columns].T) ** 2 @ self.row.T
        return np.asarray(variance)


@dataclass(frozen=True)
class Window:
    """Attention inputs x float32 [n, d] of the positions 0, 1, ... of a text, in one layer."""

    weights: LayerWeights
    rotation: Rotation | None
    x: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def k(self) -> NDArray[np.float32]:
        """K without bias, before norm and RoPE, in the runtime's precision [n, e_k]."""
        return self.x @ self.weights.w_k.astype(np.float32)

    @cached_property
    def v(self) -> NDArray[np.float32]:
        """V without bias, in the runtime's precision [n, e_v]."""
        return self.x @ self.weights.w_v.astype(np.float32)

    @cached_property
    def exact_k(self) -> NDArray[np.float64]:
        """`k` in float64."""
        return np.asarray(self.x.astype(np.float64) @ self.weights.w_k)

    @cached_property
    def exact_v(self) -> NDArray[np.float64]:
        """`v` in float64."""
        return np.asarray(self.x.astype(np.float64) @ self.weights.w_v)

    @cached_property
    def k_norm(self) -> np.ndarray:
        """QK-norm's factor of k [n, e_k], or [1, 1]: its weight over the root mean square of each row or head (of
        LayerNorm: over the standard deviation)."""
        gain = self.weights.gain("k")
        return np.ones((1, 1)) if gain is None else gain * self._per_rms(self.exact_k)

    @cached_property
    def keys(self) -> NDArray[np.float32]:
        """K after norm and RoPE, in the runtime's precision [n, e_k]."""
        return self.as_keys(self.k)

    def unrotated(self, k: np.ndarray) -> np.ndarray:
        """Apply QK-norm (with the factors of the exact k) and the bias to k [n, e_k]."""
        bias = self.weights.bias("k")
        k = k if self.weights.gain("k") is None else self._centred(k) * self.k_norm.astype(k.dtype)
        return k if bias is None else k + bias

    def as_keys(self, k: np.ndarray) -> np.ndarray:
        """Apply QK-norm, the bias and RoPE to k [n, e_k]."""
        k = self.unrotated(k)
        return k if self.rotation is None else self.rotation.turn(k, self.weights.attention.n_kv_heads)

    def key_noise(self, variance: np.ndarray) -> KeyNoise:
        """Noise of as_keys(k) if k has noise of this variance [n, e_k]."""
        variance = variance * np.square(self.k_norm)
        if self.rotation is None:
            return KeyNoise(variance, repeats=True)
        return KeyNoise(self.rotation.averaged(variance, self.weights.attention.n_kv_heads))

    @cached_property
    def queries(self) -> NDArray[np.intp]:
        """Indices of the query rows whose attention is computed."""
        return np.unique(np.linspace(0, len(self) - 1, min(_QUERIES, len(self))).astype(np.intp))

    @cached_property
    def _q(self) -> NDArray[np.float64]:
        """Queries after norm and RoPE [queries, q width]."""
        gain, bias = self.weights.gain("q"), self.weights.bias("q")
        q = self.x.astype(np.float64) @ self.weights.w_q
        if gain is not None:
            q = self._centred(q) * gain * self._per_rms(q)
        q = q if bias is None else q + bias
        if self.rotation is not None:
            q = self.rotation.turn(q, self.weights.attention.n_heads)
        return np.asarray(q[self.queries])

    def _centred(self, rows: np.ndarray) -> np.ndarray:
        """The rows minus their means if QK-norm is LayerNorm (which is of whole rows), else the rows."""
        return rows - rows.mean(axis=1, keepdims=True) if self.weights.attention.layer_norm else rows

    def _per_rms(self, rows: np.ndarray) -> np.ndarray:
        """1 / root mean square of the row, or head, that each element is in [n, e]."""
        a, squares = self.weights.attention, np.square(self._centred(rows), dtype=np.float64)
        parts = squares.reshape(len(rows), -1, a.head_dim if a.qk_norm == "head" else squares.shape[1])
        mean = np.broadcast_to(parts.mean(axis=2, keepdims=True), parts.shape).reshape(squares.shape)
        return np.asarray(1 / np.sqrt(mean + a.eps))

    def _scores(self, head: int, keys: np.ndarray) -> np.ndarray:
        """Scaled and capped scores of one head's queries over the window [queries, n], before the mask."""
        a = self.weights.attention
        scores = self._capped(self._head(self._q, head) @ self._kv_head(keys, head).T * a.scale)
        if a.alibi:
            scores += a.slopes[head] * (np.arange(len(self)) - self.queries[:, None])
        return np.asarray(scores)

    def _capped(self, scores: np.ndarray) -> np.ndarray:
        cap = self.weights.attention.score_cap
        return cap * np.tanh(scores / cap) if cap else scores

    def _head(self, rows: np.ndarray, head: int) -> np.ndarray:
        dim = self.weights.attention.head_dim
        return rows[:, head * dim : (head + 1) * dim]

    def columns(self, head: int) -> slice:
        """The columns of K and V that a query head reads."""
        a = self.weights.attention
        first = head // (a.n_heads // a.n_kv_heads) * a.head_dim
        return slice(first, first + a.head_dim)

    def _kv_head(self, rows: np.ndarray, head: int) -> np.ndarray:
        return rows[:, self.columns(head)]

    @cached_property
    def exact_keys(self) -> NDArray[np.float64]:
        """`keys` in float64."""
        return self.as_keys(self.exact_k)

    @cached_property
    def _own_scores(self) -> list[np.ndarray]:
        """Scores of each head's queries with their own keys [queries]."""
        a, keys = self.weights.attention, self.exact_keys[self.queries]
        each = [(self._head(self._q, head), self._kv_head(keys, head)) for head in range(a.n_heads)]
        return [self._capped(np.einsum("ij,ij->i", q, k) * a.scale) for q, k in each]

    @cached_property
    def _own(self) -> np.ndarray:
        """Mask of each query's own row [queries, n]."""
        return np.asarray(np.arange(len(self)) == self.queries[:, None])

    def _softmax(self, scores: np.ndarray, head: int) -> np.ndarray:
        """Softmax of masked scores [queries, n], in place. With an attention sink weights sum to less than 1."""
        sink = -np.inf if self.weights.sinks is None else float(self.weights.sinks[head])
        scores += self._mask
        high = np.maximum(scores.max(axis=1, keepdims=True), sink)
        scores -= high
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True) + np.exp(sink - high)
        return np.asarray(scores)

    @cached_property
    def _mask(self) -> np.ndarray:
        """The attention mask: 0 where a query sees a row, else -infinity [queries, n]."""
        at, own = np.arange(len(self)), self.queries[:, None]
        seen = at <= own
        if window := self.weights.attention.window:
            seen &= at > own - window
        return np.where(seen, 0.0, -np.inf)

    @cached_property
    def _attention(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Softmax weights [queries, n] and output [queries, head_dim] of each head."""
        keys, out = self.exact_keys, []
        for head in range(self.weights.attention.n_heads):
            p = self._softmax(self._scores(head, keys), head)
            out.append((p, p @ self._kv_head(self.exact_v, head)))
        return out

    def softmax_weights(self) -> list[np.ndarray]:
        """Softmax weights of each query head [queries, n]."""
        return [p for p, _ in self._attention]

    @cached_property
    def _groups(self) -> np.ndarray | None:
        """Group index of each token: tokens with equal inputs are in one group [n]; None if all inputs differ."""
        _, group = np.unique(self.x, axis=0, return_inverse=True)
        group = group.ravel()
        return group if group.max() + 1 < len(self) else None

    def output_error(self, keys: np.ndarray, values: np.ndarray) -> tuple[float, float]:
        """The error of attention's output if stored rows read back as these keys and values.

        Returns:
            The sum of squares of the error, and of the exact output.
        """
        error, at = 0.0, (np.arange(len(self.queries)), self.queries)
        for head, (_, exact) in enumerate(self._attention):
            scores = self._scores(head, keys)
            scores[at] = self._own_scores[head]
            p, v, read = self._softmax(scores, head), self._kv_head(self.exact_v, head), self._kv_head(values, head)
            got = p @ read + p[at][:, None] * (v - read)[self.queries]
            error += float(np.square(got - exact).sum())
        return error, self.output_energy

    # The rest predicts errors to first order from variances. With weights p_j, o = sum p_j v_j changes by sum p_j dv_j
    # + sum p_j ds_j (v_j - o). Rounding errors of different tokens are independent, so noise of values has the factor
    # sum p_j^2, and that of scores sum p_j^2 |v_j - o|^2. Tokens with equal inputs, frequent in the first layer, have
    # equal errors: their p_j are added before squaring.

    @cached_property
    def output_energy(self) -> float:
        """Sum of squares of attention's exact output."""
        return sum(float(np.square(out).sum()) for _, out in self._attention)

    @cached_property
    def _past(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Softmax weights of stored rows (all but a query's own), for each head: of tokens [queries, n], and of groups
        [queries, groups]."""
        past = [np.where(self._own, 0, weights) for weights, _ in self._attention]
        return [(p, self._shared(p)) for p in past]

    def from_values(self, noise: np.ndarray, missed: np.ndarray | None) -> float:
        """Expected sum of squares of the error of attention's output due to errors of values.

        Args:
            noise: noise variance of each channel of V [e_v].
            missed: the systematic part of v - v^ of each token [n, e_v], which is summed with its sign; None: 0.
        """
        error = 0.0
        for head, (p, shared) in enumerate(self._past):
            columns = self.columns(head)
            error += float(noise[columns].sum() * np.square(shared).sum())
            if missed is not None:
                error += float(np.square(p @ missed[:, columns]).sum())
        return error

    def from_scores(self, noise: KeyNoise) -> float:
        """Expected sum of squares of the error of attention's output due to errors of scores."""
        error, square = 0.0, self.weights.attention.scale**2
        at = self._first if noise.repeats else slice(None)
        for head, weights in enumerate(self._of_groups if noise.repeats else self._of_tokens):
            variance = noise.of_scores(self._head(self._q, head), self.columns(head)) * square
            error += float(np.vdot(weights, (variance * self._bends[head])[:, at]))
        return error

    @cached_property
    def _bends(self) -> list[np.ndarray] | list[float]:
        """The factor by which a score cap reduces variances of scores, of each head [queries, n]."""
        a = self.weights.attention
        if not a.score_cap:
            return [1.0] * a.n_heads
        products = (self._head(self._q, h) @ self._kv_head(self.exact_keys, h).T * a.scale for h in range(a.n_heads))
        return [np.cosh(scores / a.score_cap) ** -4.0 for scores in products]

    @cached_property
    def _of_tokens(self) -> list[np.ndarray]:
        """p_j^2 |v_j - o|^2 of each head [queries, n]."""
        return [self._spread(head, p, self.exact_v) for head, (p, _) in enumerate(self._past)]

    @cached_property
    def _of_groups(self) -> list[np.ndarray]:
        """_of_tokens with the weights of tokens with equal inputs added, for each head [queries, groups]."""
        if self._groups is None:
            return self._of_tokens
        return [self._spread(head, p, self.exact_v[self._first]) for head, (_, p) in enumerate(self._past)]

    def _spread(self, head: int, p: np.ndarray, values: np.ndarray) -> np.ndarray:
        v, out = values[:, self.columns(head)], self._attention[head][1]
        squares = np.square(v).sum(axis=1) - 2 * out @ v.T + np.square(out).sum(axis=1, keepdims=True)
        return np.asarray(p**2 * squares)

    @cached_property
    def _first(self) -> np.ndarray | slice:
        """Index of the first token of each group."""
        return slice(None) if self._groups is None else np.unique(self._groups, return_index=True)[1]

    def _shared(self, p: np.ndarray) -> np.ndarray:
        """Weights [queries, n] summed over tokens with equal inputs [queries, groups]."""
        if self._groups is None:
            return p
        order = np.argsort(self._groups, kind="stable")
        starts = np.flatnonzero(np.diff(self._groups[order], prepend=-1))
        return np.add.reduceat(p[:, order], starts, axis=1)
