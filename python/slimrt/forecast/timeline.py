"""Regular series from dated rows: rows are sorted and gaps filled, with a note; irregular dates are refused."""

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
_FIRST, _LAST = np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999", "us")  # datetime's range


@dataclass(frozen=True)
class Timeline:
    """The times of a series' steps.

    Attributes:
        frequency: its first step is that of the series. n: steps of the series.
        offset: of the last row, from UTC; None: unknown. in_utc: the frequency is regular in UTC, not in local time.
        form: format of the dates.
    """

    frequency: Frequency
    n: int
    offset: np.timedelta64 | None
    in_utc: bool
    form: Form

    def wall(self, start: int, stop: int) -> Moments:
        """Local times of steps start to stop: datetime64[us]. ValueError: beyond the year 9999."""
        moments = self.frequency.moments(np.arange(start, stop))
        if self.in_utc and self.offset is not None:
            moments = moments + self.offset
        if ((moments < _FIRST) | (moments > _LAST)).any():  # < _FIRST: 64-bit overflow
            raise ValueError(
                f"the forecast goes beyond the year 9999, where dates end: give a smaller --horizon; {_NO_DATES}"
            )
        return moments

    def future(self, horizon: int) -> list[str]:
        """The dates of the steps after the series, in the table's format. ValueError: beyond the year 9999."""
        return written(self.wall(self.n, self.n + horizon), self.form, self.offset)

    def past(self, count: int) -> Moments:
        """Local times of its last steps."""
        return self.wall(max(self.n - count, 0), self.n)


@dataclass(frozen=True)
class Rows:
    """A series in a table: values float64 (n,), NaN if missing; dates; row numbers."""

    values: NDArray[np.float64]
    dates: Dates
    rows: NDArray[np.intp]

    def __getitem__(self, order: NDArray[np.intp]) -> Rows:
        return Rows(self.values[order], self.dates[order], self.rows[order])

    def named(self, where: NDArray[np.intp]) -> str:
        """ "row 3 (2020-01-02)" for the first few of these indices, and how many more there are."""
        dates = written(self.dates.wall[where[:_SHOWN]], self.dates.form)
        shown = ", ".join(f"row {row} ({date})" for row, date in zip(self.rows[where], dates, strict=False))
        return shown + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")


class Notes:
    """Collects what was done to series; each kind is told once, for the first series with the number of others."""

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
    """Regular values float64 (n,), oldest first, NaN for missing steps, and the timeline of each series.

    Args:
        freq: a required frequency: each row then belongs to the step in which it lies. None: inferred from the dates,
            which must all be starts of steps.
        tell: called with what was reversed, sorted, filled or moved.

    Raises:
        ValueError: two rows of a series in one step, dates without a frequency, or most steps missing.
    """
    notes = Notes(len(tables))
    ordered = {name: _sorted_by_date(name, rows, notes) for name, rows in tables.items()}
    longest = max(ordered.values(), key=lambda rows: len(rows.values))
    known = _steps(longest.dates, freq, enough=2)  # for series too short to have a frequency of their own
    if known is None:
        same = f", and {len(longest.values)} rows have it" if len(longest.values) > 1 else ""
        raise ValueError(f"1 date does not give a frequency{same}: name it, as with --freq D; {_NO_DATES}")
    result = {}
    for name, rows in ordered.items():
        steps = _steps(rows.dates, freq, enough=3) or known.starting(rows.dates)
        result[name] = _filled(name, rows, steps, freq is not None, notes)
    notes.tell(tell)
    return result


def _sorted_by_date(name: str, rows: Rows, notes: Notes) -> Rows:
    utc = rows.dates.utc
    backwards = np.diff(utc) < np.timedelta64(0)
    if backwards.any():
        newest_first = bool((np.diff(utc) <= np.timedelta64(0)).all())
        how = (
            "the newest row comes first: reversed"
            if newest_first
            else "rows are not in the order of their dates: sorted"
        )
        notes.add("order", name, f"{how}, oldest first")
    return rows[np.argsort(utc, kind="stable")]


