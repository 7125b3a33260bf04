"""slimrt forecast: quantiles of what follows a time series."""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimrt.cli.common import (
    Flags,
    as_json,
    beside_model,
    model_source,
    not_a_format,
    note,
    open_model,
    write_out,
)
from slimrt.cli.flags import Collect
from slimrt.cli.values import is_number, parsed, positive, seed
from slimrt.forecast.predict import enough_context, trained_levels
from slimrt.measure.plots import check_plot, plot_forecast
from slimrt.plumbing.files import decode_text

_AT_ONCE = 32  # sequences: sample paths, or series
_FORMATS = ("csv", "json")
_MISSING = ("", "nan", "na", "null", "none")


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument(
        "csv", metavar="CSV", nargs="*", help="a file with a row a step, oldest first (else stdin)"
    )
    flags.add("--column", twin=False, action=Collect, default=[], metavar="NAME", help="to forecast, by name or "
              "number from 1; may be repeated; default: the last one of numbers")  # fmt: skip
    flags.add(
        "--id",
        twin=False,
        metavar="NAME",
        help="column that says which series a row belongs to, where several are stacked",
    )
    flags.add("-n", "--horizon", type=positive, metavar="N", help="steps; default: what the model was trained for")
    flags.add(
        "--quantiles",
        type=_levels,
        goes_on=is_number,
        default=(0.1, 0.5, 0.9),
        metavar="Q[,Q]",
        help="default: 0.1,0.5,0.9",
    )
    flags.add(
        "--num-samples", type=positive, metavar="N", help="paths that Chronos draws; default: what the model says"
    )
    flags.add("-s", "--seed", type=seed, metavar="N", help="makes the paths reproducible")
    flags.add("--format", "--output-format", twin=False, choices=_FORMATS, default="csv", help="default: %(default)s")
    flags.add("-o", "--output", twin=False, metavar="FILE", help="write the CSV or JSON there; default: stdout")
    flags.add(
        "--plot", twin=False, metavar="FILE", help="draw series and quantiles (.png, .svg, .pdf; needs the extra plot)"
    )
    flags.engine(encoder=True)
    flags.output()


def run(args: argparse.Namespace) -> int:
    given = beside_model(args, args.csv)
    if len(given) > 1:
        args.usage_error(f"give one CSV after the model, not {' and '.join(given)}")
    if args.plot is not None:
        check_plot(args.plot)
    not_a_format(args, _FORMATS)
    if not given and sys.stdin.isatty():
        args.usage_error("which series? give CSV after the model, or pipe one in")
    data = Path(given[0]).read_bytes() if given else sys.stdin.buffer.read()
    name = given[0] if given else "stdin"
    series = read_series(decode_text(data, name), name, args.column or None, args.id, lambda text: note(args, text))
    source = model_source(args)
    with open_model(args, source, args.ctx or enough_context(source), n_seqs=_AT_ONCE) as model:
        quantiles = model.predict_quantiles(
            list(series.values()), args.horizon, args.quantiles, num_samples=args.num_samples, seed=args.seed
        )
    _tell_of_levels(args, trained_levels(source))
    if args.plot is not None:
        plot_forecast(series, quantiles, args.quantiles, args.plot)
    names = list(series)
    if args.json or args.format == "json":
        text = as_json(_record(names, args.quantiles, quantiles)) + "\n"
    else:
        text = _csv(names, args.quantiles, quantiles)
    write_out(args.output, text)
    return 0


def _tell_of_levels(args: argparse.Namespace, trained: Sequence[float]) -> None:
    """Says which of the levels a model cannot tell apart from its own outermost ones."""
    beyond = [f"{level:g}" for level in args.quantiles if trained and not min(trained) <= level <= max(trained)]
    if beyond:
        note(args, f"slimrt: the model was trained for quantiles {min(trained):g} to {max(trained):g}; beyond them it "
             f"repeats the nearest: {', '.join(beyond)}")  # fmt: skip


