"""CSV files of time series: which columns are values, dates and series ids."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.dates import Dates, read_dates
from slimrt.forecast.timeline import Rows, Tell, Timeline, arranged

_MISSING = ("", "nan", "na", "null", "none")
_DATE_TITLES = ("date", "day", "ds", "timestamp", "time", "datetime", "month", "period", "week", "year")
_DAY_NUMBERS = 18264, 73051  # how spreadsheets count the days from 1950 to 2100
NO_DATES = "none"


@dataclass(frozen=True)
class Series:
    """values: float64 (n,), one a step, oldest first, NaN if missing. timeline: the steps, if there are dates."""

    values: NDArray[np.float64]
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Read:
    """series: by name. dated: the column of dates, "" without. value: the column forecast, "" if there are several."""

    series: dict[str, Series]
    dated: str
    value: str


@dataclass(frozen=True)
class Columns:
    """Which columns of a table to use, by name or number from 1.

    Attributes:
        values: to forecast; (): the last column of numbers.
        ids: the column that identifies stacked series; None: each column is a series.
        dates: the column of dates; None: the first one, if any; "none": rows are used in the order given.
        form: strptime format of the dates; None: detected. freq: a required frequency; None: inferred.
    """

    values: Sequence[str] = ()
    ids: str | None = None
    dates: str | None = None
    form: str | None = None
    freq: str | None = None


def read_series(text: str, name: str, columns: Columns = Columns(), tell: Tell = lambda text: None) -> Read:
    """Read the series of a CSV text; empty cells and NaN are missing values. With dates they are sorted and regular.

    Args:
        name: of the file, for messages.
        tell: called with sentences about what was done to rows (sorted, filled), and about columns that look like ids,
            dates or numbers and are not used as such.

    Raises:
        ValueError: no rows, no such column, one that is not numbers or not dates, or irregular dates
            (slimrt.forecast.timeline.arranged).
    """
    table = _Table.of(text, name)
    by = None if columns.ids is None else table.column(columns.ids)
    dated, dates = _dates(table, columns, by)
    if dates is None and by is None:
        table = _Table.of(text, name, gaps=True)
    chosen = table.chosen(columns.values, {by: "tells series apart (--id)", dated: "says when a row is"})
    numbers = np.arange(len(table.cells[table.names[0]])) + table.first_row
    values = {one: np.array([_number(cell) for cell in table.cells[one]], np.float64) for one in chosen}
    groups = table.groups(by)
    odd = [one for one in table.names if table.odd[one] and one != dated]
    repeating = [] if by is not None else [one for one in odd if _repeats(table.cells[one])]
    for column in repeating:
        tell(f"{name}: column {column} has equal values in consecutive rows; if it names the series, give "
             f"--id {column}")  # fmt: skip
    like_ids = by or next((one for one in repeating if all(map(str.strip, table.cells[one]))), None)
    for column in _undated(table, columns, {by, *chosen}, like_ids) if dates is None else ():
        first = table.cells[column][0].strip()
        five = len(first.partition(".")[0]) == 5 and table.odd[column] is None
        advice = "a spreadsheet's day numbers want a format of dates" if five else "--date-format names a form"
        tell(f"{name}: column {column} says {first!r:.40}, which is not known as a date: rows "
             f"are taken as they follow each other, oldest first; {advice}")  # fmt: skip
    for column in () if columns.values else table.nearly_numbers({by, dated}):
        tell(f"{name}: column {column} is not numbers: {table.odd[column]}; the last one of numbers, {chosen[0]}, is "
             "forecast")  # fmt: skip
    named = {
        (column if by is None else group if len(chosen) == 1 else f"{group} {column}"): (values[column], where)
        for group, where in groups.items()
        for column in chosen
    }
    value = chosen[0] if len(chosen) == 1 else ""
    if dates is None:
        return Read({one: Series(cells[where]) for one, (cells, where) in named.items()}, "", value)
    rows = {one: Rows(cells[where], dates[where], numbers[where]) for one, (cells, where) in named.items()}
    try:
        found = arranged(rows, columns.freq, lambda said: tell(f"{name}: {said}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Read({one: Series(*series) for one, series in found.items()}, str(dated), value)


@dataclass(frozen=True)
class _Table:
    """A CSV file by columns.

    Attributes:
        name: of the file. names: of the columns, in order. first_row: number of the first row below the header.
        cells: the texts of each column. odd: why a column is not numbers; None: it is.
    """

    name: str
    names: Sequence[str]
    first_row: int
    cells: Mapping[str, Sequence[str]]
    odd: Mapping[str, str | None]

    @classmethod
    def of(cls, text: str, name: str, gaps: bool = False) -> _Table:
        """Parse a CSV text. gaps: empty rows are steps without a value; else they are skipped."""
        rows = _rows(text, name)
        said = [row for row in rows if _is_not_blank(row)]
        headed = _is_header(said[0], said[1] if len(said) > 1 else [])
        body, numbers = (rows if gaps else said)[headed:], [str(i + 1) for i in range(len(rows[0]))]
        _check_widths(rows, name)
        if not body:
            raise ValueError(f"{name}: no rows in it but a header")
        titles = [cell.strip() for cell in rows[0]] if headed else numbers
        names = [
            title if title and titles.count(title) == 1 else number
            for title, number in zip(titles, numbers, strict=True)
        ]
        cells = {column: [row[i] if i < len(row) else "" for row in body] for i, column in enumerate(names)}
        odd = {column: _first_odd(texts, 1 + headed) for column, texts in cells.items()}
        return cls(name, names, 1 + headed, cells, odd)

    def column(self, asked: str) -> str:
        """The column with this name or number. ValueError: there is none."""
        if asked in self.names:
            return asked
        if asked.isdecimal() and 1 <= int(asked) <= len(self.names):
            return self.names[int(asked) - 1]
        raise ValueError(f"{self.name}: no column {asked}; there are {', '.join(self.names)}")

    def chosen(self, asked: Sequence[str], taken: Mapping[str | None, str]) -> Sequence[str]:
        """The columns to forecast: those asked for, else the last one of numbers. taken: other columns -> their use."""
        numeric = [column for column in self.names if self.odd[column] is None and column not in taken]
        if not asked and not numeric:
            complaints = "; ".join(f"{one}{f' {taken[one]}' if one in taken else f': {self.odd[one]}'}"
                                   for one in self.names)  # fmt: skip
            raise ValueError(f"{self.name}: no column of numbers in it; {complaints}")
        found = [self.column(one) for one in asked] if asked else numeric[-1:]
        for column in found:
            if column not in numeric:
                why = self.odd[column] or f"it {taken[column]}"
                raise ValueError(f"{self.name}: column {column} is not numbers: {why}")
        return found

    def nearly_numbers(self, taken: set[str | None]) -> list[str]:
        """Columns of which most cells are numbers, possibly with commas in them. taken: columns with another use."""
        found = [one for one in self.names if self.odd[one] is not None and one not in taken]
        return [one for one in found if 2 * sum(map(_is_nearly, self.cells[one])) > len(self.cells[one])]

    def groups(self, by: str | None) -> dict[str, NDArray[np.intp]]:
        """Row indices by id, in order of appearance; without a column of ids, all rows under ""."""
        if by is None:
            return {"": np.arange(len(self.cells[self.names[0]]))}
        ids = [cell.strip() for cell in self.cells[by]]
        if "" in ids:
            row = ids.index("") + self.first_row
            raise ValueError(f"{self.name}: row {row} has nothing in column {by}, so is of no series")
        where = np.array(ids)
        return {one: np.flatnonzero(where == one) for one in dict.fromkeys(ids)}


def _dates(table: _Table, columns: Columns, by: str | None) -> tuple[str | None, Dates | None]:
    """The column of dates and its dates; (None, None): there is none, or it is not wanted."""
    if columns.dates == NO_DATES:
        if columns.freq is not None or columns.form is not None:
            raise ValueError("a frequency, or a form of dates, is of no use without dates")
        return None, None
    if columns.dates is not None:
        candidates = [table.column(columns.dates)]
    else:
        wanted = {table.column(one) for one in columns.values} | {by}
        candidates = [
            one
            for one in table.names
            if one not in wanted and (table.odd[one] is not None or one.lower() in _DATE_TITLES)
        ]
    numbers = range(table.first_row, table.first_row + len(table.cells[table.names[0]]))
    series, complaint = list(table.groups(by).values()), ""
    for column in candidates:
        try:
            dates = read_dates(table.cells[column], column, numbers, columns.form, series=series)
        except ValueError as error:  # with a given format another column may fit
            complaint = complaint or str(error)
            if columns.form is None:
                break
            continue
        if dates is not None:
            return column, dates
    if complaint:
        raise ValueError(f"{table.name}: {complaint}")
    if columns.dates is not None:
        first = table.cells[candidates[0]][0].strip()
        raise ValueError(
            f"{table.name}: column {candidates[0]} says {first!r:.40}, which is not known as a date: name its form, as "
            "with --date-format '%d.%m.%y'"
        )
    if columns.freq is not None or columns.form is not None:
        raise ValueError(f"{table.name}: no column of dates in it; there are {', '.join(table.names)}")
    return None, None


def _repeats(cells: Sequence[str]) -> bool:
    """Whether a column looks like ids of stacked series: a few values, each in one run of rows."""
    runs = sum(a != b for a, b in zip(cells, cells[1:], strict=False)) + 1
    return 1 < runs == len(set(cells)) <= len(cells) / 2


def _undated(table: _Table, columns: Columns, taken: set[str | None], by: str | None) -> list[str]:
    """Columns with a date-like title whose values are odd. by: the column that seems to tell series apart."""
    called = [one for one in table.names if one.lower() in _DATE_TITLES and one not in taken]
    groups = [] if columns.dates == NO_DATES else [*table.groups(by).values()]
    return [one for one in called if any(_odd_dates([table.cells[one][at] for at in where]) for where in groups)]


def _odd_dates(cells: Sequence[str]) -> bool:
    """Texts with digits, decreasing numbers, or a spreadsheet's day numbers with gaps or in no order."""
    numbers = [_number(cell) for cell in cells]
    if None in numbers:
        return any(map(str.isdecimal, cells[0]))
    values = np.array(numbers, np.float64)
    rows = np.flatnonzero(~np.isnan(values))
    steps = np.diff(values[rows]) / np.diff(rows)
    if not len(steps):
        return False
    days = bool((values[rows] >= _DAY_NUMBERS[0]).all() and (values[rows] < _DAY_NUMBERS[1]).all())
    return bool((steps < 0).all()) or (days and not np.allclose(steps, steps[0]))


