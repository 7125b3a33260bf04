# SPDX-License-Identifier: Apache-2.0
"""Mode lowrank in one layer: a latent of V ordered by weight, so that its first columns determine most of V (TALE;
docs/cache-math.md, section 4).

TALE factorises a group of KV heads by the SVD of W C, with W the group's rows of W_V and C C^T the second moments of
the layer's input: W C = U Sigma Vt, latent = sqrt(Sigma) Vt C^-1 x, V = U sqrt(Sigma) latent. The same latent is
sqrt(Sigma)^-1 U^T v, and U Sigma^2 U^T are the second moments of v itself. Here the latent is therefore computed from
v, by a small matrix with the condition of sqrt(Sigma), and W_V stays as it is, in any type.

What matters is not V but its product with W_O (`weighed`): with A = blockdiag_h(W_O,h^T W_O,h), U and Sigma are those
of v A^(1/2) instead. The first r columns then preserve most of each head's contribution to the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import CacheUnsupportedError
from slimrt.folding import noise
from slimrt.folding.attention import Attention
from slimrt.folding.planes import Plane, bytes_per_token
from slimrt.folding.readback import Reader, Sample
from slimrt.folding.weights import LayerWeights
from slimrt.folding.window import KeyNoise, Window
from slimrt.plumbing.arguments import real, whole

Number = TypeVar("Number", int, float)
LATENT_MODE = "lowrank"
BLOCK = 32  # tokens of a block, in which each channel of K has a scale of its own
_FLOOR = 1e-6  # smaller values, relative to the largest, are raised to this
_TYPES = {2: "q2", 3: "q3", 4: "q4", 8: "q8", 16: "f16"}
LEVEL_TYPES = ("q2", "q3", "q4", "q8")  # types to choose from for old rows
PARTS = tuple(eighth / 8 for eighth in range(1, 9))  # fractions of V's latent to choose from for old rows
_NEWEST = 64  # rows of the newer level


def usual_heads(n_kv_heads: int) -> int:
    """The core's default number of KV heads that share a latent."""
    heads = {"d_model": 1, "n_heads": n_kv_heads, "n_kv_heads": n_kv_heads, "head_dim": 1}
    mode = next(mode for mode in core.attention_modes(**heads, n_rot=0, qk_norm="none") if mode.name == LATENT_MODE)
    return mode.folds[0].cols


def levels_text(
    rank: float | Sequence[float] | None = None,
    bits: int | Sequence[int] | None = None,
    share: float | Sequence[float] | None = None,
    sinks: int | None = None,
    *,
    predict: bool = False,
) -> str:
    """Levels in the core's notation (core.levels), from TALE's parameters, oldest level first; None: the default.

    Args:
        rank: fraction of V's latent that each level keeps; levels beyond those given keep all.
        bits: bits of each level, 2, 3, 4, 8 or 16.
        share: of each level but the oldest, its fraction of the aged rows, or its number of rows (whole blocks); levels
            beyond those given have 0.1.
        sinks: rows at the beginning of a text that stay as written.
        predict: store the difference of V from its prediction from K.

    Raises:
        ValueError, TypeError: invalid values, or numbers of values that do not match.
    """
    usual = core.levels(LATENT_MODE)
    types = tuple(one.type_k for one in usual.of)
    if bits is not None:
        widths = _several("bits", bits, whole)
        if not widths or not set(widths) <= _TYPES.keys():
            raise ValueError(
                f"bits must be of {', '.join(map(str, _TYPES))}, got {', '.join(map(str, widths)) or 'none'}"
            )
        types = tuple(_TYPES[width] for width in widths)
    ranks: tuple[float, ...] = (usual.of[0].part,) if rank is None else _several("rank", rank, real)
    shares: tuple[float, ...] = () if share is None else _several("share", share, real)
    if len(ranks) > len(types) or len(shares) > len(types) - 1:
        raise ValueError(
            f"{len(ranks)} ranks and {len(shares)} shares were given for {len(types)} levels (bits): there may be as "
            "many ranks, and one share less, which is what the oldest level leaves"
        )
    ranks += (1.0,) * (len(types) - len(ranks))
    shares += (0.1,) * (len(types) - 1 - len(shares))
    parts = [f"{type}@{part:g}" for type, part in zip(types, ranks, strict=True)]
    parts[1:] = [f"{part}*{of:g}" for part, of in zip(parts[1:], shares, strict=True)]
    kept = usual.sinks if sinks is None else whole("sinks", sinks)
    more = ["predict"] if predict else []
    return core.levels(LATENT_MODE, "+".join([*parts, f"sinks={kept}", *more])).text


