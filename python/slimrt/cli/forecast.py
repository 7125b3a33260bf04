"""slimrt forecast: quantiles of what follows a time series."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimrt.cli.common import Collect, Flags, as_json, model_source, open_model, positive
from slimrt.files import check_target, decode_text, written_beside
from slimrt.forecast.predict import enough_context
from slimrt.plots import check_plot, plot_forecast

HELP = "forecast time series with Chronos and Chronos-Bolt: CSV in, quantiles out; several columns are one batch"
_AT_ONCE = 32  # sequences: sample paths, or series
_MISSING = ("", "nan", "na", "null", "none")


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument(
        "csv", metavar="CSV", nargs="?", help="a file with a row a step, oldest first (else stdin)"
    )
    flags.add("--column", action=Collect, default=[], metavar="NAME", help="to forecast, by name or number from 1; may "
              "be repeated; default: the last one of numbers")  # fmt: skip
    flags.add("-n", "--horizon", type=positive, metavar="N", help="steps; default: what the model was trained for")
    flags.add("--quantiles", type=_levels, default=(0.1, 0.5, 0.9), metavar="Q[,Q]", help="default: 0.1,0.5,0.9")
    flags.add(
        "--num-samples", type=positive, metavar="N", help="paths that Chronos draws; default: what the model says"
    )
    flags.add("--seed", type=int, metavar="N", help="makes the paths reproducible")
    flags.add("-o", "--output", metavar="FILE", help="write the CSV or JSON there; default: stdout")
    flags.add("--plot", metavar="FILE", help="draw series and quantiles (.png, .svg, .pdf; needs the extra plot)")
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    if args.csv is None and args.model and args.positional:
        args.csv, args.positional = args.positional, None
    if args.plot is not None:
        check_plot(args.plot)
    if args.output is not None:
        check_target(Path(args.output))
    if args.csv is None and sys.stdin.isatty():
        args.usage_error("which series? give CSV after the model, or pipe one in")
    data = Path(args.csv).read_bytes() if args.csv is not None else sys.stdin.buffer.read()
    series = read_series(decode_text(data, args.csv or "stdin"), args.csv or "stdin", args.column)
    source = model_source(args)
    with open_model(args, source, args.ctx or enough_context(source), n_seqs=_AT_ONCE) as model:
        quantiles = model.predict_quantiles(
            list(series.values()), args.horizon, args.quantiles, num_samples=args.num_samples, seed=args.seed
        )
    if args.plot is not None:
        plot_forecast(series, quantiles, args.quantiles, args.plot)
    names = list(series)
    if args.json:
        text = as_json(_record(names, args.quantiles, quantiles)) + "\n"
    else:
        text = _csv(names, args.quantiles, quantiles)
    if args.output is None:
        print(text, end="")
    else:
        with written_beside(Path(args.output)) as partial:
            partial.write_text(text, encoding="utf-8")
    return 0


def _levels(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 with commas between, for argparse."""
    levels = tuple(float(part) for part in text.split(","))
    if not all(0 <= level <= 1 for level in levels):
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return levels


def read_series(text: str, name: str, columns: Sequence[str] | None) -> dict[str, NDArray[np.float64]]:
    """The columns of a CSV text, by name; what is empty or says NaN is missing.

    Args:
        columns: names, or numbers from 1; None: the last column that holds numbers.

    Raises:
        ValueError: no rows, no such column, or one that is not numbers.
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    if not rows:
        raise ValueError(f"{name}: no rows in it")
    headed = not any(_number(cell) is not None for cell in rows[0])
    names = [cell.strip() for cell in rows[0]] if headed else [str(i + 1) for i in range(len(rows[0]))]
    body = rows[1:] if headed else rows
    table = {column: [_number(row[i]) if i < len(row) else np.nan for row in body] for i, column in enumerate(names)}
    numeric = [column for column, values in table.items() if values and None not in values]
    if not numeric:
        raise ValueError(f"{name}: no column of numbers in it; there are {', '.join(names)}")
    chosen = [_column(name, one, names) for one in columns] if columns else numeric[-1:]
    for column in chosen:
        if column not in numeric:
            line = table[column].index(None) + 1 + headed if body else 1
            raise ValueError(f"{name}: column {column} is not numbers: see row {line}")
    return {column: np.array(table[column], np.float64) for column in chosen}


def _column(name: str, asked: str, names: Sequence[str]) -> str:
    if asked in names:
        return asked
    if asked.isdecimal() and 1 <= int(asked) <= len(names):
        return names[int(asked) - 1]
    raise ValueError(f"{name}: no column {asked}; there are {', '.join(names)}")


def _number(cell: str) -> float | None:
    """A cell's number, NaN where it is missing, None where it is something else."""
    if cell.strip().lower() in _MISSING:
        return float("nan")
    try:
        return float(cell)
    except ValueError:
        return None


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
