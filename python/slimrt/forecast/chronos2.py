"""Chronos-2: encodes patches of the past and of the future of a group of series, which gives all quantiles at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.bolt import ResidualBlock, Weights, scaled, standardised
from slimrt.forecast.series import Values, recent
from slimrt.generation.search import Encode, Task

if TYPE_CHECKING:
    from slimrt.generation.sequences import Sequences

BRANCHES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The quantiles that longer forecasts go on from."""

Scales = tuple[np.float32, np.float32]  # (mean, standard deviation)


@dataclass(frozen=True)
class Group:
    """Series that are read together, each of which informs the forecasts of the others. Their last values are of one
    time.

    Attributes:
        past: the values (n,) of each series: first of the targets, then of covariates.
        ahead: what is known of each after that (steps,); NaN: it is not known.
        n_targets: how many of them are forecast.
    """

    past: tuple[Values, ...]
    ahead: tuple[Values, ...]
    n_targets: int

    def after(self, forecast: Weights, most: int) -> Group:
        """The same some steps later: with the last `most` values of each series, after a forecast float32 (series,
        steps), or what is known in its place."""
        steps = forecast.shape[1]
        past = []
        for values, known, block in zip(self.past, self.ahead, forecast, strict=True):
            there = np.pad(known[:steps], (0, max(steps - len(known), 0)), constant_values=np.nan)
            past.append(np.concatenate((values, np.where(np.isnan(there), block, there)))[-most:].astype(np.float32))
        return replace(self, past=tuple(past), ahead=tuple(known[steps:] for known in self.ahead))


