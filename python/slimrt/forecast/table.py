"""CSV files of time series: which columns hold numbers, dates and the names of series."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.dates import Dates, read_dates
from slimrt.forecast.timeline import Rows, Tell, Timeline, arranged

_MISSING = ("", "nan", "na", "null", "none")
_DATE_TITLES = ("date", "day", "ds", "timestamp", "time", "datetime", "month", "period", "week", "year")
NO_DATES = "none"


@dataclass(frozen=True)
class Series:
    """values: float64 (n,), a value a step, oldest first, NaN where missing. timeline: their steps, if dates tell."""

    values: NDArray[np.float64]
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Read:
    """series: by name. dated: the column of dates, "" without. value: the one forecast, "" where there are several."""

    series: dict[str, Series]
    dated: str
    value: str


@dataclass(frozen=True)
class Columns:
    """What to take from a table, by names of columns or their numbers from 1.

    Attributes:
        values: to forecast; (): the last column that holds numbers.
        ids: what tells stacked series apart; None: a column is a series.
        dates: when a row is; None: the first column of dates, if there is one; "none": rows are taken as they are.
        form: how dates are written, as strptime has it; None: found out. freq: the step that is insisted on.
    """

    values: Sequence[str] = ()
    ids: str | None = None
    dates: str | None = None
    form: str | None = None
    freq: str | None = None


def read_series(text: str, name: str, columns: Columns = Columns(), tell: Tell = lambda text: None) -> Read:
    """The series of a CSV text; what is empty or says NaN is missing. With dates they are in order, a value a step.

    Args:
        name: of the file, for messages.
        tell: is told what was done to rows (Columns.dates), and of columns that look like ids, dates or numbers and
            are not taken for these.

    Raises:
        ValueError: no rows, no such column, one that is not numbers or not dates, or dates that are not regular
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
    repeating = [] if by is not None else [one for one in table.names if table.odd[one] and _repeats(table.cells[one])]
    for column in repeating:
        tell(f"{name}: column {column} says the same in rows that follow each other; if it tells series apart, give "
             f"--id {column}")  # fmt: skip
    for column in _undated(table, columns, {by, *chosen}) if dates is None else ():
        tell(f"{name}: column {column} says {table.cells[column][0].strip()!r:.40}, which is not known as a date: rows "
             "are taken as they follow each other, oldest first; --date-format names a form")  # fmt: skip
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
        name: of the file. names: of the columns, in order. first_row: number of the first one below the header.
        cells: the texts of each column. odd: why it is not one of numbers; None of one that is.
    """

    name: str
    names: Sequence[str]
    first_row: int
    cells: Mapping[str, Sequence[str]]
    odd: Mapping[str, str | None]

    @classmethod
    def of(cls, text: str, name: str, gaps: bool = False) -> _Table:
        """gaps: rows with nothing in them are steps without a value; else they are left out."""
        rows = _rows(text, name)
        said = [row for row in rows if _says(row)]
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
        """The column of that name or number. ValueError: there is none."""
        if asked in self.names:
            return asked
        if asked.isdecimal() and 1 <= int(asked) <= len(self.names):
            return self.names[int(asked) - 1]
        raise ValueError(f"{self.name}: no column {asked}; there are {', '.join(self.names)}")

    def chosen(self, asked: Sequence[str], taken: Mapping[str | None, str]) -> Sequence[str]:
        """The columns to forecast: those asked for, else the last one of numbers. taken: what others are for."""
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
        """Columns of which most cells are numbers, or have a comma too many for one. taken: those that are for more."""
        found = [one for one in self.names if self.odd[one] is not None and one not in taken]
        return [one for one in found if 2 * sum(map(_is_nearly, self.cells[one])) > len(self.cells[one])]

    def groups(self, by: str | None) -> dict[str, NDArray[np.intp]]:
        """The rows of each id, ids as they first come; all of them where there is no such column."""
        if by is None:
            return {"": np.arange(len(self.cells[self.names[0]]))}
        ids = [cell.strip() for cell in self.cells[by]]
        if "" in ids:
            row = ids.index("") + self.first_row
            raise ValueError(f"{self.name}: row {row} has nothing in column {by}, so is of no series")
        where = np.array(ids)
        return {one: np.flatnonzero(where == one) for one in dict.fromkeys(ids)}


def _dates(table: _Table, columns: Columns, by: str | None) -> tuple[str | None, Dates | None]:
    """The column of dates and what it says; None, None where there is none, or none is wanted."""
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
        except ValueError as error:  # of a form that was named, another column may be
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
    """Whether several words come in many rows each, one after the other, and then never again."""
    runs = sum(a != b for a, b in zip(cells, cells[1:], strict=False)) + 1
    return 1 < runs == len(set(cells)) <= len(cells) / 2


def _undated(table: _Table, columns: Columns, taken: set[str | None]) -> list[str]:
    """Columns that are called dates, and say something with digits that is not known as such, or numbers that fall."""
    called = [one for one in table.names if one.lower() in _DATE_TITLES and one not in taken]
    return [] if columns.dates == NO_DATES else [one for one in called if _odd_dates(table.cells[one])]


def _odd_dates(cells: Sequence[str]) -> bool:
    numbers = [_number(cell) for cell in cells]
    if None in numbers:
        return any(map(str.isdecimal, cells[0]))
    return len(cells) > 1 and bool((np.diff(np.array(numbers, np.float64)) < 0).all())


def _rows(text: str, name: str) -> list[list[str]]:
    """From the first row to the last that says something, and those between that have cells, be there something in them
    or not. Lines may end in any way; between cells are semicolons, commas, tabs, or what Excel's first line names."""
    text = text.removeprefix("\ufeff")
    declared = re.match(r"sep=(.)[\r\n]+", text)
    lines = io.StringIO(text[declared.end() :] if declared else text, newline=None)
    first = re.sub('"[^"]*"', "", next((line for line in lines if line.strip()), ""))
    lines.seek(0)
    found = ";" if ";" in first else "\t" if "\t" in first and "," not in first else ","
    try:
        rows = [*csv.reader(lines, delimiter=declared[1] if declared else found)]
    except csv.Error as error:
        raise ValueError(f"{name}: not a CSV file: {error}") from None
    said = [i for i, row in enumerate(rows) if _says(row)]
    if not said:
        raise ValueError(f"{name}: no rows in it")
    last = max(i for i, row in enumerate(rows) if _says(row) or row == [""])  # pandas writes "" in a lone column
    return [row for row in rows[said[0] : last + 1] if len(row) > 1 or row == [""] or _says(row)]