def _rows(text: str, name: str) -> list[list[str]]:
    """The rows between the first and the last that are not empty, including empty rows with cells. Any line ending; the
    delimiter is a semicolon, comma or tab, or what Excel's "sep=" line names."""
    text = text.removeprefix("\ufeff")
    declared = re.match(r"sep=(.)[\r\n]+", text)
    body = text[declared.end() :] if declared else text
    lines = io.TextIOWrapper(io.BytesIO(body.encode()), "utf-8", newline=None)  # StringIO takes 4 bytes a character
    first = re.sub('"[^"]*"', "", next((line for line in lines if line.strip()), ""))
    lines.seek(0)
    found = ";" if ";" in first else "\t" if "\t" in first and "," not in first else ","
    try:
        rows = [*csv.reader(lines, delimiter=declared[1] if declared else found)]
    except csv.Error as error:
        raise ValueError(f"{name}: not a CSV file: {error}") from None
    begin = next((i for i, row in enumerate(rows) if _is_not_blank(row)), None)
    if begin is None:
        raise ValueError(f"{name}: no rows in it")
    last = max(i for i, row in enumerate(rows) if _is_not_blank(row) or row == [""])  # pandas writes missing values so
    return [row for row in islice(rows, begin, last + 1) if len(row) > 1 or row == [""] or _is_not_blank(row)]


