"""Dates in tables: texts parsed in one format that fits them all, and written in the same format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timezone
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Moments = NDArray[np.datetime64]  # of microseconds

_DAYS = ("%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%y", "%d/%m/%y",
         "%m/%d/%y", "%d-%m-%y", "%m-%d-%y", "%y/%m/%d", "%y-%m-%d", "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y",
         "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y")  # fmt: skip
_TIMES = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", ", %H:%M", ", %H:%M:%S")
_MONTHS = ("%Y-%m", "%Y/%m", "%m/%Y", "%m-%Y", "%m.%Y", "%b %Y", "%B %Y", "%b-%Y", "%b-%y", "%Y %b", "%Y-%b")
_DIGITS = {4: "%Y", 6: "%Y%m", 8: "%Y%m%d"}
_PARTS = ("minutes", "seconds", "milliseconds", "microseconds")  # timespec values of datetime.isoformat
_UNIX = {10: 1, 13: 1000}  # digits of a Unix time -> units per second
_SHOWN = 3
FLAG = "--date-format '{}'"


@dataclass(frozen=True)
class Form:
    """A date format. name: for messages, mostly a strptime format."""

    name: str
    read: Callable[[str], datetime]
    write: Callable[[datetime], str]


@dataclass(frozen=True)
class Dates:
    """The dates of the rows of a table.

    Attributes:
        wall: local times, datetime64[us] (n,). offsets: from UTC, timedelta64[us] (n,); None: unknown.
        form: their format.
    """

    wall: Moments
    offsets: NDArray[np.timedelta64] | None
    form: Form

    def __getitem__(self, rows: NDArray[np.intp]) -> Dates:
        return Dates(self.wall[rows], None if self.offsets is None else self.offsets[rows], self.form)

    @property
    def utc(self) -> Moments:
        """The times in UTC; without offsets, the local times."""
        return self.wall if self.offsets is None else self.wall - self.offsets


def written(moments: Moments, form: Form, offset: np.timedelta64 | None = None) -> list[str]:
    """Format local times as texts; offset: theirs from UTC."""
    zone = None if offset is None else timezone(offset.astype("m8[us]").item())
    return [form.write(moment.replace(tzinfo=zone)) for moment in moments.astype("M8[us]").tolist()]


def read_dates(
    cells: Sequence[str],
    column: str,
    rows: Sequence[object],
    form: str | None = None,
    hint: str = FLAG,
    series: Iterable[NDArray[np.intp]] = (),
) -> Dates | None:
    """Parse the dates of a column; None: it is not a column of dates.

    Args:
        cells: its texts. column: its name; rows: row numbers, for messages.
        form: a strptime format; None: one of the usual formats. Texts of digits only may be 2020, 202001, 20200131, or
            Unix time in seconds or milliseconds.
        hint: how to specify a format, for messages, with {} in its place.
        series: the indices of the cells of each series; (): all are of one.

    Raises:
        ValueError: two formats fit with different dates; or a format fits most cells but not all.
    """
    given = [_strptime(form)] if form is not None else _forms(cells)
    fits = [(one, found) for one in given if (found := _all(one, cells))]
    if not fits:
        if form is not None:
            raise ValueError(f"column {column}: {_misfits(given[0], cells, rows)}, not a date as '{form}'")
        nearly = [one for one in given if 2 * sum(_reads(one, cell) for cell in cells) > len(cells)]
        if nearly:
            raise ValueError(
                f"column {column}: {_misfits(nearly[0], cells, rows)}, not a date as the others ({nearly[0].name})"
            )
        return None
    chosen, moments = fits[0]
    for other, reading in fits[1:]:
        if reading != moments:
            cell, one, two = next(both for both in zip(cells, moments, reading, strict=True) if both[1] != both[2])
            raise ValueError(
                f"column {column}: {cell.strip()} may be {one:%-d %B %Y} ({chosen.name}) or {two:%-d %B %Y} "
                f"({other.name}): name the form, as with {hint.format(chosen.name)}"
            )
    if "%y" in chosen.name:
        moments = _with_century(moments, [one.tolist() for one in series] or [list(range(len(moments)))])
    return _dates(chosen, moments)


def _with_century(moments: list[datetime], series: Sequence[Sequence[int]]) -> list[datetime]:
    """Correct the century of dates with two-digit years, which strptime places in 1969 to 2068. If the rows of a series
    (indices into `moments`) are not monotonic then, take the hundred years in which all dates are closest together."""
    if all(_monotonic([moments[at] for at in where]) for where in series):
        return moments
    years = {one.year for one in moments}
    readings = [years, *({y - 100 * (y >= first) for y in years} for first in sorted(years, reverse=True)
                         if first >= 2000)]  # fmt: skip
    closest = min(readings, key=lambda one: max(one) - min(one))  # of equal ones the first, closest to strptime's
    try:
        return [one if one.year in closest else one.replace(year=one.year - 100) for one in moments]
    except ValueError:  # 29 February 1900 does not exist
        return moments


def _monotonic(moments: Sequence[datetime]) -> bool:
    steps = list(pairwise(moments))
    return all(a <= b for a, b in steps) or all(a >= b for a, b in steps)


def _dates(form: Form, moments: Sequence[datetime]) -> Dates:
    wall = np.array([one.replace(tzinfo=None) for one in moments], "M8[us]")
    if moments[0].tzinfo is None:
        return Dates(wall, None, form)
    return Dates(wall, np.array([one.utcoffset() for one in moments], "m8[us]"), form)


def _all(form: Form, cells: Iterable[str]) -> list[datetime] | None:
    """All cells parsed, either all with an offset from UTC or none; None: one does not fit."""
    try:
        moments = [form.read(cell.strip()) for cell in cells]
    except (ValueError, OverflowError):
        return None
    return moments if len({one.tzinfo is None for one in moments}) == 1 else None


def _reads(form: Form, cell: str) -> bool:
    return _all(form, [cell]) is not None


def _misfits(form: Form, cells: Sequence[str], rows: Sequence[object]) -> str:
    odd = [
        f"row {row} says {cell.strip()!r:.40}" for row, cell in zip(rows, cells, strict=True) if not _reads(form, cell)
    ]
    return ", ".join(odd[:_SHOWN]) + (f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")


def _forms(cells: Sequence[str]) -> list[Form]:
    """The formats that fit one of the first cells; only ISO 8601 if that fits, since it is unambiguous."""
    some = [cell.strip() for cell in cells if cell.strip()][:_SHOWN]
    if not some:
        return []
    if all(cell.isdecimal() for cell in some):
        return [form for cell in some if (form := _of_digits(len(cell)))][:1]
    longest = max(some, key=len)
    for form in (_iso(longest), _quarters(longest)):
        if any(_reads(form, cell) for cell in some):
            return [form]
    if not any(map(str.isdecimal, longest)):
        return []
    known = map(_strptime, (*_MONTHS, *(day + time for day in _DAYS for time in _TIMES)))
    return [form for form in known if any(_reads(form, cell) for cell in some)]


def _strptime(form: str) -> Form:
    return Form(form, lambda text: datetime.strptime(text, form), lambda moment: moment.strftime(form))


def _of_digits(count: int) -> Form | None:
    """The format of dates with this many digits, or Unix time."""
    if count in _DIGITS:
        plain = _strptime(_DIGITS[count])

        def read(text: str) -> datetime:
            moment = plain.read(text)
            if len(text) != count or not 1800 <= moment.year <= 2200:  # 2020111 fits %Y%m%d; 1000 is no year
                raise ValueError(text)
            return moment

        return Form(plain.name, read, plain.write)
    if count not in _UNIX:
        return None
    parts = _UNIX[count]
    return Form(
        "Unix time",
        lambda text: datetime.fromtimestamp(int(text) / parts, UTC).replace(tzinfo=None),
        lambda moment: str(round(moment.replace(tzinfo=UTC).timestamp() * parts)),
    )


def _iso(example: str) -> Form:
    """ISO 8601, written like the example: a date or a week, or with a time of at least the same precision."""
    fraction = re.search(r"[.,](\d+)", example)
    whole = "seconds" if example[11:19].count(":") > 1 else "minutes"
    shown = whole if fraction is None else "milliseconds" if len(fraction[1]) <= 3 else "microseconds"

    def write(moment: datetime) -> str:
        if len(example) <= len("2020-01-01"):
            return _week(moment, example) if "W" in example else moment.date().isoformat()
        within = moment.microsecond
        needed = "microseconds" if within % 1000 else "milliseconds" if within else _PARTS[moment.second > 0]
        parts = max(shown, needed, key=_PARTS.index)
        text = moment.isoformat(sep=example[10] if example[10] in " T" else "T", timespec=parts)
        return text.removesuffix("+00:00") + "Z" if example.endswith("Z") else text

    return Form("ISO 8601", datetime.fromisoformat, write)


def _week(moment: datetime, example: str) -> str:
    """2020-W01 or 2020W01, with the day of the week if the example has it."""
    between = "-" if example[4] == "-" else ""
    year, week, day = moment.isocalendar()
    weekday = f"{between}{day}" if len(example.replace("-", "")) > len("2020W01") else ""
    return f"{year:04d}{between}W{week:02d}{weekday}"


def _quarters(example: str) -> Form:
    """2020Q1, 2020-Q1, Q1 2020: parsed as the first day of the quarter."""

    def read(text: str) -> datetime:
        found = re.fullmatch(r"(\d{4})[ -]?Q([1-4])", text, re.I) or re.fullmatch(r"Q([1-4])[ -]?(\d{4})", text, re.I)
        if not found:
            raise ValueError(text)
        quarter, year = sorted(map(int, found.groups()))
        return datetime(year, 3 * quarter - 2, 1)

    def write(moment: datetime) -> str:
        year = re.sub(r"\d{4}", str(moment.year), example)
        return re.sub(r"(?<=Q)\d(?!\d)", str((moment.month + 2) // 3), year, flags=re.I)

    return Form("quarters", read, write)
