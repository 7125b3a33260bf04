"""slimrt cache: list or remove the files that slimrt keeps on disk."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimrt.cli.common import Flags, note, print_json, table
from slimrt.modelfile.kept import Kept, forget, kept
from slimrt.plumbing.files import cache_directory
from slimrt.plumbing.units import format_bytes

_WHAT = {
    "model": "converted model",
    "measurements": "measurements",
    "leftover": "left by a conversion that was killed, or is still running",
}
_AGES = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "hours"), (60 * 2, 60, "minutes"), (0, 1, "seconds"))


def add_flags(flags: Flags) -> None:
    flags.parser.add_argument(
        "action", metavar="list|clear", choices=("list", "clear"), help="list: what there is; clear: remove it"
    )
    flags.parser.add_argument("names", metavar="NAME", nargs="*", default=[], help="a file that list shows, its name "
                              "before the last dash, or what it was made from; none: all")  # fmt: skip
    flags.add("-y", "--yes", twin=False, action="store_true", help="remove without asking")
    flags.output()


def run(args: argparse.Namespace) -> int:
    found = kept()
    chosen = [one for one in found if not args.names or any(_is(one, name) for name in args.names)]
    for name in args.names:
        if not any(_is(one, name) for one in found):
            there = ", ".join(one.path.name for one in found) or "nothing"
            raise FileNotFoundError(f"{name} is not in {cache_directory()}; there is {there}")
    return _clear(args, chosen) if args.action == "clear" else _list(args, chosen)


def _is(one: Kept, name: str) -> bool:
    return name in (one.path.name, one.title) or bool(one.source) and str(Path(name).absolute()) == one.source


def _list(args: argparse.Namespace, found: Sequence[Kept]) -> int:
    from slimrt.modelfile.hub import hub_cache

    if args.json:
        print_json({"folder": str(cache_directory()), "files": _as_data(found)})
        return 0
    print(f"{cache_directory()}: {_total(found)}")
    if found:
        now = time.time()
        rows = [
            (one.path.name, format_bytes(one.bytes), _age(now - one.made), one.source or _WHAT[one.what])
            for one in found
        ]
        print(table(("name", "size", "age", "from"), rows))
    print(f"Downloads from Hugging Face are in its own cache, {hub_cache()}: hf cache ls, hf cache rm")
    return 0


def _clear(args: argparse.Namespace, chosen: Sequence[Kept]) -> int:
    if chosen and not args.yes:
        if not sys.stdin.isatty():
            args.usage_error(f"there is no terminal to ask on: --yes removes {_total(chosen)}")
        print(f"remove {_total(chosen)} from {cache_directory()}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            note(args, "nothing removed")
            return 1
    removed = [one for one in chosen if forget(one)]
    if args.json:
        print_json({"folder": str(cache_directory()), "removed": _as_data(removed)})
    else:
        print(f"removed {_total(removed)}")
    for one in chosen:
        if one not in removed:
            note(args, f"slimrt: {one.path.name} is being written and was not removed")
    return 0


def _total(found: Sequence[Kept]) -> str:
    return f"{len(found)} file{'' if len(found) == 1 else 's'}, {format_bytes(sum(one.bytes for one in found))}"


def _as_data(found: Sequence[Kept]) -> list[dict[str, Any]]:
    return [asdict(one) | {"path": str(one.path)} for one in found]


def _age(seconds: float) -> str:
    """An age such as "3 days" or "1 second"."""
    size, unit = next((size, unit) for least, size, unit in _AGES if seconds >= least or size == 1)
    number = int(max(seconds, 0) // size)
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"
