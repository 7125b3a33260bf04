"""Caches that slimrt does not have but users know, computed by the NumPy model of the tests with their rounding.

- kv q4, K per channel: the layout of KIVI (Liu et al. 2024) at 4 bits: K after its rotation in groups of 32 tokens of a
  channel, V in groups of 32 columns of a token, each group with a float16 scale and minimum; the newest, incomplete
  group of K stays in float16. 5 bits an element, as slimrt's own q4, plus that open group.
- eager low rank (as Palu, Chang et al. 2024): the same layout in 2 or 4 bits, and V in half of its columns (TALE's
  factors, all KV heads together) wherever it is read, in the prompt too.
- sinks and the newest rows (as StreamingLLM, Xiao et al. 2023): 4 rows and so many of the newest in float16; others are
  gone once the prompt is computed. Positions stay what they were.

What a token leaves behind does not depend on what comes later, so a text that is known can be decoded token by token in
one pass: every query sees each row as it was stored when the query's step began.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slimrt import CacheQuality, core
from slimrt.measure.quality import Windows
from slimrt.plumbing.numbers import surprise_and_divergence

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from reference import Cache, Reference, plus, rounded, to_few  # noqa: E402
from reference_modes import CACHE_MODES  # noqa: E402

GROUP = 32  # tokens
NAME = "kv q4, K per channel"


@dataclass(frozen=True)
class Scheme:
    """bits: of K and V, None: float16. part: of V's columns that are kept. newest: rows that are, 0: all; sinks."""

    name: str
    bits: int | None = 4
    part: float = 1.0
    newest: int = 0
    sinks: int = 4

    def bytes_per_token(self, width: int, n_layers: int, window: int) -> int:
        """What a token of so long a text leaves behind on average."""
        if self.bits is None:
            return n_layers * 4 * width * min(self.newest + self.sinks, window) // window
        group = self.bits * GROUP // 8 + 4  # of 32 elements: codes, a scale and a minimum
        return n_layers * round((1 + self.part) * width) // GROUP * group


BASELINES = (
    Scheme(NAME),
    Scheme("eager low rank 0.5, 2 bit", 2, 0.5),
    Scheme("eager low rank 0.5, 4 bit", 4, 0.5),
    Scheme("sinks and newest rows, 160", None, newest=156),
)


class Simulated(Reference):
    """A model whose cache is of some scheme."""

    def __init__(self, model: str | Path, scheme: Scheme = BASELINES[0], moments: Sequence[np.ndarray] = ()) -> None:
        """moments: of each layer's input E[x^T x], where V keeps some of its columns only."""
        super().__init__(model)
        self.scheme = scheme
        self._project = [self._projection(i, moment) for i, moment in enumerate(moments)] if scheme.part < 1 else []

    def _projection(self, i: int, moment: np.ndarray) -> np.ndarray:
        """v times it is what the kept columns of its latent say [kv width, kv width]."""
        w_v = self.w.layers[i].wv.T
        _, vectors = np.linalg.eigh(w_v.T @ moment @ w_v)
        kept = vectors[:, -round(self.scheme.part * len(vectors)) :]
        return np.asarray(kept @ kept.T)

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
        k, v, open_k, bits = fresh["k"], fresh["v"], rounded(fresh["k"], "f16"), self.scheme.bits
        v = v @ self._project[i] if self._project else v
        closed_k = open_k if bits is None else per_channel(k, bits)
        closed_v = rounded(v, "f16" if bits is None else f"q{bits}", heads)
        layer = self.w.layers[i]
        q = self.rotate(self.norm(plus(x @ layer.wq.T, layer.bq), layer.q_norm), self.w.n_heads, positions)
        stored = positions[None, :] < self._begins[:, None]
        newest, sinks = self.scheme.newest, self.scheme.sinks
        old = positions[None, :] < self._begins[:, None] - newest
        gone = old & (positions[None, :] >= sinks) if newest else np.zeros_like(stored)
        closed = (positions[None, :] // GROUP + 1) * GROUP <= self._begins[:, None]
        k, open_k, closed_k, v, closed_v = (
            plane.reshape(len(x), heads, -1) for plane in (k, open_k, closed_k, v, closed_v)
        )
        out = []
        for head in range(self.w.n_heads):
            of = head // (self.w.n_heads // heads)
            scores = [q[:, head] @ plane[:, of].T for plane in (closed_k, open_k, k)]
            seen = np.where(closed, scores[0], np.where(stored, scores[1], scores[2]))
            p = self.weights(np.where(gone, -np.inf, seen), positions)
            out.append(np.where(stored, p, 0) @ closed_v[:, of] + np.where(stored, 0, p) @ v[:, of])
        return np.concatenate(out, axis=1)


def moments(path: str | Path, ids: np.ndarray) -> list[np.ndarray]:
    """E[x^T x] of each layer's attention over a text."""
    engine = core.Engine(str(path), n_ctx=len(ids), cache="kv", cache_type_k="f32", cache_type_v="f32")
    return [x.T @ x / len(x) for x in engine.attention_inputs(ids).astype(np.float64)]


def per_channel(k: np.ndarray, bits: int) -> np.ndarray:
    """k [n, channels] in groups of 32 tokens of a channel; of an incomplete group at the end nothing is said: zeros."""
    whole = len(k) // GROUP * GROUP
    stored = to_few(np.ascontiguousarray(k[:whole].T, np.float32), bits).T
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
    scheme, whole = model.scheme, -(-max(map(len, windows)) // GROUP) * GROUP
    per_token = scheme.bytes_per_token(width, n, whole)
    return CacheQuality(
        cache=scheme.name,
        modes=("kv",) * n,
        types=("f16" if scheme.bits is None else f"q{scheme.bits}",) * n,
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