@dataclass(frozen=True)
class Chronos2:
    """A Chronos-2 model without its encoder.

    Attributes:
        context_length, patch_size: numbers of values. most_patches: of one forecast.
        time_scale: steps that are one unit of the time that patches are given with.
        quantiles: levels that it was trained for.
        arcsinh: whether arcsinh is applied to normalised values.
        register: the [REG] embedding between past and future (d_model,).
    """

    context_length: int
    patch_size: int
    most_patches: int
    time_scale: int
    quantiles: tuple[float, ...]
    arcsinh: bool
    register: Weights
    into: ResidualBlock
    out: ResidualBlock

    @property
    def prediction_length(self) -> int:
        """Steps of one forecast."""
        return self.most_patches * self.patch_size

    @property
    def most_rows(self) -> int:
        """The most rows of one series."""
        return -(-self.context_length // self.patch_size) + 1 + self.most_patches

    def patches(self, horizon: int) -> int:
        """Patches of one forecast towards a horizon; on their number the quantiles depend."""
        return min(-(-horizon // self.patch_size), self.most_patches)

    def n_rows(self, group: Group, horizon: int) -> int:
        """The most rows that encode() gives for a group on the way to a horizon."""
        more = horizon if horizon > self.prediction_length else 0  # of its own forecasts
        ends = [min(len(values) + more, self.context_length) for values in group.past]
        return sum(-(-end // self.patch_size) + 1 + self.patches(horizon) for end in ends)

    def encode(self, group: Group, n_patches: int) -> tuple[Weights, NDArray[np.int32], list[Scales]]:
        """The encoder's input (rows, d_model) for a group and so many patches ahead, the rows' positions, which start
        again with each series, and each series' (mean, deviation).

        A series is normalised and cut into patches, aligned to its end. Times, values and the mask of observed values
        of a patch go through the input block. Patches of the past without any observed value are left out.

        Raises:
            ValueError: all values of a series are missing.
        """
        contexts = [recent(values, self.context_length) for values in group.past]
        size, n_past = self.patch_size, max(-(-len(context) // self.patch_size) for context in contexts)
        times = np.arange(-n_past * size, n_patches * size, dtype=np.float32).reshape(-1, size)
        times = np.insert(times, n_past, 0, axis=0) / np.float32(self.time_scale)  # a row in the place of [REG]
        features, positions, scales = [], [], []
        for context, known in zip(contexts, group.ahead, strict=True):
            values, own = standardised(context, self.arcsinh)
            whole = np.full((n_past + 1 + n_patches, size), np.nan, np.float32)
            before, after = whole[:n_past].reshape(-1), whole[n_past + 1 :].reshape(-1)
            before[len(before) - len(values) :] = values
            known = known[: len(after)]
            after[: len(known)] = scaled(known, own, self.arcsinh)
            seen = ~np.isnan(whole)
            there: NDArray[np.bool_] = np.logical_or.reduce(seen, axis=1)
            there[n_past:] = True
            features.append(np.concatenate((times, np.where(seen, whole, 0), seen), axis=1)[there])
            positions.append(np.flatnonzero(there))
            scales.append(own)
        at = np.concatenate(positions).astype(np.int32)
        rows = self.into(np.concatenate(features).astype(np.float32))
        rows[at == n_past] = self.register
        return np.ascontiguousarray(rows, np.float32), at, scales

    def forecast(
        self, states: Weights, positions: NDArray[np.int32], scales: Sequence[Scales], n_patches: int
    ) -> Weights:
        """Quantiles float32 (series, quantiles, n_patches * patch_size), of the encoder's output for these rows."""
        n_series = len(scales)
        ahead = states[positions > positions[-1] - n_patches]
        patches = self.out(ahead).reshape(n_series, n_patches, len(self.quantiles), self.patch_size)
        values = patches.swapaxes(1, 2).reshape(n_series, len(self.quantiles), -1)
        if self.arcsinh:
            values = np.sinh(values)
        mean, deviation = np.array(scales, np.float32).T[:, :, None, None]
        result: Weights = values * deviation + mean
        return result

    def at_levels(self, forecast: Weights, levels: Sequence[float]) -> Weights:
        """A forecast (..., quantiles, horizon) at other levels: (..., horizon, q). Between the trained ones it is
        interpolated linearly, and constant outside."""
        order = np.argsort(self.quantiles)
        trained = np.array(self.quantiles)[order]
        shares = np.stack([np.interp(levels, trained, one) for one in np.eye(len(trained))])
        found = np.moveaxis(forecast, -2, -1)[..., order].astype(np.float64) @ shares
        return found.astype(np.float32)

    def mixed(self, forecasts: Weights) -> Weights:
        """The quantiles float32 (series, quantiles, steps) over forecasts (branches, series, quantiles, steps) that go
        on from BRANCHES: each branch, and each of its quantiles, stands for the probability around its level."""
        weights = np.outer(_shares(BRANCHES), _shares(self.quantiles)).ravel()
        values = np.moveaxis(forecasts, 0, 1)
        n_series, steps = values.shape[0], values.shape[-1]
        rows = np.moveaxis(values.reshape(n_series, len(weights), steps), 1, 2).reshape(-1, len(weights))
        order = np.argsort(rows, axis=1, kind="stable")
        rows, heights = np.take_along_axis(rows, order, axis=1), np.cumsum(weights[order], axis=1)
        found = np.array([np.interp(self.quantiles, below, row) for below, row in zip(heights, rows, strict=True)])
        return found.reshape(n_series, steps, -1).swapaxes(1, 2).astype(np.float32)


def _shares(levels: Sequence[float]) -> NDArray[np.float64]:
    """The probability that each of some ascending levels stands for: up to half way to its neighbours."""
    ends = np.array([0.0, *levels, 1.0])
    between = (ends[2:] - ends[:-2]) / 2
    shares: NDArray[np.float64] = between / between.sum()
    return shares


def quantiles(engine: Sequences, model: Chronos2, group: Group, n_patches: int) -> Task[Weights]:
    """Quantiles float32 (series, quantiles, n_patches * patch_size) for a group."""
    rows, positions, scales = model.encode(group, n_patches)
    sequence = engine.new_sequence()
    try:
        states = yield Encode(sequence, rows, positions, states=True)
    finally:
        engine.free_sequence(sequence)
    return model.forecast(states, positions, scales, n_patches)
