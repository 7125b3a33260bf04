"""slimrt forecast: quantiles of what follows a time series."""

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

from slimrt.cli.common import Collect, Flags, as_json, model_source, note, open_model, parsed, positive
from slimrt.forecast.plot import plot_forecast
from slimrt.forecast.predict import answered_levels, enough_context
from slimrt.forecast.table import Columns, Read, read_series
from slimrt.measure.plots import check_plot
from slimrt.plumbing.files import check_target, decode_text, written_beside

HELP = "forecast time series with Chronos and Chronos-Bolt: CSV in, quantiles out; several columns are one batch"
_AT_ONCE = 32  # sequences: sample paths, or series


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument(
        "csv", metavar="CSV", nargs="?", help="a file with a row a step, with dates or oldest first (else stdin)"
    )
    flags.add("--column", action=Collect, default=[], metavar="NAME", help="to forecast, by name or number from 1; may "
              "be repeated; default: the last one of numbers")  # fmt: skip
    flags.add("--id", metavar="NAME", help="column that says which series a row belongs to, where several are stacked")
    flags.add("--date-column", "--timestamp", metavar="NAME", help="column that says when a row is; default: the first "
              "one of dates, if there is one; none: rows are taken as they follow each other")  # fmt: skip
    flags.add("--date-format", metavar="FORMAT", help="how dates are written, as strptime has it, such as %%d/%%m/%%Y; "
              "default: found out where one reading is possible")  # fmt: skip
    flags.add("--freq", metavar="STEP", help="insist on a step: s, min, h, D, B, W, MS, ME, QS, QE, YS, YE, or several "
              "as in 15min; a row counts for the one it falls in; default: found in the dates")  # fmt: skip
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
    name = args.csv or "stdin"
    columns = Columns(args.column, args.id, args.date_column, args.date_format, args.freq)
    read = read_series(decode_text(data, name), name, columns, lambda text: note(args, f"slimrt: {text}"))
    source = model_source(args)
    with (
        open_model(args, source, args.ctx or enough_context(source), n_seqs=_AT_ONCE) as model,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        quantiles = model.predict_quantiles(
            [one.values for one in read.series.values()], args.horizon, args.quantiles, num_samples=args.num_samples,
            seed=args.seed,
        )  # fmt: skip
    for one in said:
        note(args, f"slimrt: {one.message}")
    forecast = Forecast(read, quantiles, args.quantiles, answered_levels(source, args.quantiles))
    if args.plot is not None:
        title = f"{Path(name).name}: {quantiles.shape[1]} steps by {source.path.name}"
        told = plot_forecast(read, quantiles, forecast.answered, title, args.plot)
        if told:
            note(args, f"slimrt: {args.plot}: {told}")
    text = as_json(forecast.record()) + "\n" if args.json else forecast.csv()
    if args.output is None:
        print(text, end="")
    else:
        with written_beside(Path(args.output)) as partial:
            partial.write_text(text, encoding="utf-8")
    return 0


def _levels(text: str) -> tuple[float, ...]:
    """Numbers from 0 to 1 with commas between, for argparse."""
    levels = tuple(parsed(float, part, "numbers with commas between") for part in text.split(","))
    if not all(0 <= level <= 1 for level in levels):
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return levels


@dataclass(frozen=True)
class Forecast:
    """What is written.

    Attributes:
        quantiles: float32 (batch, horizon, q). levels: asked for. answered: that they are of.
    """

    read: Read
    quantiles: NDArray[np.float32]
    levels: Sequence[float]
    answered: Sequence[float]

    def dates(self, name: str) -> list[str] | None:
        timeline = self.read.series[name].timeline
        return None if timeline is None else timeline.future(self.quantiles.shape[1])

    def csv(self) -> str:
        """A row a step: the series where there are several, its date (or number from 1), the quantiles."""
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
        """The same for JSON; dates by series where there are some, and the levels that the quantiles are of."""
        names = list(self.read.series)
        values = {name: rows.tolist() for name, rows in zip(names, self.quantiles, strict=True)}
        record = {"quantile_levels": list(self.levels), "answered_levels": list(self.answered)}
        dates = {"dates": {name: self.dates(name) for name in names}} if self.read.dated else {}
        return record | {"horizon": self.quantiles.shape[1], "series": values} | dates
