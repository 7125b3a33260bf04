# SPDX-License-Identifier: Apache-2.0
"""Mode lowrank in one layer: a latent of V whose first columns tell most of it (TALE; docs/cache-math.md, section 4).

TALE factors a group of KV heads by the singular values of W C, W the group's rows of W_V and C C^T the second moments
of the layer's input: W C = U Sigma Vt, latent = sqrt(Sigma) Vt C^-1 x, V = U sqrt(Sigma) latent. The same latent is
sqrt(Sigma)^-1 U^T v, and U and Sigma^2 are what the second moments of v itself consist of, so it is made of v, by a
small matrix whose condition is sqrt(Sigma)'s, and W_V stays what it is in whatever type it has.

What counts is not V but what W_O makes of it (`weighed`): with A = blockdiag_h(W_O,h^T W_O,h), U and Sigma are taken of
v A^(1/2) instead. The first r columns are then those that keep most of each head's part of the layer's output.
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
from slimrt.folding.attention import Attention, LayerWeights
from slimrt.folding.planes import Plane, bytes_per_token
from slimrt.folding.readback import Reader, Sample
from slimrt.folding.window import KeyNoise, Window
from slimrt.plumbing.arguments import real, whole

Number = TypeVar("Number", int, float)
LATENT_MODE = "lowrank"
BLOCK = 32  # tokens of a block, whose channels of K share scales
_FLOOR = 1e-6  # of the largest: what is smaller is as good as nothing
_TYPES = {2: "q2", 3: "q3", 4: "q4", 8: "q8", 16: "f16"}
LEVEL_TYPES = ("q2", "q3", "q4", "q8")  # that old rows may be given
PARTS = tuple(eighth / 8 for eighth in range(1, 9))  # of V's latent, the same
_NEWEST = 64  # rows of the newer level


def usual_heads(n_kv_heads: int) -> int:
    """KV heads that share a latent where nothing is said, as the core has it."""
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
    """Levels as the core reads them, from TALE's parameters, oldest level first; None: as usual.

    Args:
        rank: parts of V's latent that levels keep; those that are not given keep all.
        bits: of each level, 2, 3, 4, 8 or 16.
        share: of the rows that have aged, of each level but the oldest, or how many, in whole blocks; those that are
            not given have 0.1.
        sinks: rows at a text's beginning that stay as they are.
        predict: of V only what K does not tell is kept.

    Raises:
        ValueError, TypeError: numbers that do not go together, or are none.
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
    """Levels whose oldest rows have these types and this part of V's latent, and one newer level of all columns.

    The newest rows, which attention reads most, have the most bits: so few that a long context costs no more for them.
    In all layers as many, so that layers age together.

    Args:
        type_k, type_v: of `types`, which are code types by their bits.
        part: above 0, at most 1. predict: of V only what K does not tell is kept.
    """
    newest = max(types, key=core.BITS.__getitem__)
    return core.levels(LATENT_MODE, f"{type_k}/{type_v}@{part}+{newest}*{_NEWEST}{'+predict' * predict}")


def _several(name: str, given: Number | Sequence[Number], kind: Callable[[str, object], Number]) -> tuple[Number, ...]:
    return tuple(kind(name, one) for one in (given if isinstance(given, Sequence) else (given,)))


