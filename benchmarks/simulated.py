"""Caches that slimrt does not have but users know, computed by the NumPy model of the tests with their rounding.

`kv q4, K per channel`: the layout of KIVI (Liu et al. 2024) at 4 bits: K after its rotation in groups of 32 tokens of a
channel, V in groups of 32 columns of a token, each group with a float16 scale and minimum; the newest, incomplete group
of K stays in float16. 5 bits an element, as slimrt's own q4, plus that open group.

What a token leaves behind does not depend on what comes later, so a text that is known can be decoded token by token in
one pass: every query sees each row as it was stored when the query's step began.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slimrt import CacheQuality
from slimrt.measure.quality import Windows
from slimrt.plumbing.numbers import surprise_and_divergence

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from reference import Cache, Reference, plus, rounded, to_few  # noqa: E402
from reference_modes import CACHE_MODES  # noqa: E402

GROUP = 32  # tokens
NAME = "kv q4, K per channel"


class Simulated(Reference):
    """A model whose cache is NAME."""

    def decoded(self, ids: Sequence[int], begins: Sequence[int]) -> np.ndarray:
        """Logits [n, vocab] of ids, each fed in a step that began at the index in begins."""
        self._begins = np.asarray(begins)
        return self.append(ids, self.new_cache("kv", None))

    def predict(self, ids: list[int], begins: list[int], n: int) -> list[int]:
        """See tasks.Predict."""
        return [int(one) for one in self.decoded(ids, begins)[-n:].argmax(-1)]

    def _attention(self, i: int, x: np.ndarray, positions: np.ndarray, caches: list[Cache]) -> np.ndarray:
        if not hasattr(self, "_begins"):
            return super()._attention(i, x, positions, caches)
        heads = self.w.n_kv_heads
        fresh = CACHE_MODES["kv"].store(self, i, x, positions, caches[i])
        k, v, open_k = fresh["k"], fresh["v"], rounded(fresh["k"], "f16")
        closed_k, closed_v = per_channel(k), rounded(v, "q4", heads)
        layer = self.w.layers[i]
        q = self.rotate(self.norm(plus(x @ layer.wq.T, layer.bq), layer.q_norm), self.w.n_heads, positions)
        stored = positions[None, :] < self._begins[:, None]
        closed = (positions[None, :] // GROUP + 1) * GROUP <= self._begins[:, None]
        k, open_k, closed_k, v, closed_v = (
            plane.reshape(len(x), heads, -1) for plane in (k, open_k, closed_k, v, closed_v)
        )
        out = []
        for head in range(self.w.n_heads):
            of = head // (self.w.n_heads // heads)
            scores = [q[:, head] @ plane[:, of].T for plane in (closed_k, open_k, k)]
            p = self.weights(np.where(closed, scores[0], np.where(stored, scores[1], scores[2])), positions)
            out.append(np.where(stored, p, 0) @ closed_v[:, of] + np.where(stored, 0, p) @ v[:, of])
        return np.concatenate(out, axis=1)


def per_channel(k: np.ndarray) -> np.ndarray:
    """k [n, channels] in groups of 32 tokens of a channel; of an incomplete group at the end nothing is said: zeros."""
    whole = len(k) // GROUP * GROUP
    stored = to_few(np.ascontiguousarray(k[:whole].T, np.float32), 4).T
    return np.concatenate([stored, np.zeros_like(k[whole:])])


def measure(model: Simulated, windows: Sequence[np.ndarray], plan: Windows) -> CacheQuality:
    """As slimrt.compare_caches measures a cache: the prefix at once, then plan.chunk tokens at a time."""
    exact, nll, kl, same = Reference(model.w), list[float](), list[float](), list[bool]()
    for ids in windows:
        after = range(len(ids) - 1 - plan.prefix)
        begins = [0] * plan.prefix + [plan.prefix + at // plan.chunk * plan.chunk for at in after]
        logits, wanted = (one[plan.prefix :] for one in (model.decoded(ids[:-1], begins), exact.logits(ids[:-1])))
        one_nll, one_kl = surprise_and_divergence(logits, wanted, ids[plan.prefix + 1 :])
        nll += one_nll.tolist()
        kl += one_kl.tolist()
        same += (logits.argmax(-1) == wanted.argmax(-1)).tolist()
    n, width = len(model.w.layers), model.w.n_kv_heads * model.dk
    per_token = n * 2 * width // GROUP * (GROUP // 2 + 4)  # of 32 elements: codes, a scale and a minimum
    whole = -(-max(map(len, windows)) // GROUP) * GROUP
    return CacheQuality(
        cache=NAME,
        modes=("kv",) * n,
        types=("q4",) * n,
        ranks=(0,) * n,
        residual_types=("",) * n,
        perplexity=float(np.exp(np.mean(nll))),
        kl_mean=float(np.mean(kl)),
        kl_p99=float(np.quantile(kl, 0.99, method="higher")),
        kl_max=float(np.max(kl)),
        same_top=float(np.mean(same)),
        bytes_per_token=per_token,
        cache_bytes=whole * per_token + n * width * GROUP * 2,  # and the open group
        extra_weights=0,
    )
