"""Chronos: a series as tokens, and sample paths of its future (Ansari et al. 2024, section 3)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.forecast.series import Positions, Values, check_reach, positions_of, recent
from slimrt.generation.search import Append, Encode, Engine, Logits, Task, follow, together

_OUTER_BOUNDARY = 1e20  # outer boundary of the first and the last bin


@dataclass(frozen=True)
class Chronos:
    """The parameters of a Chronos model: the fields of its chronos_config."""

    context_length: int
    prediction_length: int
    low_limit: float
    high_limit: float
    n_special_tokens: int
    n_tokens: int
    num_samples: int
    temperature: float
    top_k: int
    top_p: float
    use_eos_token: bool
    eos_token_id: int
    pad_token_id: int

    @property
    def centers(self) -> NDArray[np.float32]:
        """The centre of each bin, in units of the scale."""
        return np.linspace(self.low_limit, self.high_limit, self.n_tokens - self.n_special_tokens - 1, dtype=np.float32)

    def encode(self, series: Values) -> tuple[NDArray[np.int32], Positions, float]:
        """The tokens of the end of a series, their positions, and its scale: the mean absolute value, or 1 if it is 0.

        Missing values (NaN) have no token.

        Raises:
            ValueError: all values are missing.
        """
        context = recent(series, self.context_length)
        there = ~np.isnan(context)
        positions = positions_of(np.append(there, [True] * self.use_eos_token))
        values = context[there]
        scale = float(np.abs(values).mean(dtype=np.float32))
        scale = scale if scale > 0 else 1.0
        middles = (self.centers[1:] + self.centers[:-1]) / 2
        boundaries = np.concatenate(([-_OUTER_BOUNDARY], middles, [_OUTER_BOUNDARY])).astype(np.float32)
        bins = np.searchsorted(boundaries, values / np.float32(scale), side="right")
        tokens = np.clip(bins + self.n_special_tokens, 0, self.n_tokens - 1)
        tokens = np.append(tokens, [self.eos_token_id] * self.use_eos_token)
        return tokens.astype(np.int32), positions, scale

    def decode(self, tokens: NDArray[np.int64], scale: float) -> NDArray[np.float32]:
        """The values of tokens, of any shape."""
        centers = self.centers
        return centers[np.clip(tokens - self.n_special_tokens - 1, 0, len(centers) - 1)] * np.float32(scale)


@dataclass(frozen=True)
class Paths:
    """Draws sample paths of one series.

    Args:
        start: the decoder's first token. width: paths drawn at once.
        samples, temperature, top_k, top_p: number of paths, and how tokens are sampled.
        seed: each path gets a seed derived from it.
        index: of the series, for messages.
    """

    engine: Engine
    model: Chronos
    start: int
    width: int
    samples: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    index: int

    def draw(self, series: Values, horizon: int) -> Task[NDArray[np.float32]]:
        """Sample paths float32 (samples, horizon). Beyond the trained length the median of the paths is appended to the
        series, and new paths are drawn.

        Raises:
            ValueError: the median is too large to continue from.
        """
        seeds, blocks, left = random.Random(self.seed), list[NDArray[np.float32]](), horizon
        while left > 0:
            block = yield from self._block(series, min(left, self.model.prediction_length), seeds)
            blocks.append(block)
            left -= block.shape[1]
            middle = np.sort(block, axis=0)[(self.samples - 1) // 2]  # the lower median if their number is even
            if left > 0:
                check_reach(self.index, middle, horizon - left - len(middle) + 1)
            series = np.concatenate((series, middle))
        return np.concatenate(blocks, axis=1)

    def _block(self, series: Values, horizon: int, seeds: random.Random) -> Task[NDArray[np.float32]]:
        tokens, positions, scale = self.model.encode(series)
        root = self.engine.new_sequence()
        try:
            yield Encode(root, tokens, positions)
            paths: list[Sequence[int]] = []
            while len(paths) < self.samples:
                some = min(self.width, self.samples - len(paths))
                paths += yield from self._sample(root, [seeds.getrandbits(62) for _ in range(some)], horizon)
        finally:
            self.engine.free_sequence(root)
        return self.model.decode(np.array(paths, np.int64), scale)

    def _sample(self, root: int, seeds: Sequence[int], horizon: int) -> Task[list[Sequence[int]]]:
        forks: list[int] = []
        try:
            forks += [self.engine.fork(root) for _ in seeds]
            rows = yield Append([(fork, [self.start]) for fork in forks])
            found = yield from together(
                [
                    follow(fork, row, self._adjust, self._sampler(seed), frozenset(), horizon)
                    for fork, row, seed in zip(forks, rows, seeds, strict=True)
                ]
            )
        finally:
            for fork in forks:
                self.engine.free_sequence(fork)
        return [one.tokens for one in found]

    def _adjust(self, row: Logits, tokens: object) -> None:
        """The end never comes; and the temperature counts before top_k and top_p, as in transformers."""
        row[self.model.eos_token_id] = -np.inf
        if self.temperature not in (0.0, 1.0):
            row -= row.max()
            row /= np.clip(self.temperature, 1e-30, 1e30)  # what float32 holds

    def _sampler(self, seed: int) -> core.Sampler:
        return core.Sampler(
            temperature=float(self.temperature > 0), top_k=self.top_k, top_p=self.top_p, min_p=0.0, seed=seed
        )  # fmt: skip