def _says(row: Sequence[str]) -> bool:
    return any(cell.strip() for cell in row)


def _check_widths(rows: Sequence[Sequence[str]], name: str) -> None:
    """ValueError where a row has more in it than the first one names, as 1,000 for a thousand would."""
    for i, row in enumerate(rows, 1):
        if any(cell.strip() for cell in row[len(rows[0]) :]):
            raise ValueError(
                f"{name}: row {i} has {len(row)} cells, the first has {len(rows[0])}: is there a comma in a number? "
                "Decimals take a point, thousands nothing"
            )


def _is_header(first: Sequence[str], second: Sequence[str]) -> bool:
    """It holds no numbers, or a word above a date or the like (columns may be called 2020 and 2021)."""
    if not any(_number(cell) is not None for cell in first if cell.strip()):
        return True
    return any(
        _number(above) is None and above.strip().isalpha() and _number(below) is None and any(map(str.isdigit, below))
        for above, below in zip(first, second, strict=False)
    )


def _is_nearly(cell: str) -> bool:
    """Whether a cell is a number, perhaps with commas in it, and not empty."""
    value = _number(cell.replace(",", ""))
    return value is not None and not math.isnan(value)


def _first_odd(cells: Sequence[str], row: int) -> str | None:
    """Why a column, whose first cell is in this row, is not one of numbers; None of one that is."""
    for i, cell in enumerate(cells, row):
        if _number(cell) is None:
            comma = " (decimals take a point, thousands nothing)" if _number(cell.replace(",", "")) is not None else ""
            return f"row {i} says {cell.strip()!r:.40}{comma}"
    return "nothing in it" if all(math.isnan(_number(cell) or 0) for cell in cells) else None


def _number(cell: str) -> float | None:
    """A cell's number, NaN where it is missing, None where it is something else or infinite."""
    if cell.strip().lower() in _MISSING:
        return float("nan")
    try:
        value = float(cell)
    except ValueError:
        return None
    return None if math.isinf(value) else value
