"""Forecasts of pandas DataFrames, like chronos-forecasting's predict_df (the extra `forecast`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import UnsupportedError
from slimrt.forecast.dates import read_dates
from slimrt.forecast.frequency import inferred
from slimrt.plumbing.notes import warn

if TYPE_CHECKING:
    import pandas as pd

Predict = Callable[[list[NDArray[np.float64]]], tuple[NDArray[np.float32], NDArray[np.float32]]]
_MIN_TIMESTAMPS = 3  # timestamps from which a frequency can be inferred


@dataclass(frozen=True)
class Columns:
    """Names of columns: a row's series, its time, and its value."""

    id: str
    timestamp: str
    target: str


def predict_frame(
    predict: Predict,
    df: pd.DataFrame,
    columns: Columns,
    levels: Sequence[float],
    freq: str | pd.DateOffset | None,
    together: bool,
) -> pd.DataFrame:
    """As Model.predict_df. predict: series -> quantiles (batch, horizon, q) and point forecasts (batch, horizon).
    together: the series are forecast together, and have to end at the same time."""
    pandas = _pandas()
    table = _checked(pandas, df, columns)
    series = {
        name: rows.sort_values(columns.timestamp, kind="stable")
        for name, rows in table.groupby(columns.id, sort=False, observed=True)
    }
    if together:
        _check_ends(series, columns.timestamp)
    offset = pandas.tseries.frequencies.to_offset(freq or _frequency(pandas, series, columns.timestamp))
    values = [rows[columns.target].to_numpy(np.float64, na_value=np.nan) for rows in series.values()]
    quantiles, points = predict(values)
    ends = pandas.concat([rows.tail(1) for rows in series.values()])
    result = pandas.DataFrame({columns.id: np.repeat(ends[columns.id].to_numpy(), points.shape[1])})
    result[columns.timestamp] = _future_timestamps(pandas, ends[columns.timestamp], offset, points.shape[1])
    result["target_name"] = columns.target
    result["predictions"] = points.ravel()
    for i, level in enumerate(levels):
        result[str(level)] = quantiles[..., i].ravel()
    return result


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UnsupportedError("DataFrames need pandas: pip install 'slimrt[forecast]'") from None
    return pandas


def _checked(pandas: Any, df: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """The three columns, with timestamps parsed. Errors as Model.predict_df."""
    if not isinstance(df, pandas.DataFrame):
        raise TypeError(
            f"predict_df takes a pandas DataFrame, got {type(df).__name__}; predict_quantiles takes numbers"
        )
    names = [columns.id, columns.timestamp, columns.target]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a column is one name, got {name!r}: predict_df forecasts one value a step")
        if name not in df.columns:
            raise ValueError(f"the DataFrame has no column '{name}'; there are {', '.join(map(str, df.columns))}")
        if list(df.columns).count(name) > 1:
            raise ValueError(f"the DataFrame has several columns '{name}': name each otherwise")
    table = df[names]
    if not len(table):
        raise ValueError("the DataFrame has no rows")
    types = pandas.api.types
    if not types.is_numeric_dtype(table[columns.target]) or types.is_complex_dtype(table[columns.target]):
        raise ValueError(f"column '{columns.target}' must be numbers, it is {table[columns.target].dtype}")
    for name in (columns.id, columns.timestamp):
        if table[name].isna().any():
            raise ValueError(f"column '{name}' is empty in {int(table[name].isna().sum())} rows, the first one "
                             f"{table.index[table[name].isna()][0]!r}")  # fmt: skip
    series = table.groupby(columns.id, sort=False, observed=True).indices.values()
    return table.assign(**{columns.timestamp: _timestamps(pandas, table[columns.timestamp], columns.timestamp, series)})


def _timestamps(pandas: Any, column: pd.Series[Any], name: str, series: Iterable[NDArray[np.intp]]) -> pd.Series[Any]:
    """A column of timestamps. Texts are parsed like those of CSV files, which refuses ambiguous ones. series: the
    indices of each series' rows."""
    if pandas.api.types.is_datetime64_any_dtype(column):
        return column
    if all(isinstance(cell, str) for cell in column):
        dates = read_dates(list(column), name, list(column.index), hint="pandas.to_datetime(..., format='{}')",
                           series=series)  # fmt: skip
        if dates is not None:
            times = pandas.DatetimeIndex(dates.utc).tz_localize(None if dates.offsets is None else "UTC")
            return pandas.Series(times, index=column.index)
    raise ValueError(f"column '{name}' is not of times, it is {column.dtype}: convert it with pandas.to_datetime")


def _check_ends(series: Mapping[Any, pd.DataFrame], column: str) -> None:
    """ValueError: series do not end at the same time."""
    ends = {name: rows[column].iloc[-1] for name, rows in series.items()}
    first = next(iter(ends))
    for name, end in ends.items():
        if end != ends[first]:
            raise ValueError(
                f"series {first!r} ends at {ends[first]}, series {name!r} at {end}: only series that end at the same "
                "time are forecast together, so leave out cross_learning"
            )


def warn_unread(df: pd.DataFrame, columns: Columns) -> None:
    """Warn of columns that chronos-forecasting reads as covariates of Chronos-2."""
    unread = [str(name) for name in df.columns if name not in (columns.id, columns.timestamp, columns.target)]
    if unread:
        warn(
            f"predict_df reads no covariates, and so not the columns {', '.join(unread)}: predict_quantiles takes them"
        )


def _future_timestamps(pandas: Any, last: pd.Series[Any], offset: Any, steps: int) -> Any:
    """The timestamps of the steps after each series, series by series."""
    ends = pandas.DatetimeIndex(last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pandas.errors.PerformanceWarning)  # adding business days is not vectorised
        future = [ends + step * offset for step in range(1, steps + 1)]
    by_series = np.arange(steps * len(ends)).reshape(steps, len(ends)).T.ravel()
    return future[0].append(future[1:])[by_series]


def _frequency(pandas: Any, series: Mapping[Any, pd.DataFrame], column: str) -> str:
    """The frequency of all series that are long enough. ValueError: one has none, or they differ."""
    found: dict[str, Any] = {}
    for name, rows in series.items():
        times = pandas.DatetimeIndex(rows[column])
        if times.has_duplicates:
            raise ValueError(f"series {name!r} has two rows at {times[times.duplicated()][0]}: one row a step")
        if len(times) >= _MIN_TIMESTAMPS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # its return type will change in pandas 4
                freq = pandas.infer_freq(times)
            if freq is None:
                raise ValueError(f"{_irregular(name, times)}; name it, as freq='D' or freq=pandas.DateOffset(months=1)")
            found.setdefault(getattr(freq, "freqstr", freq), name)
    if not found:
        raise ValueError(f"no series has {_MIN_TIMESTAMPS} rows, which would tell a frequency: name it, as freq='D'")
    if len(found) > 1:
        told = ", ".join(f"{freq} (series {name!r})" for freq, name in found.items())
        raise ValueError(f"series have different frequencies: {told}; forecast them apart from each other")
    return next(iter(found))


def _irregular(name: Any, times: pd.DatetimeIndex) -> str:
    """A message that names the first irregular step of a series."""
    moments = times.tz_localize(None).to_numpy("M8[us]")
    frequency = inferred(moments)
    assert frequency is not None  # there are at least three different timestamps
    odd = (np.diff(frequency.places(moments)) != 1) | ~frequency.fits(moments)[1:]
    at = int(odd.argmax())
    why = f"{times[at + 1]} follows {times[at]}, others are {frequency}" if odd.any() else f"{frequency} have no name"
    return f"series {name!r} has no frequency that pandas knows: {why}"
