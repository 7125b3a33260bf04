"""Plots of forecasts: a series, the median of its forecast, and quantile bands."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.table import Read, Series
from slimrt.measure.plots import check_plot, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 24  # series in a plot
_HORIZONS, _LEAST = 4, 24  # history shown: this many horizons, and at least this many steps
_PAST, _FUTURE = "0.3", "C0"


def plot_forecast(
    read: Read,
    quantiles: NDArray[np.float32],
    levels: Sequence[float],
    title: str,
    target: str | os.PathLike[str],
) -> str:
    """Plot series and their forecasts, each in axes of its own: a line for the middle level, bands between the others.

    Args:
        read: the series; those with dates are drawn over them.
        quantiles: (batch, horizon, q). levels: their q levels.

    Returns:
        A sentence about series that were left out; "" if there are none.

    Errors as check_plot.
    """
    check_plot(target)
    names = list(read.series)[:_MOST]
    columns = 1 if len(names) <= 3 else 2 if len(names) <= 8 else 3
    rows = math.ceil(len(names) / columns)
    size = (8, 4.5) if len(names) == 1 else (4 + 3 * columns, 1.2 + 1.9 * rows)
    figure = new_figure(size)
    all_axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes, name, found in zip(all_axes, names, quantiles, strict=False):
        _draw(axes, read.series[name], found, levels)
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
        if len(names) > 1:
            axes.set_title(name, loc="left", fontsize=9)
    for i, axes in enumerate(all_axes):
        if i >= len(names):
            axes.remove()
        elif i + columns >= len(names):
            axes.xaxis.set_tick_params(labelbottom=True)
            axes.set_xlabel(read.dated or "step")
    if read.value:
        figure.supylabel(read.value, fontsize=10)
    figure.suptitle(title, fontsize=11)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    save(figure, target)
    left = len(read.series) - len(names)
    return f"the first {_MOST} of {len(read.series)} series are drawn" if left else ""


def _draw(axes: Axes, series: Series, rows: NDArray[np.float32], levels: Sequence[float]) -> None:
    """Draw one series; the forecast is connected to its last value."""
    horizon, n = len(rows), len(series.values)
    start = max(n - max(_HORIZONS * horizon, _LEAST), 0)
    values = series.values[start:]
    x = _times(series, start, n + horizon)
    axes.plot(x[: len(values)], values, color=_PAST, linewidth=1.2, label="history")
    last = np.flatnonzero(~np.isnan(values))[-1:]
    then = np.concatenate((x[last], x[len(values) :]))
    rows = np.concatenate((np.repeat(values[last][:, None], len(levels), axis=1), rows))
    order = np.argsort(levels)
    for i, (low, high) in enumerate(zip(order, order[::-1], strict=True)):
        if levels[low] < levels[high]:
            axes.fill_between(
                then, rows[:, low], rows[:, high], color=_FUTURE, alpha=0.15 + 0.1 * i, linewidth=0,
                label=_band(levels[low], levels[high]),
            )  # fmt: skip
    middle = order[len(order) // 2]
    axes.plot(then, rows[:, middle], color=_FUTURE, label=_line(levels[middle]))


def _times(series: Series, start: int, stop: int) -> NDArray[Any]:
    if series.timeline is not None:
        return series.timeline.wall(start, stop)
    return np.arange(start, stop) + 1


def _line(level: float) -> str:
    return "median" if level == 0.5 else f"quantile {level:g}"


def _band(low: float, high: float) -> str:
    """ "80 %" for the symmetric band 0.1 to 0.9; else the levels."""
    if math.isclose(low, 1 - high):
        return f"{100 * (high - low):.6g} %"
    return f"{low:g} to {high:g}"