def _levels(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 with commas between, for argparse."""
    levels = tuple(parsed(float, part, "numbers with commas between") for part in text.split(","))
    if not all(0 <= level <= 1 for level in levels):
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return levels


def read_series(
    text: str,
    name: str,
    columns: Sequence[str] | None,
    ids: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, NDArray[np.float64]]:
    """The series of a CSV text, by name; what is empty or says NaN is missing.

    Args:
        columns: names, or numbers from 1; None: the last column that holds numbers.
        ids: the column that tells stacked series apart, likewise; None: a column is a series.
        tell: is told of a column that looks like `ids`, where none is given.

    Raises:
        ValueError: no rows, no such column, or one that is not numbers.
    """
    rows = _rows(text, name)
    headed = _is_header(rows[0], rows[1] if len(rows) > 1 else [])
    body, numbers = rows[headed:], [str(i + 1) for i in range(len(rows[0]))]
    _check_widths(rows, name)
    if not body:
        raise ValueError(f"{name}: no rows in it but a header")
    titles = [cell.strip() for cell in rows[0]] if headed else numbers
    names = [
        title if title and titles.count(title) == 1 else number for title, number in zip(titles, numbers, strict=True)
    ]
    table = {column: [row[i] if i < len(row) else "" for row in body] for i, column in enumerate(names)}
    by = None if ids is None else _column(name, ids, names)
    odd = {column: _first_odd(cells, 1 + headed) for column, cells in table.items()}
    numeric = [column for column, complaint in odd.items() if complaint is None and column != by]
    if columns is None and not numeric:
        complaints = "; ".join(f"{column}: {odd[column]}" for column in names if column != by)
        raise ValueError(f"{name}: no column of numbers in it; {complaints}")
    chosen = numeric[-1:] if columns is None else [_column(name, one, names) for one in columns]
    for column in chosen:
        if column not in numeric:
            raise ValueError(f"{name}: column {column} is not numbers: {odd[column] or 'it tells series apart (--id)'}")
    values = {column: np.array([_number(cell) for cell in table[column]], np.float64) for column in chosen}
    if by is not None:
        of = [cell.strip() for cell in table[by]]
        if "" in of:
            raise ValueError(f"{name}: row {of.index('') + 1 + headed} has nothing in column {by}, so is of no series")
        return _unstacked(values, of)
    for column in names:
        if odd[column] is not None and _repeats(table[column]):
            tell(f"slimrt: {name}: column {column} says the same in rows that follow each other; if it tells series "
                 f"apart, give --id {column}")  # fmt: skip
    return values


def _unstacked(values: dict[str, NDArray[np.float64]], ids: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """The rows of each id, ids as they first come; named by it, and by the column where there are several."""
    where = np.array(ids)
    return {
        one if len(values) == 1 else f"{one} {column}": cells[where == one]
        for one in dict.fromkeys(ids)
        for column, cells in values.items()
    }


def _repeats(cells: Sequence[str]) -> bool:
    """Whether several words come in many rows each, one after the other, and then never again."""
    runs = sum(a != b for a, b in zip(cells, cells[1:], strict=False)) + 1
    return 1 < runs == len(set(cells)) <= len(cells) / 2


def _rows(text: str, name: str) -> list[list[str]]:
    """The rows that say something. Lines may end in any way; between cells are semicolons, commas or tabs."""
    lines = io.StringIO(text.removeprefix("\ufeff"), newline=None)
    first = next((line for line in lines if line.strip()), "")
    lines.seek(0)
    between = ";" if ";" in first else "\t" if "\t" in first and "," not in first else ","
    try:
        rows = [row for row in csv.reader(lines, delimiter=between) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ValueError(f"{name}: not a CSV file: {error}") from None
    if not rows:
        raise ValueError(f"{name}: no rows in it")
    return rows


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


def _first_odd(cells: Sequence[str], row: int) -> str | None:
    """Why a column, whose first cell is in this row, is not one of numbers; None of one that is."""
    for i, cell in enumerate(cells, row):
        if _number(cell) is None:
            comma = " (decimals take a point, thousands nothing)" if _number(cell.replace(",", "")) is not None else ""
            return f"row {i} says {cell.strip()!r:.40}{comma}"
    return "nothing in it" if all(math.isnan(_number(cell) or 0) for cell in cells) else None


def _column(name: str, asked: str, names: Sequence[str]) -> str:
    if asked in names:
        return asked
    if asked.isdecimal() and 1 <= int(asked) <= len(names):
        return names[int(asked) - 1]
    raise ValueError(f"{name}: no column {asked}; there are {', '.join(names)}")


def _number(cell: str) -> float | None:
    """A cell's number, NaN where it is missing, None where it is something else or infinite."""
    if cell.strip().lower() in _MISSING:
        return float("nan")
    try:
        value = float(cell)
    except ValueError:
        return None
    return None if math.isinf(value) else value


def _csv(names: Sequence[str], levels: Sequence[float], quantiles: NDArray[np.float32]) -> str:
    """A row a step: the series where there are several, the step from 1, the quantiles."""
    out = io.StringIO()
    writer, several = csv.writer(out, lineterminator="\n"), len(names) > 1
    writer.writerow([*(["series"] if several else []), "step", *(f"{level:g}" for level in levels)])
    for name, rows in zip(names, quantiles, strict=True):
        for step, row in enumerate(rows, 1):
            writer.writerow([*([name] if several else []), step, *(f"{value:.7g}" for value in row)])
    return out.getvalue()


def _record(names: Sequence[str], levels: Sequence[float], quantiles: NDArray[np.float32]) -> dict[str, object]:
    series = {name: rows.tolist() for name, rows in zip(names, quantiles, strict=True)}
    return {"quantile_levels": list(levels), "horizon": quantiles.shape[1], "series": series}