def aged_levels(
    type_k: str, type_v: str, part: float, types: Sequence[str] = LEVEL_TYPES, *, predict: bool = False
) -> core.Levels:
    """Two levels: the oldest with these types and this fraction of V's latent, and a newer one with all columns.

    The newer level, which attention reads most, has the type of `types` with the most bits. Its number of rows is
    fixed, so it adds hardly any bytes to a long context, and the same in all layers, so that layers age together.

    Args:
        type_k, type_v: quantised types.
        part: above 0, at most 1. predict: store the difference of V from its prediction from K.
    """
    newest = max(types, key=core.BITS.__getitem__)
    return core.levels(LATENT_MODE, f"{type_k}/{type_v}@{part}+{newest}*{_NEWEST}{'+predict' * predict}")


def _several(name: str, given: Number | Sequence[Number], kind: Callable[[str, object], Number]) -> tuple[Number, ...]:
    return tuple(kind(name, one) for one in (given if isinstance(given, Sequence) else (given,)))


def metric(weights: LayerWeights) -> np.ndarray:
    """A^(1/2) of each KV head, float64 [n_kv_heads, head_dim, head_dim]: how W_O weights the columns of V."""
    a = weights.attention
    heads = weights.w_o.reshape(a.d, a.n_kv_heads, a.n_heads // a.n_kv_heads, a.head_dim)
    gram = np.einsum("dkgi,dkgj->kij", heads, heads)
    values, vectors = np.linalg.eigh(gram)
    largest = np.maximum(values.max(axis=1, keepdims=True), np.finfo(float).tiny)
    root = np.sqrt(np.maximum(values, _FLOOR * largest))
    return np.asarray((vectors * root[:, None, :]) @ vectors.swapaxes(1, 2))


def second_moments(weights: LayerWeights, moment: np.ndarray, heads: int) -> np.ndarray:
    """E[v^T v] of each group of KV heads, float64 [groups, R, R]. moment: S = E[x^T x] [d, d]."""
    w = weights.w_v.reshape(weights.attention.d, -1, heads * weights.attention.head_dim)
    return np.asarray(np.einsum("dgi,de,egj->gij", w, moment, w, optimize=True))


def predictors(keys: np.ndarray, v: np.ndarray, groups: int) -> np.ndarray:
    """Return P with v ~ k P in each group of heads, float64 [groups, R, R]: ridge regression, with a larger penalty for
    fewer rows.

    Args:
        keys: as they read back from the cache, [n, e_k]. v: [n, e_v].
    """
    k, wanted = (rows.reshape(len(rows), groups, -1).astype(np.float64) for rows in (keys, v))
    n, width = len(k), k.shape[2]
    made = []
    for g in range(groups):
        gram = k[:, g].T @ k[:, g]
        ridge = np.trace(gram) / width * (_FLOOR + width / n**1.5)
        made.append(np.linalg.solve(gram + ridge * np.eye(width), k[:, g].T @ wanted[:, g]))
    return np.stack(made)


def factors(
    weights: LayerWeights, moments: np.ndarray, heads: int, *, weighed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices from v to its latent and back, for each group, float64 [groups, R, R].

    Args:
        moments: second moments of v (or of its difference from a prediction) in each group [groups, R, R]. heads: KV
            heads in a group; R is heads * head_dim.
        weighed: weight columns by W_O; else as TALE.

    Returns:
        (T, E): latent = v T and v = latent E for each group. All columns together are lossless. With `weighed` False,
        E[latent_i latent_j] = sigma_i if i = j, else 0.
    """
    a = weights.attention
    width = heads * a.head_dim
    made: list[tuple[np.ndarray, np.ndarray]] = []
    roots = metric(weights) if weighed else np.broadcast_to(np.eye(a.head_dim), (a.n_kv_heads, a.head_dim, a.head_dim))
    for group, of_group in enumerate(moments):
        root = np.zeros((width, width))
        for i in range(heads):
            at = slice(i * a.head_dim, (i + 1) * a.head_dim)
            root[at, at] = roots[group * heads + i]
        squares, u = np.linalg.eigh(root.T @ of_group @ root)
        squares, u = squares[::-1], u[:, ::-1]
        sigma = np.sqrt(np.maximum(squares, 0))
        sigma = np.maximum(sigma, _FLOOR * sigma[0]) if sigma[0] > 0 else np.ones(width)
        made.append((root @ u / np.sqrt(sigma), np.sqrt(sigma)[:, None] * np.linalg.solve(root.T, u).T))
    into, out = zip(*made, strict=True)
    return np.stack(into), np.stack(out)


@dataclass(frozen=True)
class ChannelPlane(Plane):
    """A plane whose quantised types have scales per channel of a block of tokens, not per token."""

    @property
    def bytes(self) -> int:
        if self.type in core.FLOAT_TYPES:
            return super().bytes
        bits = core.BITS[self.type]
        of_scale = core.plane_bytes(self.type, BLOCK, 1) - BLOCK * bits // 8
        return self.heads * -(-self.width // self.heads * bits // 8) + self.width * of_scale // BLOCK

    def round(self, rows: np.ndarray) -> NDArray[np.float32]:
        """Rows float32 [n, width] as they read back. Those of an incomplete last block are returned unrounded, as they
        are not quantised yet."""
        whole_blocks, out = len(rows) // BLOCK * BLOCK, np.array(rows, np.float32)
        if self.type in core.FLOAT_TYPES:
            return super().round(out)
        if whole_blocks:
            channels = out[:whole_blocks].reshape(-1, BLOCK, self.width).swapaxes(1, 2).reshape(-1, BLOCK)
            read = Plane(BLOCK, 1, self.type).round(channels).reshape(-1, self.width, BLOCK)
            out[:whole_blocks] = read.swapaxes(1, 2).reshape(whole_blocks, -1)
        return out


class LowRank:
    """The fold of a layer, for any levels: computes once what they have in common.

    Args:
        sample: the layer and its text.
        heads: KV heads that share a latent; None: the default.
        weighed: weight V's columns by W_O; else TALE's latent.
        predicts: the type of the stored K that predicts V; the latent is then that of the difference. None: the latent
            of V itself.

    Raises:
        CacheUnsupportedError: `heads` does not divide the number of KV heads.
    """

    def __init__(self, sample: Sample, *, heads: int | None = None, weighed: bool = True, predicts: str | None = None):
        a = sample.weights.attention
        self.sample, self.heads = sample, usual_heads(a.n_kv_heads) if heads is None else heads
        check_heads(a, self.heads)
        self.groups, self.width = a.n_kv_heads // self.heads, self.heads * a.head_dim
        self.tensors, self._predict = {}, None
        moments = second_moments(sample.weights, sample.moment, self.heads)
        if predicts is not None:
            plane = ChannelPlane(a.kv_width, a.n_kv_heads, predicts)
            keys = np.concatenate([stored_keys(window, plane) for window in sample.windows])
            self._predict = predictors(keys, sample.v, self.groups)
            left = (sample.v - self._predicted(keys)).reshape(len(keys), self.groups, -1).astype(np.float64)
            moments = np.einsum("ngi,ngj->gij", left, left, optimize=True) / len(keys)
            self.tensors["attn_v_predict.weight"] = self._by_head(self._predict)
        self.into, self.out = factors(sample.weights, moments, self.heads, weighed=weighed)
        self.tensors["attn_v_latent.weight"] = np.ascontiguousarray(
            self.into.swapaxes(1, 2).reshape(-1, self.width), np.float32
        )
        self.tensors["attn_v_expand.weight"] = self._by_head(self.out)
        self._noise: dict[tuple[Plane, Plane | None], np.ndarray] = {}
        self._parts: dict[tuple[Plane, Plane | None], float] = {}
        self._scores: dict[Plane, float] = {}

    def _by_head(self, matrices: np.ndarray) -> np.ndarray:
        """Matrices from a group's R columns to its V [groups, R, R], in the order of files: for each KV head its rows
        [head_dim, R]."""
        per_head = matrices.reshape(self.groups, self.width, self.heads, -1).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(per_head.reshape(-1, self.width), np.float32)

    def _predicted(self, keys: np.ndarray) -> np.ndarray:
        """V [n, e_v] as predicted from stored keys [n, e_k]."""
        assert self._predict is not None
        grouped = keys.reshape(len(keys), self.groups, -1).swapaxes(0, 1)
        return np.asarray((grouped @ self._predict.astype(np.float32)).swapaxes(0, 1).reshape(len(keys), -1))

    def told(self, window: Window, plane: Plane) -> np.ndarray | None:
        """V [n, e_v] as predicted from keys that this plane stores; None if V is not predicted."""
        return None if self._predict is None else self._predicted(stored_keys(window, plane))

    def planes(self, level: core.Level) -> list[Plane]:
        """The planes of a level: K, with scales per channel, and the first columns of the latent of V."""
        a, kept = self.sample.weights.attention, max(1, round(level.part * self.width))
        return [
            ChannelPlane(a.kv_width, a.n_kv_heads, level.type_k),
            Plane(self.groups * kept, self.groups, level.type_v),
        ]

    def long_bytes(self, levels: core.Levels) -> float:
        """Bytes per token of a long context: the mean over levels by their shares."""
        sizes = [bytes_per_token(self.planes(level)) if level.part else 0 for level in levels.of]
        return sum(share * size for share, size in zip(levels.shares, sizes, strict=True))

    def latents(self, v: np.ndarray) -> np.ndarray:
        """The latents of V [n, e_v], for each group, float32 [groups, n, R]."""
        grouped = v.reshape(len(v), self.groups, self.width).swapaxes(0, 1)
        return np.asarray(grouped @ self.into.astype(np.float32))

    def read_back(self, latents: np.ndarray, plane: Plane) -> np.ndarray:
        """V [n, e_v] from latents [groups, n, R] that are rounded by this plane."""
        n, kept = latents.shape[1], plane.width // self.groups
        stored = plane.round(latents[..., :kept].swapaxes(0, 1).reshape(n, -1)).reshape(n, self.groups, -1)
        values = stored.swapaxes(0, 1) @ self.out[:, :kept].astype(np.float32)
        return np.asarray(values.swapaxes(0, 1).reshape(n, -1))

    def read_values(self, window: Window, planes: list[Plane]) -> np.ndarray:
        """V [n, e_v] of a window as it reads back from these planes."""
        predicted = self.told(window, planes[0])
        kept = self.read_back(self.latents(window.v if predicted is None else window.v - predicted), planes[1])
        return kept if predicted is None else kept + predicted

    def value_noise(self, planes: list[Plane]) -> np.ndarray:
        """Mean squared error in each channel of V [e_v]."""
        if (key := self._key(planes)) not in self._noise:
            read = np.concatenate([self.read_values(window, planes) for window in self.sample.windows])
            self._noise[key] = np.asarray(np.square(read - self.sample.v, dtype=np.float64).mean(axis=0))
        return self._noise[key]

    def value_part(self, planes: list[Plane]) -> float:
        """The sum of squares over the sample of the error that value_noise causes in attention's output."""
        if (key := self._key(planes)) not in self._parts:
            variance = self.value_noise(planes)
            self._parts[key] = sum(window.from_values(variance, None) for window in self.sample.windows)
        return self._parts[key]

    def _key(self, planes: list[Plane]) -> tuple[Plane, Plane | None]:
        """What V reads back from: its latent's plane, and K's if that predicts V."""
        return planes[1], None if self._predict is None else planes[0]

    def key_noise(self, window: Window, plane: Plane) -> KeyNoise:
        squares = np.square(plane.round(window.k) - window.k, dtype=np.float64)
        return window.key_noise(squares + np.square(window.k) * noise.of_sum(self.sample.weights.attention.d))

    def score_error(self, plane: Plane) -> float:
        if plane not in self._scores:
            windows = self.sample.windows
            self._scores[plane] = sum(window.from_scores(self.key_noise(window, plane)) for window in windows)
        return self._scores[plane]

    def reader(self, levels: str) -> LowRankReader:
        """The Reader for these levels (core.levels)."""
        return LowRankReader(self, levels)


class LowRankReader(Reader):
    """Reads all rows as those of the oldest level that does not drop them."""

    mode = LATENT_MODE

    def __init__(self, fold: LowRank, levels: str):
        self.levels, self.fold = core.levels(self.mode, levels), fold
        super().__init__(fold.sample, self.levels.text)
        as_written = core.Level("f16", "f16", 1.0, 0.0)
        self.planes = fold.planes(next((level for level in self.levels.of if level.part), as_written))
        self.tensors = fold.tensors
        self.value_noise = fold.value_noise(self.planes)

    @property
    def long_bytes(self) -> float:
        return self.fold.long_bytes(self.levels)

    @property
    def value_part(self) -> float:
        return self.fold.value_part(self.planes)

    @property
    def score_error(self) -> float:
        return self.fold.score_error(self.planes[0])

    def key_noise(self, window: Window) -> KeyNoise:
        return self.fold.key_noise(window, self.planes[0])

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        return window.as_keys(self.planes[0].round(window.k)), self.fold.read_values(window, self.planes)


def stored_keys(window: Window, plane: Plane) -> np.ndarray:
    """Keys of a window before RoPE, rounded by this plane [n, e_k]."""
    return plane.round(window.unrotated(window.k))


def check_heads(attention: Attention, heads: int) -> None:
    """Raises CacheUnsupportedError unless `heads` divides the number of KV heads."""
    if heads < 1 or attention.n_kv_heads % heads:
        raise CacheUnsupportedError(
            f"{heads} KV heads are to share a latent, and a layer has {attention.n_kv_heads}: give a number that "
            "divides it"
        )
