"""slimrt forecast: quantile forecasts of time series."""

from __future__ import annotations

import argparse
import csv
import io
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimrt.cli.common import (
    Flags,
    as_json,
    beside_model,
    model_source,
    note,
    open_model,
    output_format,
    read_input,
    write_out,
)
from slimrt.cli.flags import Collect
from slimrt.cli.values import is_number, parsed, positive, seed
from slimrt.forecast.plot import plot_forecast
from slimrt.forecast.predict import answered_levels, enough_context, rows_together
from slimrt.forecast.table import Columns, Read, read_series
from slimrt.measure.plots import check_plot
from slimrt.plumbing.files import check_target

_AT_ONCE = 32  # sequences: sample paths, or series, computed together
_FORMATS = ("csv", "json")


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument(
        "csv", metavar="CSV", nargs="*", help="a file with a row a step, with dates or oldest first (else stdin)"
    )
    flags.add("--column", twin=False, action=Collect, default=[], metavar="NAME", help="column to forecast, by name "
              "or number from 1; may be repeated; default: the last numeric one")  # fmt: skip
    flags.add(
        "--id",
        twin=False,
        metavar="NAME",
        help="column with the name of each row's series, where several series are stacked",
    )
    flags.add(
        "--date-column",
        "--timestamp",
        twin=False,
        metavar="NAME",
        help="column with each row's date; default: the first "
        "one of dates, if there is one; none: rows are in order, a step apart",
    )
    flags.add(
        "--date-format",
        twin=False,
        metavar="FORMAT",
        help="how dates are written, as strptime has it, such as %%d/%%m/%%Y; "
        "default: inferred where only one reading is possible",
    )
    flags.add(
        "--freq",
        twin=False,
        metavar="STEP",
        help="length of a step: s, min, h, D, B, W, MS, ME, QS, QE, YS, YE, or several "
        "as in 15min; a row belongs to the step it falls in; default: inferred from the dates",
    )
    flags.add(
        "-n",
        "--horizon",
        type=positive,
        metavar="N",
        help="steps to forecast; default: as many as the model was trained for",
    )
    flags.add(
        "--quantiles",
        type=_levels,
        goes_on=is_number,
        default=(0.1, 0.5, 0.9),
        metavar="Q[,Q]",
        help="default: 0.1,0.5,0.9",
    )
    flags.add("--joint", twin=False, action="store_true", help="forecast the series together, so that each informs the "
              "others (Chronos-2); their last rows are of one time")  # fmt: skip
    flags.add("--num-samples", type=positive, metavar="N", help="sample paths of Chronos; default: as the model says")
    flags.add("-s", "--seed", type=seed, metavar="N", help="seed of the sample paths; default: a new one")
    flags.add("--format", "--output-format", twin=False, choices=_FORMATS, help="default: what -o ends in, else csv")
    flags.add("-o", "--output", twin=False, metavar="FILE", help="write the CSV or JSON there; default: stdout")
    flags.add(
        "--plot", twin=False, metavar="FILE", help="plot series and quantiles (.png, .svg, .pdf; needs the extra plot)"
    )
    flags.engine(encoder=True, several=True)
    flags.output()


def run(args: argparse.Namespace) -> int:
    given = beside_model(args, args.csv)
    if len(given) > 1:
        args.usage_error(f"give one CSV after the model, not {' and '.join(given)}")
    if args.plot is not None:
        check_plot(args.plot)
    form = output_format(args, _FORMATS)
    if args.output is not None:
        check_target(Path(args.output))
    if not given and sys.stdin.isatty():
        args.usage_error("which series? give CSV after the model, or pipe one in")
    source = model_source(args)
    file = given[0] if given else None
    name = "stdin" if file in (None, "-") else file
    columns = Columns(args.column, args.id, args.date_column, args.date_format, args.freq)
    read = read_series(read_input(file), name, columns, lambda text: note(args, f"slimrt: {text}"))
    values = [one.values for one in read.series.values()]
    if args.joint:
        _require_one_end(read)
        args.n_source = args.n_source or rows_together(source, values, args.horizon)
    with (
        open_model(args, source, args.ctx or enough_context(source), n_seqs=_AT_ONCE) as model,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        quantiles = model.predict_quantiles(
            values, args.horizon, args.quantiles, num_samples=args.num_samples, seed=args.seed,
            cross_learning=args.joint,
        )  # fmt: skip
    for one in said:
        note(args, f"slimrt: {one.message}")
    forecast = Forecast(read, quantiles, args.quantiles, answered_levels(source, args.quantiles))
    if args.plot is not None:
        title = f"{Path(name).name}: {quantiles.shape[1]} steps by {source.path.name}"
        told = plot_forecast(read, quantiles, forecast.answered, title, args.plot)
        if told:
            note(args, f"slimrt: {args.plot}: {told}")
    write_out(args.output, as_json(forecast.record()) + "\n" if form == "json" else forecast.csv())
    return 0


def _require_one_end(read: Read) -> None:
    """ValueError: series with dates do not go on with the same steps."""
    ends = {name: one.timeline.future(2) for name, one in read.series.items() if one.timeline is not None}
    first = next(iter(ends), "")
    for name, dates in ends.items():
        if dates != ends[first]:
            raise ValueError(
                f"series {first} goes on with {', '.join(ends[first])}, series {name} with {', '.join(dates)}: only "
                "series that end at the same time are forecast together, so leave out --joint"
            )


def _levels(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 separated by commas, for argparse."""
    levels = tuple(parsed(float, part, "numbers separated by commas") for part in text.split(","))
    if not all(0 <= level <= 1 for level in levels):
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return levels


@dataclass(frozen=True)
class Forecast:
    """The output.

    Attributes:
        quantiles: float32 (batch, horizon, q). levels: as asked for. answered: those of the quantiles, which are
            clamped to the trained range.
    """

    read: Read
    quantiles: NDArray[np.float32]
    levels: Sequence[float]
    answered: Sequence[float]

    def dates(self, name: str) -> list[str] | None:
        timeline = self.read.series[name].timeline
        return None if timeline is None else timeline.future(self.quantiles.shape[1])

    def csv(self) -> str:
        """One row a step: the series if there are several, the date (or step number from 1), the quantiles."""
        out = io.StringIO()
        writer, several = csv.writer(out, lineterminator="\n"), len(self.read.series) > 1
        levels = [
            f"{level:g}" if level == answered else f"{level:g} (as {answered:g})"
            for level, answered in zip(self.levels, self.answered, strict=True)
        ]
        writer.writerow([*(["series"] if several else []), self.read.dated or "step", *levels])
        for name, rows in zip(self.read.series, self.quantiles, strict=True):
            steps = self.dates(name) or range(1, len(rows) + 1)
            for step, row in zip(steps, rows, strict=True):
                writer.writerow([*([name] if several else []), step, *(f"{value:.7g}" for value in row)])
        return out.getvalue()

    def record(self) -> dict[str, object]:
        """The same for JSON, with the answered levels; dates by series, if there are dates."""
        names = list(self.read.series)
        values = {name: rows.tolist() for name, rows in zip(names, self.quantiles, strict=True)}
        record = {"quantile_levels": list(self.levels), "answered_levels": list(self.answered)}
        dates = {"dates": {name: self.dates(name) for name in names}} if self.read.dated else {}
        return record | {"horizon": self.quantiles.shape[1], "series": values} | dates
