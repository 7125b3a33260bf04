"""Frequencies of time series (hours, days, business days, months ...): inferring them from dates, and their steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.dates import Moments
from slimrt.plumbing.arguments import unknown

Places = NDArray[np.int64]

DAY = np.timedelta64(1, "D").astype("m8[us]")
_FIXED = {"s": np.timedelta64(1, "s"), "min": np.timedelta64(1, "m"), "h": np.timedelta64(1, "h"),
          "D": np.timedelta64(1, "D"), "W": np.timedelta64(7, "D")}  # fmt: skip
_MONTHS = {"MS": (1, 1), "ME": (1, 31), "QS": (3, 1), "QE": (3, 31), "YS": (12, 1), "YE": (12, 31)}  # (months, day)
_NAMES = {
    "us": "microsecond",
    "s": "second",
    "min": "minute",
    "h": "hour",
    "D": "day",
    "W": "week",
    "B": "business day",
}
_WEEK = 5  # business days of a week
_LAST = 31  # stands for the last day of any month


@dataclass(frozen=True)
class Frequency:
    """Equal steps of time from a first moment on.

    Attributes:
        unit: "us", "B" (Monday to Friday) or "M" (months). count: units in a step.
        first: start of a step, datetime64[us].
        day: of months: 1 to 31; in shorter months the last day.
    """

    unit: str
    count: int
    first: np.datetime64
    day: int = 1

    def places(self, moments: Moments) -> Places:
        """The index of the step, counted from the first, in which each moment lies."""
        if self.unit == "us":
            passed = (moments - self.first).astype(np.int64)
        elif self.unit == "B":
            passed = np.busday_count(self.first.astype("M8[D]"), moments.astype("M8[D]"))
        else:
            passed = (moments.astype("M8[M]") - self.first.astype("M8[M]")).astype(np.int64)
        return np.floor_divide(passed, self.count)

    def moments(self, places: Places) -> Moments:
        """The starts of these steps: datetime64[us]."""
        if self.unit == "us":
            passed: NDArray[np.timedelta64] = (places * self.count).astype("m8[us]")
            return np.asarray(self.first + passed)
        time = self.first - self.first.astype("M8[D]")
        if self.unit == "B":
            days = np.busday_offset(self.first.astype("M8[D]"), places * self.count, roll="forward")
        else:
            month = self.first.astype("M8[M]") + places * self.count
            start = month.astype("M8[D]")
            length = ((month + 1).astype("M8[D]") - start).astype(np.int64)
            days = start + (np.minimum(self.day, length) - 1)
        return np.asarray(days + time)

    def fits(self, moments: Moments) -> NDArray[np.bool_]:
        """Which moments are starts of steps."""
        return np.asarray(self.moments(self.places(moments)) == moments)

    def starting(self, first: np.datetime64) -> Frequency:
        """The same frequency with another first moment."""
        return Frequency(self.unit, self.count, first, self.day)

    @property
    def within_days(self) -> bool:
        """Whether a step is shorter than a day, so that daylight saving time matters."""
        return self.unit == "us" and self.count < DAY.astype(np.int64)

    def __str__(self) -> str:
        if self.unit == "M":
            months = {1: "month", 3: "quarter", 12: "year"}.get(self.count, f"{self.count} months'")
            return f"{months} " + {1: "starts", _LAST: "ends"}.get(self.day, f"days {self.day}")
        unit, count = self.unit, self.count
        for name, length in _FIXED.items() if unit == "us" else ():
            size = int(length.astype("m8[us]").astype(np.int64))
            if self.count % size == 0:
                unit, count = name, self.count // size
        return f"{_NAMES[unit]}s" if count == 1 else f"{count} {_NAMES[unit]}s"


def named(name: str, moments: Moments) -> Frequency:
    """The frequency of a pandas alias, such as 15min, D, B, ME, QS: aligned to the first of these moments if all of
    them are starts of steps then, else to the calendar and the clock.

    Raises:
        ValueError: an unknown alias.
    """
    found = re.fullmatch(r"(\d*)([A-Za-z]+)", name.strip())
    units = {one.lower(): one for one in (*_FIXED, "B", *_MONTHS)}
    count = int(found[1] or 1) if found else 0
    if not found or not count or found[2].lower() not in units:
        raise ValueError(unknown("frequency", name, units.values()) + "; a number may stand before, as in 15min")
    unit = units[found[2].lower()]
    if unit in _MONTHS:
        months, day = _MONTHS[unit]
        month = moments[0].astype("M8[M]")
        month = month - month.astype(np.int64) % months  # 1970 began with a quarter, and is month 0
        first = (month + (months - 1 if day == _LAST else 0)).astype("M8[us]")
        return _on_time(Frequency("M", count * months, first, day), moments, DAY)
    if unit == "B":
        return _on_time(Frequency("B", count, moments[0]), moments, DAY)
    step = count * _FIXED[unit].astype("m8[us]")
    return _on_time(Frequency("us", int(step.astype(np.int64)), moments[0]), moments, min(step, DAY))


def _on_time(frequency: Frequency, moments: Moments, part: np.timedelta64) -> Frequency:
    """The frequency at the first moment's time of day if all moments fit then, else aligned to a multiple of `part`."""
    first, day = frequency.first.astype("M8[D]"), moments[0].astype("M8[D]")
    exact = frequency.starting(first + (moments[0] - day))
    if exact.fits(moments).all():
        return exact
    return frequency.starting(
        frequency.first - (frequency.first.astype(np.int64) % part.astype(np.int64)).astype("m8[us]")
    )


def inferred(moments: Moments, enough: int = 3) -> Frequency | None:
    """The frequency that most moments (sorted, distinct) fit; None: fewer than `enough`, which is at least 2."""
    if len(moments) < enough:
        return None
    days, diffs = moments.astype("M8[D]"), np.diff(moments)
    usual = _most_common(diffs)
    candidates = [Frequency("us", int(usual.astype(np.int64)), moments[0])]
    if len(moments) > _WEEK and usual == DAY and np.is_busday(days).all() and (diffs > 2 * DAY).any():
        candidates.insert(0, Frequency("B", 1, moments[0]))
    steps = np.diff(moments.astype("M8[M]")).astype(np.int64)
    if (count := int(_most_common(steps))) > 0:
        last = (days + 1).astype("M8[M]") != days.astype("M8[M]")
        numbers = (days - days.astype("M8[M]").astype("M8[D]")).astype(np.int64) + 1
        day = _LAST if 2 * last.sum() > len(last) else int(_most_common(numbers))
        candidates.insert(0, Frequency("M", count, moments[0], day))
    return max(candidates, key=lambda one: one.fits(moments).mean())


def _most_common(values: NDArray[Any]) -> Any:
    """The most frequent value; of ties the smallest."""
    found, counts = np.unique(values, return_counts=True)
    return found[counts.argmax()]
