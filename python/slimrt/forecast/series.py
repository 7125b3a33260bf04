"""Conversion of time series to the models' input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Positions = NDArray[np.int32] | None
_LARGEST = 1e17  # so that sums of squares of thousands of values stay below float32's maximum of 3e38


def as_series(series: Any) -> list[Values]:
    """Convert series to float32 (n,), each without missing values (NaN) at its start.

    Args:
        series: as rows_of().

    Raises:
        ValueError: as numbers(), or all missing.
        TypeError: not numbers.
    """
    return [_one(row, i) for i, row in enumerate(rows_of(series))]


def rows_of(series: Any) -> Sequence[Any]:
    """The rows of series, as they are.

    Args:
        series: numbers (n,): one series; (batch, n), or a sequence of (n,) of any lengths: several. Anything that NumPy
            converts to an array of numbers: lists, arrays (masked values are missing), pandas Series. Each column of a
            pandas DataFrame is a series.

    Raises:
        ValueError: there is none. TypeError: a number, or dicts.
    """
    if hasattr(series, "columns"):
        series = [series[name] for name in series.columns]
    if isinstance(series, dict) or (isinstance(series, (list, tuple)) and any(isinstance(one, dict) for one in series)):
        raise TypeError(
            "a series is numbers (n,), not a dict: several targets and covariates are for Chronos-2; Chronos and "
            "Chronos-Bolt read the series alone"
        )
    several = isinstance(series, (list, tuple)) and len(series) > 0 and np.ndim(series[0]) == 1
    rows: Any = series if several else np.asanyarray(series)
    if not several and rows.ndim == 0:
        raise TypeError(f"a series is numbers (n,), and several a list of these, got {series!r:.60}")
    if not several and rows.ndim == 1:
        rows = [rows]
    if len(rows) == 0:
        raise ValueError("no series to forecast")
    found: Sequence[Any] = rows
    return found


def _one(row: Any, index: int) -> Values:
    values = numbers(row, f"series {index}")
    if np.isnan(values).all():
        raise ValueError(f"series {index} has no values" + (": all are missing" if len(values) else ""))
    return recent(values, len(values))


def numbers(row: Any, name: str) -> Values:
    """Convert numbers to float32 (n,), NaN where they are missing.

    Args:
        name: of them, for messages.

    Raises:
        ValueError: of a wrong shape, infinite, or too large for float32. TypeError: not numbers.
    """
    try:
        given = np.asanyarray(row)
        if given.dtype.kind in "cmM":  # NumPy would drop imaginary parts, and convert dates to numbers
            raise TypeError
        exact = np.asarray(np.ma.filled(given.astype(np.float64), np.nan))
    except (TypeError, ValueError):
        raise TypeError(f"{name} is not numbers: {row!r:.60}") from None
    except OverflowError:
        raise ValueError(f"{name} has a number that is too large for a float: divide it by something first") from None
    if exact.ndim != 1:
        raise ValueError(f"a series has shape (n,), several (batch, n); {name} has shape {exact.shape}")
    if np.isinf(exact).any():
        raise ValueError(f"{name} has infinite values")
    largest = float(np.nanmax(np.abs(exact), initial=0))
    if largest > _LARGEST:
        raise ValueError(f"{name} reaches {largest:.3g}, more than {_LARGEST:g}: divide it by something first")
    return exact.astype(np.float32)


def check_reach(index: int, forecast: NDArray[np.float32], first: int, largest: float = _LARGEST) -> None:
    """ValueError: values of a forecast exceed `largest`, or are NaN.

    Args:
        index: of the series, for the message. forecast: (..., steps). first: number of the first step.
    """
    steps = (np.abs(forecast) <= largest).reshape(-1, forecast.shape[-1]).all(axis=0)
    if not steps.all():
        raise ValueError(
            f"series {index}: at step {first + int(steps.argmin())} the forecast leaves what it can go on from, "
            f"numbers up to {largest:g}: give a shorter prediction_length (--horizon), or divide it by something first"
        )


def recent(series: Values, count: int) -> Values:
    """The last `count` values, without missing ones at their start, which change nothing: positions are relative.

    Raises:
        ValueError: all of them are missing.
    """
    context = series[-count:]
    observed = ~np.isnan(context)
    if not observed.any():
        raise ValueError(f"the last {count} values of a series are all missing (NaN)")
    return context[observed.argmax() :]


def positions_of(there: NDArray[np.bool_]) -> Positions:
    """The indices of the rows that exist, among all (n,), int32; None if none is missing.

    An encoder that reads only these rows, at their positions, gives the same as one that reads all and masks others.
    """
    return None if there.all() else np.flatnonzero(there).astype(np.int32)


def check_levels(levels: Sequence[float]) -> NDArray[np.float64]:
    """Quantile levels as float64 (q,). ValueError: none, or one outside [0, 1]."""
    try:
        array = np.asarray(levels, np.float64)
    except OverflowError:  # larger than any float
        array = np.array([np.inf])
    if array.ndim != 1 or not len(array) or not ((array >= 0) & (array <= 1)).all():
        raise ValueError(f"quantile_levels are numbers from 0 to 1, got {levels!r}")
    return array