def metric(weights: LayerWeights) -> np.ndarray:
    """A^(1/2) of each KV head, float64 [n_kv_heads, head_dim, head_dim]: how much W_O makes of V's columns."""
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
    """Return P, v about k P in each group of heads, float64 [groups, R, R]: least squares, shrunk as so few rows ask.

    Args:
        keys: as they are stored, with the noise of their type, [n, e_k]. v: [n, e_v].
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
    """Return what makes the latent of v and v of the latent, group after group, float64 [groups, R, R].

    Args:
        moments: of v, or of what is to be kept of it, in each group [groups, R, R]. heads: KV heads in a group; R is
            their width together.
        weighed: by W_O; else TALE's.

    Returns:
        (T, E): latent = v T and v = latent E for each group; all columns together lose nothing, and with `weighed`
        False the latent's columns have E[latent_i latent_j] = sigma_i if i = j, else 0.
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
    """With scales of their own for each channel of a block of tokens, where its type has some."""

    @property
    def bytes(self) -> int:
        if self.type in core.FLOAT_TYPES:
            return super().bytes
        bits = core.BITS[self.type]
        of_scale = core.plane_bytes(self.type, BLOCK, 1) - BLOCK * bits // 8
        return self.heads * -(-self.width // self.heads * bits // 8) + self.width * of_scale // BLOCK

    def round(self, rows: np.ndarray) -> NDArray[np.float32]:
        """Rows of whole blocks; the last ones are still as they were written."""
        whole_blocks, out = len(rows) // BLOCK * BLOCK, np.array(rows, np.float32)
        if self.type in core.FLOAT_TYPES:
            return super().round(out)
        if whole_blocks:
            channels = out[:whole_blocks].reshape(-1, BLOCK, self.width).swapaxes(1, 2).reshape(-1, BLOCK)
            read = Plane(BLOCK, 1, self.type).round(channels).reshape(-1, self.width, BLOCK)
            out[:whole_blocks] = read.swapaxes(1, 2).reshape(whole_blocks, -1)
        return out


class LowRank:
    """A layer's latent, for every level: what levels share is computed once.

    Args:
        sample: the layer and its text.
        heads: KV heads that share a latent; None: as many as is usual.
        weighed: by W_O; else TALE's latent.
        predicts: the type of K that predicts V, so that the latent is of what it does not tell; None: of V.

    Raises:
        CacheUnsupportedError: the heads do not make whole groups.
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
        self._noise: dict[tuple[Plane, Plane | None], tuple[np.ndarray, float]] = {}
        self._scores: dict[Plane, float] = {}

    def _by_head(self, matrices: np.ndarray) -> np.ndarray:
        """What takes R columns of a group to its V [groups, R, R], KV head by KV head, as files have it."""
        per_head = matrices.reshape(self.groups, self.width, self.heads, -1).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(per_head.reshape(-1, self.width), np.float32)

    def _predicted(self, keys: np.ndarray) -> np.ndarray:
        """V [n, e_v] as stored keys [n, e_k] tell it."""
        assert self._predict is not None
        grouped = keys.reshape(len(keys), self.groups, -1).swapaxes(0, 1)
        return np.asarray((grouped @ self._predict.astype(np.float32)).swapaxes(0, 1).reshape(len(keys), -1))

    def told(self, window: Window, plane: Plane) -> np.ndarray | None:
        """V [n, e_v] as keys tell it that this plane stores; None: they are not asked."""
        return None if self._predict is None else self._predicted(stored_keys(window, plane))

    def planes(self, level: core.Level) -> list[Plane]:
        """K by channel, and of the latent the first columns."""
        a, kept = self.sample.weights.attention, max(1, round(level.part * self.width))
        return [
            ChannelPlane(a.kv_width, a.n_kv_heads, level.type_k),
            Plane(self.groups * kept, self.groups, level.type_v),
        ]

    def long_bytes(self, levels: core.Levels) -> float:
        """Bytes a token of a long context: of each level by its share."""
        oldest = 1 - sum(level.share for level in levels.of)
        shares = [oldest, *(level.share for level in levels.of[1:])]
        sizes = [bytes_per_token(self.planes(level)) if level.part else 0 for level in levels.of]
        return sum(share * size for share, size in zip(shares, sizes, strict=True))

    def latents(self, v: np.ndarray) -> np.ndarray:
        """Of V [n, e_v], group by group, float32 [groups, n, R]."""
        grouped = v.reshape(len(v), self.groups, self.width).swapaxes(0, 1)
        return np.asarray(grouped @ self.into.astype(np.float32))

    def read_back(self, latents: np.ndarray, plane: Plane) -> np.ndarray:
        """V [n, e_v] of latents [groups, n, R] as this plane stores them."""
        n, kept = latents.shape[1], plane.width // self.groups
        stored = plane.round(latents[..., :kept].swapaxes(0, 1).reshape(n, -1)).reshape(n, self.groups, -1)
        values = stored.swapaxes(0, 1) @ self.out[:, :kept].astype(np.float32)
        return np.asarray(values.swapaxes(0, 1).reshape(n, -1))

    def read_values(self, window: Window, planes: list[Plane]) -> np.ndarray:
        """V [n, e_v] of a window's rows as these planes store them."""
        told = self.told(window, planes[0])
        kept = self.read_back(self.latents(window.v if told is None else window.v - told), planes[1])
        return kept if told is None else kept + told

    def value_noise(self, planes: list[Plane]) -> tuple[np.ndarray, float]:
        """Variance in each channel of V [e_v], and what it does to attention's output over the sample."""
        key = planes[1], None if self._predict is None else planes[0]
        if key not in self._noise:
            windows = self.sample.windows
            read = np.concatenate([self.read_values(window, planes) for window in windows])
            variance = np.asarray(np.square(read - self.sample.v, dtype=np.float64).mean(axis=0))
            self._noise[key] = variance, sum(window.from_values(variance, None) for window in windows)
        return self._noise[key]

    def key_noise(self, window: Window, plane: Plane) -> KeyNoise:
        squares = np.square(plane.round(window.k) - window.k, dtype=np.float64)
        return window.key_noise(squares + np.square(window.k) * noise.of_sum(self.sample.weights.attention.d))

    def score_error(self, plane: Plane) -> float:
        if plane not in self._scores:
            windows = self.sample.windows
            self._scores[plane] = sum(window.from_scores(self.key_noise(window, plane)) for window in windows)
        return self._scores[plane]

    def reader(self, levels: str) -> LowRankReader:
        """The mode with these levels (core.levels)."""
        return LowRankReader(self, levels)


class LowRankReader(Reader):
    """Rows of the oldest level that keeps some."""

    mode = LATENT_MODE

    def __init__(self, fold: LowRank, levels: str):
        self.levels, self.fold = core.levels(self.mode, levels), fold
        super().__init__(fold.sample, self.levels.text)
        as_written = core.Level("f16", "f16", 1.0, 0.0)
        self.planes = fold.planes(next((level for level in self.levels.of if level.part), as_written))
        self.tensors = fold.tensors
        self.value_noise = fold.value_noise(self.planes)[0]

    @property
    def long_bytes(self) -> float:
        return self.fold.long_bytes(self.levels)

    @property
    def value_part(self) -> float:
        return self.fold.value_noise(self.planes)[1]

    @property
    def score_error(self) -> float:
        return self.fold.score_error(self.planes[0])

    def key_noise(self, window: Window) -> KeyNoise:
        return self.fold.key_noise(window, self.planes[0])

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        return window.as_keys(self.planes[0].round(window.k)), self.fold.read_values(window, self.planes)


def stored_keys(window: Window, plane: Plane) -> np.ndarray:
    """Keys of a window as this plane reads them back [n, e_k]: before rotation."""
    return plane.round(window.unrotated(window.k))


def check_heads(attention: Attention, heads: int) -> None:
    """Raises CacheUnsupportedError unless so many KV heads make whole groups."""
    if heads < 1 or attention.n_kv_heads % heads:
        raise CacheUnsupportedError(
            f"{heads} KV heads are to share a latent, and a layer has {attention.n_kv_heads}: give a number that "
            "divides it"
        )
