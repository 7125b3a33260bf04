"""Chronos-Bolt: encodes patches of a series; one step of the decoder gives all quantiles of a whole horizon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.series import Positions, Values, positions_of, recent

_LEAST_SCALE = 1e-5  # used as the standard deviation of a constant series

Weights = NDArray[np.float32]


def standardised(context: Values, arcsinh: bool) -> tuple[Weights, tuple[np.float32, np.float32]]:
    """Values less their mean, divided by their standard deviation, perhaps through arcsinh; and the (mean, deviation).
    Missing values count for none of them. In float64, as in float32 the mean of a constant series is mostly not its
    value, and what is left of that, divided by itself, would be no 0."""
    exact = context.astype(np.float64)
    mean = np.nanmean(exact)
    deviation = np.float32(np.sqrt(np.nanmean(np.square(exact - mean)))) or np.float32(_LEAST_SCALE)
    mean = np.float32(mean)
    return scaled(context, (mean, deviation), arcsinh), (mean, deviation)


def scaled(values: Values, scales: tuple[np.float32, np.float32], arcsinh: bool) -> Weights:
    """Values in units of a (mean, deviation)."""
    found: Weights = (values - scales[0]) / scales[1]
    return np.arcsinh(found) if arcsinh else found


@dataclass(frozen=True)
class ResidualBlock:
    """relu(x W_h + b_h) W_o + b_o + x W_r + b_r; matrices are (outputs, inputs)."""

    hidden: Weights
    hidden_bias: Weights
    output: Weights
    output_bias: Weights
    residual: Weights
    residual_bias: Weights

    @classmethod
    def of(cls, read: Callable[[str], Weights], prefix: str) -> ResidualBlock:
        """From the tensors prefix.hidden.weight and so on, (outputs, inputs) and (1, outputs)."""
        parts = [f"{prefix}.{layer}" for layer in ("hidden", "output", "residual")]
        return cls(*(one for part in parts for one in (read(f"{part}.weight"), read(f"{part}.bias").ravel())))

    def __call__(self, x: Weights) -> Weights:
        """Maps (..., inputs) to (..., outputs)."""
        inner = np.maximum(x @ self.hidden.T + self.hidden_bias, 0)
        result: Weights = inner @ self.output.T + self.output_bias + x @ self.residual.T + self.residual_bias
        return result


@dataclass(frozen=True)
class Bolt:
    """A Chronos-Bolt model without its encoder and decoder.

    Attributes:
        context_length, prediction_length, patch_size, patch_stride: numbers of values.
        quantiles: levels that it was trained for.
        register: the [REG] embedding appended after the patches (d_model,), or None.
        arcsinh: whether arcsinh is applied to normalised values.
    """

    context_length: int
    prediction_length: int
    patch_size: int
    patch_stride: int
    quantiles: tuple[float, ...]
    arcsinh: bool
    register: Weights | None
    into: ResidualBlock
    out: ResidualBlock

    def patches(self, series: Values) -> tuple[Weights, Positions, tuple[float, float]]:
        """The encoder's input (rows, d_model) for the end of a series, its positions, and the (mean, deviation).

        The series is normalised and cut into patches, aligned to its end; each patch and the mask of its observed
        values go through the input block. Patches without any observed value are left out.

        Raises:
            ValueError: all values are missing.
        """
        context = recent(series, self.context_length)
        values, (mean, deviation) = standardised(context, self.arcsinh)
        padded = np.pad(values, (-len(values) % self.patch_size, 0), constant_values=np.nan)
        cut = np.lib.stride_tricks.sliding_window_view(padded, self.patch_size)[:: self.patch_stride]
        seen = ~np.isnan(cut)
        there: NDArray[np.bool_] = np.logical_or.reduce(seen, axis=1)
        cut, seen = cut[there], seen[there]
        rows = self.into(np.concatenate((np.where(seen, cut, 0), seen), axis=1).astype(np.float32))
        if self.register is not None:
            rows, there = np.concatenate((rows, self.register[None])), np.append(there, True)
        return np.ascontiguousarray(rows, np.float32), positions_of(there), (float(mean), float(deviation))

    def forecast(self, state: Weights, scales: tuple[float, float]) -> Weights:
        """Quantiles float32 (quantiles, prediction_length) from the decoder's hidden state (d_model,)."""
        values = self.out(state).reshape(len(self.quantiles), self.prediction_length)
        if self.arcsinh:
            values = np.sinh(values)
        result: Weights = values * np.float32(scales[1]) + np.float32(scales[0])
        return result

    def at_levels(self, forecast: Weights, levels: Sequence[float]) -> Weights:
        """A forecast (..., quantiles, horizon) at other levels: (..., horizon, q). Trained levels are taken as they
        are; others are interpolated linearly, and constant outside, assuming equally spaced levels (0.1 to 0.9)."""
        last = np.moveaxis(forecast, -2, -1)
        if set(levels) <= set(self.quantiles):
            return last[..., [self.quantiles.index(level) for level in levels]]
        ends = np.concatenate((last[..., :1], last, last[..., -1:]), axis=-1)
        return np.moveaxis(np.quantile(ends, levels, axis=-1), 0, -1).astype(np.float32)
