# SPDX-License-Identifier: Apache-2.0
"""Mode lowrank in one layer: a latent of V whose first columns tell most of it (TALE; cache-math.md, section 4).

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
from slimrt.folding.planes import Plane
from slimrt.folding.readback import Reader, Sample
from slimrt.folding.window import KeyNoise, Window
from slimrt.plumbing.arguments import real, whole

Number = TypeVar("Number", int, float)
LATENT_MODE = "lowrank"
BLOCK = 32  # tokens of a block, whose channels of K share scales
_FLOOR = 1e-6  # of the largest: what is smaller is as good as nothing
_TYPES = {2: "q2", 3: "q3", 4: "q4", 8: "q8", 16: "f16"}


def usual_heads(n_kv_heads: int) -> int:
    """KV heads that share a latent where nothing is said, as the core has it."""
    shape = {"d_model": 1, "n_heads": n_kv_heads, "n_kv_heads": n_kv_heads, "head_dim": 1, "n_rot": 0, "qk_norm": False}
    mode = next(mode for mode in core.attention_modes(**shape) if mode.name == LATENT_MODE)
    return mode.folds[0].cols


def levels_text(
    rank: float | Sequence[float] | None = None,
    bits: int | Sequence[int] | None = None,
    share: float | Sequence[float] | None = None,
    sinks: int | None = None,
) -> str:
    """Levels as the core reads them, from TALE's parameters, oldest level first; None: as usual.

    Args:
        rank: parts of V's latent that levels keep; those that are not given keep all.
        bits: of each level, 2, 3, 4, 8 or 16.
        share: of the rows that have aged, of each level but the oldest, or how many, in whole blocks; those that are
            not given have 0.1.
        sinks: rows at a text's beginning that stay as they are.

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
    return core.levels(LATENT_MODE, "+".join([*parts, f"sinks={kept}"])).text


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


def factors(
    weights: LayerWeights, moment: np.ndarray, heads: int, *, weighed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return what makes the latent of v and v of the latent, group after group, float64 [groups, R, R].

    Args:
        moment: S = E[x^T x] [d, d]. heads: KV heads in a group; R is their width together.
        weighed: by W_O; else TALE's.

    Returns:
        (T, E): latent = v T and v = latent E for each group; all columns together lose nothing, and with `weighed`
        False the latent's columns have E[latent_i latent_j] = sigma_i if i = j, else 0.
    """
    a = weights.attention
    width = heads * a.head_dim
    made: list[tuple[np.ndarray, np.ndarray]] = []
    roots = metric(weights) if weighed else np.broadcast_to(np.eye(a.head_dim), (a.n_kv_heads, a.head_dim, a.head_dim))
    for first in range(0, a.n_kv_heads, heads):
        w = weights.w_v[:, first * a.head_dim : first * a.head_dim + width]
        root = np.zeros((width, width))
        for i in range(heads):
            at = slice(i * a.head_dim, (i + 1) * a.head_dim)
            root[at, at] = roots[first + i]
        squares, u = np.linalg.eigh(root.T @ (w.T @ moment @ w) @ root)
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


class LowRankReader(Reader):
    """Rows of the oldest level that keeps some: K by channel, and of V's latent the first columns."""

    mode = LATENT_MODE

    def __init__(self, sample: Sample, type_name: str, *, heads: int | None = None, weighed: bool = True):
        a = sample.weights.attention
        self.levels = core.levels(self.mode, type_name)
        super().__init__(sample, self.levels.text)
        self.heads = usual_heads(a.n_kv_heads) if heads is None else heads
        check_heads(a, self.heads)
        self.into, self.out = factors(sample.weights, sample.moment, self.heads, weighed=weighed)
        groups, width = self.into.shape[:2]
        per_head = self.out.reshape(groups, width, self.heads, a.head_dim).transpose(0, 2, 3, 1)
        self.tensors = {
            "attn_v_latent.weight": np.ascontiguousarray(self.into.swapaxes(1, 2).reshape(-1, width), np.float32),
            "attn_v_expand.weight": np.ascontiguousarray(per_head.reshape(-1, width), np.float32),
        }
        oldest = next((level for level in self.levels.of if level.part), core.Level("f16", "f16", 1.0, 0.0))
        self.kept = max(1, round(oldest.part * width))
        self.planes = [
            ChannelPlane(a.kv_width, a.n_kv_heads, oldest.type_k),
            Plane(groups * self.kept, groups, oldest.type_v),
        ]
        self.value_noise = np.asarray(np.square(self._values(sample.v) - sample.v, dtype=np.float64).mean(axis=0))

    def _values(self, v: np.ndarray) -> np.ndarray:
        groups, width = self.into.shape[:2]
        latent = np.einsum("ngi,gij->ngj", v.reshape(len(v), groups, width), self.into.astype(np.float32))
        stored = self.planes[1].round(latent[..., : self.kept].reshape(len(v), -1)).reshape(len(v), groups, -1)
        return np.asarray(
            np.einsum("ngi,gij->ngj", stored, self.out[:, : self.kept].astype(np.float32)).reshape(v.shape)
        )

    def key_noise(self, window: Window) -> KeyNoise:
        squares = np.square(self.planes[0].round(window.k) - window.k, dtype=np.float64)
        return window.key_noise(squares + np.square(window.k) * noise.of_sum(self.sample.weights.attention.d))

    def read(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        return window.as_keys(self.planes[0].round(window.k)), self._values(window.v)


def check_heads(attention: Attention, heads: int) -> None:
    """Raises CacheUnsupportedError unless so many KV heads make whole groups."""
    if heads < 1 or attention.n_kv_heads % heads:
        raise CacheUnsupportedError(
            f"{heads} KV heads are to share a latent, and a layer has {attention.n_kv_heads}: give a number that "
            "divides it"
        )