@dataclass(frozen=True)
class _Steps:
    """A frequency. in_utc: of times in UTC, not of local times."""

    frequency: Frequency
    in_utc: bool

    def of(self, dates: Dates) -> Moments:
        """The dates as the frequency counts them: in UTC or local."""
        return dates.utc if self.in_utc else dates.wall

    def starting(self, dates: Dates) -> _Steps:
        return _Steps(self.frequency.starting(self.of(dates)[0]), self.in_utc and dates.offsets is not None)


def _steps(dates: Dates, freq: str | None, enough: int) -> _Steps | None:
    """The frequency of dates; None: fewer than `enough`. Frequencies below a day count in UTC, because of daylight
    saving time; others follow the local calendar."""

    def found(moments: Moments) -> Frequency | None:
        return named(freq, moments) if freq is not None else inferred(np.unique(moments), enough)

    by_clock, by_utc = found(dates.wall), found(dates.utc)
    if by_clock is None or by_utc is None:
        return None
    as_well = by_utc.fits(dates.utc).mean() >= by_clock.fits(dates.wall).mean()
    if dates.offsets is not None and by_utc.within_days and as_well:
        return _Steps(by_utc, True)
    return _Steps(by_clock, False)


def _filled(name: str, rows: Rows, steps: _Steps, insisted: bool, notes: Notes) -> tuple[NDArray[np.float64], Timeline]:
    """The regular values and the timeline of a series whose rows are sorted."""
    moments, frequency, in_utc = steps.of(rows.dates), steps.frequency, steps.in_utc
    where = notes.where(name)
    same = np.flatnonzero(np.diff(moments) == np.timedelta64(0))
    if len(same):
        hint = ", or write offsets from UTC where clocks are set back" if frequency.within_days and not in_utc else ""
        raise ValueError(
            f"{where}{rows.named(same + 1)}: the date of another row; if rows are of several series, tell them "
            f"apart with --id{hint}; {_NO_DATES}"
        )
    if len(off := np.flatnonzero(~frequency.fits(moments))):
        if not insisted:
            raise ValueError(
                f"{where}{rows.named(off)}: not at a step of the others ({frequency}): --freq names one, and a row "
                f"counts for the step that it falls in; {_NO_DATES}"
            )
        notes.add(
            "moved", name, f"not the begin of a step ({frequency}), and counted for the one it is in: {rows.named(off)}"
        )
    places = frequency.places(moments)
    if len(same := np.flatnonzero(np.diff(places) == 0)):
        raise ValueError(f"{where}{rows.named(same + 1)}: in the same step as the row before ({frequency})")
    frequency = frequency.starting(frequency.moments(places[:1])[0])
    places -= places[0]
    _note_gaps(name, rows, places, frequency, notes)
    values = np.full(places[-1] + 1, np.nan)
    values[places] = rows.values
    offsets = rows.dates.offsets
    if offsets is not None and (offsets != offsets[-1]).any():
        notes.add("offset", name, "the offset from UTC changes; the forecast is written with that of the last row")
    return values, Timeline(frequency, len(values), None if offsets is None else offsets[-1], in_utc, rows.dates.form)


def _note_gaps(name: str, rows: Rows, places: Places, frequency: Frequency, notes: Notes) -> None:
    """Note missing steps. ValueError: more are missing than exist."""
    n, missing = int(places[-1]) + 1, int(places[-1]) + 1 - len(places)
    behind = rows.named(np.flatnonzero(np.diff(places) > 1))
    if missing > len(places):
        raise ValueError(
            f"{notes.where(name)}{missing} of {n} {frequency} are missing, behind {behind}: name the step with --freq; "
            f"{_NO_DATES}"
        )
    if missing:
        notes.add("gaps", name, f"{missing} of {n} {frequency} are missing, behind {behind}: taken as missing values")
