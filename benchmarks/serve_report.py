"""The table of a JSON file that serve.py wrote: a line a figure, a column a server.

python benchmarks/serve_report.py benchmarks/results/FILE.json
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import report

# (name, keys to it, factor, unit) of each figure that a scenario may have
FIGURES = (
    ("output", ("tok_s",), 1, "tok/s"),
    ("first token, p50", ("first", "p50"), 1, "s"),
    ("first token, p99", ("first", "p99"), 1, "s"),
    ("between tokens, p50", ("gap", "p50"), 1e3, "ms"),
    ("between tokens, p99", ("gap", "p99"), 1e3, "ms"),
    ("between tokens, max", ("gap", "max"), 1e3, "ms"),
    ("whole answer, p50", ("whole", "p50"), 1, "s"),
    ("whole answer, p99", ("whole", "p99"), 1, "s"),
    ("long prompt's first token, alone", ("first_alone",), 1, "s"),
    ("long prompt's first token", ("first",), 1, "s"),
    ("between tokens before, p50", ("gap_before", "p50"), 1e3, "ms"),
    ("the streams' output meanwhile", ("tok_s_meanwhile",), 1, "tok/s"),
    ("first token after the first turn, p50", ("first_later", "p50"), 1, "s"),
    ("prompt tokens reused", ("reused",), 100, "%"),
    ("of them possible", ("possible",), 100, "%"),
    ("refused within, p99", ("refusal", "p99"), 1e3, "ms"),
    ("memory allocated", ("memory", "anonymous"), 2**-20, "MiB"),
    ("requests", ("requests_s",), 1, "/s"),
    ("memory after warm-up", ("grown",), 2**-20, "MiB more"),
    ("memory that a request leaves", ("bytes_a_request",), 1, "bytes"),
    ("client's own CPU", ("client_cpu",), 100, "% of a core"),
    ("pure read", ("read_gbs",), 1, "GB/s"),
)


def value(turn: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    at: Any = turn
    for key in keys:
        at = at.get(key) if isinstance(at, dict) else None
    return float(at) if isinstance(at, int | float) else None


def values(one: dict[str, Any], keys: tuple[str, ...]) -> list[float]:
    found = (value(turn, keys) for turn in one["turns"])
    return [x for x in found if x is not None]


def shown(one: dict[str, Any], keys: tuple[str, ...], factor: float) -> str:
    """Median (least - most) of the turns."""
    some = [x * factor for x in values(one, keys)]
    if not some:
        return "-"
    middle = f"{statistics.median(some):.4g}"
    return f"{middle} ({min(some):.4g} - {max(some):.4g})" if len(some) > 1 else middle


def ratio(first: dict[str, Any], last: dict[str, Any], keys: tuple[str, ...]) -> str:
    """Median of paired turns."""
    pairs = zip(values(first, keys), values(last, keys), strict=False)
    some = [a / b for a, b in pairs if b]
    return f"{statistics.median(some):.2f}" if some and first is not last else "-"


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Markdown; "/ last" is the first server's figure over the last one's."""
    lines: list[tuple[str, ...]] = []
    for name, cell in cells.items():
        servers = cell["contestants"]
        head = (name, *(f"{server} {_settings(one)}" for server, one in servers.items()), "first / last")
        lines += [head, ("---",) * len(head)] if not lines or len(lines[0]) != len(head) else [("",) * len(head), head]
        first, last = next(iter(servers.values())), list(servers.values())[-1]
        for title, keys, factor, unit in FIGURES:
            cells_of_line = [shown(one, keys, factor) for one in servers.values()]
            if any(text != "-" for text in cells_of_line):
                lines.append((f"{title}, {unit}", *cells_of_line, ratio(first, last, keys)))
        if any("planned" in one for one in servers.values()):
            plans = (f"{one['planned'] * 2**-20:.4g}" if "planned" in one else "-" for one in servers.values())
            lines.append(("planned, beside the interpreter, MiB", *plans, "-"))
        for key in ("statuses", "odd", "outcomes", "blocks"):
            texts = ["; ".join(str(turn[key]) for turn in one["turns"] if turn.get(key)) for one in servers.values()]
            if any(texts):
                lines.append((key, *texts, ""))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _settings(one: dict[str, Any]) -> str:
    if one["engine"] == "slimrt":
        return ""
    return f"(-fa {'on' if one['settings']['flash'] else 'off'} -b {one['settings']['n_batch']})"


if __name__ == "__main__":
    print(table(report.read(Path(sys.argv[1]))["cells"]))
