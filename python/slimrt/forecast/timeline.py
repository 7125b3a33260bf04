"""Series in the order of their dates, a value a step: what is turned or filled is said, what is broken refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.dates import Dates, Form, Moments, written
from slimrt.forecast.frequency import Frequency, Places, inferred, named

Tell = Callable[[str], None]
_SHOWN = 3
_NO_DATES = "--date-column none takes the rows as they follow each other"
_FIRST, _LAST = np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999", "us")  # datetime's own


@dataclass(frozen=True)
class Timeline:
    """When the steps of a series are.

    Attributes:
        frequency: whose first step is the series' first. n: steps of the series.
        offset: of its last row, from UTC; None: not told. in_utc: the frequency counts UTC.
        form: how dates are written.
    """

    frequency: Frequency
    n: int
    offset: np.timedelta64 | None
    in_utc: bool
    form: Form

    def wall(self, start: int, stop: int) -> Moments:
        """Steps start to stop, as clocks show them: datetime64[us]. ValueError: beyond the year 9999."""
        moments = self.frequency.moments(np.arange(start, stop))
        if self.in_utc and self.offset is not None:
            moments = moments + self.offset
        if ((moments < _FIRST) | (moments > _LAST)).any():  # below the first: beyond what 64 bits hold
            raise ValueError(
                f"the forecast goes beyond the year 9999, where dates end: give a smaller --horizon; {_NO_DATES}"
            )
        return moments

    def future(self, horizon: int) -> list[str]:
        """The steps that follow the series, as the table writes dates. ValueError: beyond the year 9999."""
        return written(self.wall(self.n, self.n + horizon), self.form, self.offset)

    def past(self, count: int) -> Moments:
        """Its last steps, as clocks show them."""
        return self.wall(max(self.n - count, 0), self.n)


@dataclass(frozen=True)
class Rows:
    """A series as a table has it: values float64 (n,), NaN where missing; dates; numbers of its rows."""

    values: NDArray[np.float64]
    dates: Dates
    rows: NDArray[np.intp]

    def __getitem__(self, order: NDArray[np.intp]) -> Rows:
        return Rows(self.values[order], self.dates[order], self.rows[order])

    def named(self, where: NDArray[np.intp]) -> str:
        """ "row 3 (2020-01-02)" of the first of these, and how many more there are."""
        dates = written(self.dates.wall[where[:_SHOWN]], self.dates.form)
        shown = ", ".join(f"row {row} ({date})" for row, date in zip(self.rows[where], dates, strict=False))
        return shown + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")


class Notes:
    """What was done to series, said once for each kind of thing, by the first it was done to."""

    def __init__(self, n_series: int):
        self.n_series = n_series
        self._said: dict[str, list[str]] = {}

    def add(self, kind: str, series: str, sentence: str) -> None:
        self._said.setdefault(kind, []).append(self.where(series) + sentence)

    def where(self, series: str) -> str:
        return f"series {series}: " if self.n_series > 1 else ""

    def tell(self, tell: Tell) -> None:
        for sentences in self._said.values():
            more = f" (the like in {len(sentences)} of {self.n_series} series)" if len(sentences) > 1 else ""
            tell(sentences[0] + more)


def arranged(
    tables: Mapping[str, Rows], freq: str | None, tell: Tell
) -> dict[str, tuple[NDArray[np.float64], Timeline]]:
    """Values float64 (n,) a step, oldest first, NaN where there is none, and the steps of each series.

    Args:
        freq: a frequency that is insisted on: a row then counts for the step that it falls in. None: found in the
            dates, which must all begin a step.
        tell: is told what was turned, sorted, filled or moved.

    Raises:
        ValueError: two rows of a series in one step, dates without a frequency, or most steps missing.
    """
    notes = Notes(len(tables))
    ordered = {name: _in_order(name, rows, notes) for name, rows in tables.items()}
    longest = max(ordered.values(), key=lambda rows: len(rows.values))
    known = _steps(longest.dates, freq, enough=2)  # of short series too
    if known is None:
        same = f", and {len(longest.values)} rows have it" if len(longest.values) > 1 else ""
        raise ValueError(f"1 date tells no frequency{same}: name it, as with --freq D; {_NO_DATES}")
    result = {}
    for name, rows in ordered.items():
        steps = _steps(rows.dates, freq, enough=3) or known.starting(rows.dates)
        result[name] = _placed(name, rows, steps, freq is not None, notes)
    notes.tell(tell)
    return result


def _in_order(name: str, rows: Rows, notes: Notes) -> Rows:
    utc = rows.dates.utc
    backwards = np.diff(utc) < np.timedelta64(0)
    if backwards.any():
        newest_first = bool((np.diff(utc) <= np.timedelta64(0)).all())
        how = (
            "the newest row comes first: turned" if newest_first else "rows are not in the order of their dates: sorted"
        )
        notes.add("order", name, f"{how}, oldest first")
    return rows[np.argsort(utc, kind="stable")]


@dataclass(frozen=True)
class _Steps:
    """A frequency. in_utc: it counts UTC, not what clocks show."""

    frequency: Frequency
    in_utc: bool

    def of(self, dates: Dates) -> Moments:
        """The dates that it counts."""
        return dates.utc if self.in_utc else dates.wall

    def starting(self, dates: Dates) -> _Steps:
        return _Steps(self.frequency.starting(self.of(dates)[0]), self.in_utc and dates.offsets is not None)


def _steps(dates: Dates, freq: str | None, enough: int) -> _Steps | None:
    """The steps of dates; None: fewer dates than are enough to tell. Those within days count UTC, since clocks are
    changed; others follow the calendar as it is written."""

    def found(moments: Moments) -> Frequency | None:
        return named(freq, moments) if freq is not None else inferred(np.unique(moments), enough)

    by_clock, by_utc = found(dates.wall), found(dates.utc)
    if by_clock is None or by_utc is None:
        return None
    as_well = by_utc.fits(dates.utc).mean() >= by_clock.fits(dates.wall).mean()
    if dates.offsets is not None and by_utc.within_days and as_well:
        return _Steps(by_utc, True)
    return _Steps(by_clock, False)


def _placed(name: str, rows: Rows, steps: _Steps, insisted: bool, notes: Notes) -> tuple[NDArray[np.float64], Timeline]:
    """A series whose rows are in order, a value a step."""
    moments, frequency, in_utc = steps.of(rows.dates), steps.frequency, steps.in_utc
    where = notes.where(name)
    same = np.flatnonzero(np.diff(moments) == np.timedelta64(0))
    if len(same):
        hint = ", or write offsets from UTC where clocks are set back" if frequency.within_days and not in_utc else ""
        raise ValueError(
            f"{where}{rows.named(same + 1)} has the date of another row; if rows are of several series, tell them "
            f"apart with --id{hint}; {_NO_DATES}"
        )
    if len(off := np.flatnonzero(~frequency.fits(moments))):
        if not insisted:
            raise ValueError(
                f"{where}{rows.named(off)} is not at a step of the others ({frequency}): --freq names one, and a row "
                f"counts for the step that it falls in; {_NO_DATES}"
            )
        notes.add(
            "moved", name, f"not the begin of a step ({frequency}), and counted for the one it is in: {rows.named(off)}"
        )
    places = frequency.places(moments)
    if len(same := np.flatnonzero(np.diff(places) == 0)):
        raise ValueError(f"{where}{rows.named(same + 1)} falls in the same step as the row before ({frequency})")
    frequency = frequency.starting(frequency.moments(places[:1])[0])
    places -= places[0]
    _tell_of_gaps(name, rows, places, frequency, notes)
    values = np.full(places[-1] + 1, np.nan)
    values[places] = rows.values
    offsets = rows.dates.offsets
    if offsets is not None and (offsets != offsets[-1]).any():
        notes.add("offset", name, "the offset from UTC changes; the forecast is written with that of the last row")
    return values, Timeline(frequency, len(values), None if offsets is None else offsets[-1], in_utc, rows.dates.form)


def _tell_of_gaps(name: str, rows: Rows, places: Places, frequency: Frequency, notes: Notes) -> None:
    """ValueError where more steps are missing than there are."""
    n, missing = int(places[-1]) + 1, int(places[-1]) + 1 - len(places)
    behind = rows.named(np.flatnonzero(np.diff(places) > 1))
    if missing > len(places):
        raise ValueError(
            f"{notes.where(name)}{missing} of {n} {frequency} are missing, behind {behind}: name the step with --freq; "
            f"{_NO_DATES}"
        )
    if missing:
        notes.add("gaps", name, f"{missing} of {n} {frequency} are missing, behind {behind}: taken as missing values")
