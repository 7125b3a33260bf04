"""The table of a JSON file that compare.py wrote.

python benchmarks/report.py benchmarks/results/FILE.json --all
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HEAD = ("weights", "test", "engine", "tok/s (least - most)", "/ rival", "/ its q8_0", "achieved", "of pure read", "")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def gathered(path: Path | None, machine: dict[str, Any]) -> dict[str, Any]:
    """The results so far in the file that a run adds to: {"machine", "cells"}; new ones without it. machine: as of
    machine.describe(). SystemExit: they are of another one."""
    data = read(path) if path and path.exists() else {"cells": {}}
    if data.setdefault("machine", machine) != machine:
        sys.exit(f"{path} was measured on another machine: {data['machine']}; give another file")
    return data


def contestant_name(engine: str, settings: dict[str, Any], *, several: bool) -> str:
    if engine == "slimrt":
        residual = f" + {settings['rank']} {settings['residual_type']}" if "rank" in settings else ""
        return f"slimrt {settings['cache']} {settings['type']}{residual}"
    parts = [f"llama.cpp {settings['type']}", "flash" if settings["flash"] else "no flash"]
    if several:
        parts.append("one buffer" if settings["unified"] else "a buffer each")
    if settings["n_ubatch"] != 512:
        parts.append(f"ubatch {settings['n_ubatch']}")
    if not settings["repack"]:
        parts.append("not repacked")
    return ", ".join(parts)


def best_rival(cell: dict[str, Any], type: str | None = None) -> str | None:
    """The setting of llama.cpp with the highest median, of all or of one type of K and V."""
    medians = {
        name: statistics.median(speeds(one))
        for name, one in cell["contestants"].items()
        if one["engine"] == "llama.cpp" and one["turns"] and type in (None, one["settings"]["type"])
    }
    return max(medians, key=medians.__getitem__) if medians else None


def speeds(one: dict[str, Any], key: str = "tok_s") -> list[float]:
    return [turn[key] for turn in one["turns"]]


def ratio(cell: dict[str, Any], name: str, other: str | None) -> str:
    """Median of paired turns."""
    if other is None or other == name:
        return "-"
    pairs = zip(speeds(cell["contestants"][name]), speeds(cell["contestants"][other]), strict=False)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def achieved(cell: dict[str, Any], one: dict[str, Any]) -> tuple[str, str]:
    """(GB/s of weights and cache read by a decode, or GMAC/s of a prefill; the share of the pure read beside it)."""
    if cell["test"] == "prefill":
        rates = [cell["multiply_adds"] / cell["settings"]["prefill"] * tok_s / 1e9 for tok_s in speeds(one)]
        return f"{statistics.median(rates):.0f} GMAC/s", "-"
    n = 8 if cell["test"] == "batch8" else 1
    rates, shares = [], []
    for turn in one["turns"]:
        rows = n * (max(cell["depth"], 1) + turn["steps"] / 2) * one["cache_bytes"]
        rates.append((cell["weight_bytes"] + rows) * turn["tok_s"] / n / 1e9)
        shares.append(rates[-1] / turn["read_gbs"])
    return f"{statistics.median(rates):.1f} GB/s", f"{100 * statistics.median(shares):.0f} %"


def note(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"failed: {one['error']}"
    notes = []
    if "tok_s_alone" in one["turns"][0]:
        alone = zip(speeds(one), speeds(one, "tok_s_alone"), strict=True)
        notes.append(f"{statistics.median(a / b for a, b in alone):.2f} x one sequence")
    if one.get("logits_agree", 1) < 0.98:
        notes.append(f"logits correlate only {one['logits_agree']:.3f} with the first row's")
    return "; ".join(notes)


def rows(cell: dict[str, Any], *, every: bool) -> list[tuple[str, ...]]:
    """slimrt's rows and the rival's best; all with `every`."""
    best, best_q8 = best_rival(cell), best_rival(cell, "q8_0")
    where = (f"{cell['shape']} {cell['weights']}", f"{cell['test']}@{cell['depth']}")
    out: list[tuple[str, ...]] = []
    for name, one in cell["contestants"].items():
        if not (every or name == best or one["engine"] == "slimrt"):
            continue
        shown = f"**{name}**" if name == best else name
        if not one["turns"]:
            out.append((*where, shown, "-", "-", "-", "-", "-", note(one)))
            continue
        s = speeds(one)
        speed = f"{statistics.median(s):.2f} ({min(s):.2f} - {max(s):.2f})"
        ratios = (ratio(cell, name, best), ratio(cell, name, best_q8))
        out.append((*where, shown, speed, *ratios, *achieved(cell, one), note(one)))
    return out


def table(cells: dict[str, dict[str, Any]], *, every: bool) -> str:
    """Markdown. Bold: llama.cpp's best setting of a cell, which "/ rival" divides by."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for cell in cells.values():
        lines += rows(cell, every=every)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--all", action="store_true", help="every setting of llama.cpp, not its best alone")
    args = parser.parse_args()
    data = read(args.file)
    print(table(data["cells"], every=args.all))


if __name__ == "__main__":
    main()