def _is_not_blank(row: Sequence[str]) -> bool:
    return any(cell.strip() for cell in row)


def _check_widths(rows: Sequence[Sequence[str]], name: str) -> None:
    """ValueError: a row has more cells than the first, as with 1,000 for a thousand."""
    for i, row in enumerate(rows, 1):
        if any(cell.strip() for cell in row[len(rows[0]) :]):
            raise ValueError(
                f"{name}: row {i} has {len(row)} cells, the first has {len(rows[0])}: is there a comma in a number? "
                "Decimals take a point, thousands nothing"
            )


def _is_header(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether a first row has no numbers, or a word above something like a date (columns may be called 2020, 2021)."""
    if not any(_number(cell) is not None for cell in first if cell.strip()):
        return True
    return any(
        _number(above) is None and above.strip().isalpha() and _number(below) is None and any(map(str.isdigit, below))
        for above, below in zip(first, second, strict=False)
    )


def _is_nearly(cell: str) -> bool:
    """Whether a cell is a number, possibly with commas in it, and not missing."""
    value = _number(cell.replace(",", ""))
    return value is not None and not math.isnan(value)


def _first_odd(cells: Sequence[str], row: int) -> str | None:
    """Why a column is not numbers; None: it is. row: number of its first cell."""
    for i, cell in enumerate(cells, row):
        if _number(cell) is None:
            comma = " (decimals take a point, thousands nothing)" if _number(cell.replace(",", "")) is not None else ""
            return f"row {i} says {cell.strip()!r:.40}{comma}"
    return "nothing in it" if all(math.isnan(_number(cell) or 0) for cell in cells) else None


def _number(cell: str) -> float | None:
    """A cell's number, NaN if missing; None: it is something else, or infinite."""
    if cell.strip().lower() in _MISSING:
        return float("nan")
    try:
        value = float(cell)
    except ValueError:
        return None
    return None if math.isinf(value) else value
