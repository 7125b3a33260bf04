"""slimrt inspect: what is in a model file, and what it may be used with."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from slimrt import _core
from slimrt.cli.common import Flags, coloured, model_source, print_json, table
from slimrt.errors import SlimrtError
from slimrt.plan import CACHE_TYPES
from slimrt.units import format_bytes

HELP = "metadata, tensors, and which cache modes a model may use and why not the others"

_LONG = 16  # a list of more values is shown by its first ones


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.output()


def run(args: argparse.Namespace) -> int:
    source = model_source(args)
    report = _report(str(source.gguf))
    if args.json:
        print_json(report)
    else:
        _print(report, all_tensors=args.verbose > 0)
    return 0


def _report(path: str) -> dict[str, Any]:
    file = _core.GgufFile(path)
    tensors: list[dict[str, Any]] = [
        {"name": name, "type": type, "rows": rows, "cols": cols, "bytes": file.tensor_bytes(name)}
        for name, (type, (rows, cols)) in file.tensors().items()
    ]
    report: dict[str, Any] = {
        "path": path,
        "metadata": {key: _short(file.value(key)) for key in file.keys()},
        "parameters": sum(tensor["rows"] * tensor["cols"] for tensor in tensors),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "tensors": tensors,
        "chat_template": "tokenizer.chat_template" in file.keys(),
    }
    try:
        return report | {"cache_modes": [_cache_mode(path, mode) for mode in _core.cache_modes(path)]}
    except SlimrtError as error:  # a vocabulary, or an architecture that only others run: still worth a look
        return report | {"cache_modes": [], "unsupported": str(error)}


def _cache_mode(path: str, mode: dict[str, Any]) -> dict[str, Any]:
    """A line of cache_modes with what a token would take, in f16 and in every type."""
    sizes = {
        name: _core.plan(path, cache=mode["mode"], cache_type_k=name, cache_type_v=name)["cache_bytes_per_token"]
        for name in (CACHE_TYPES if mode["legal"] else ())
    }
    return mode | {"bytes_per_token": sizes.get("f16"), "bytes_per_token_by_type": sizes}


def _short(value: Any) -> Any:
    """A metadata value; of a long list its length and beginning."""
    if isinstance(value, list) and len(value) > _LONG:
        return {"length": len(value), "first": value[:_LONG]}
    return value


def _print(report: dict[str, Any], *, all_tensors: bool) -> None:
    print(f"{report['path']}: {report['parameters']:,} parameters, {format_bytes(report['bytes'])}\n")
    for key, value in report["metadata"].items():
        print(f"{key} = {_text(value)}")
    tensors = report["tensors"]
    print(f"\n{len(tensors)} tensors")
    counts = Counter(tensor["type"] for tensor in tensors)
    for type, count in counts.most_common():
        print(f"  {type}: {count}, {format_bytes(sum(t['bytes'] for t in tensors if t['type'] == type))}")
    if all_tensors:
        rows = [(t["name"], t["type"], str(t["rows"]), str(t["cols"]), str(t["bytes"])) for t in tensors]
        print(table(("name", "type", "rows", "cols", "bytes"), rows))
    print(f"\nchat template: {'yes' if report['chat_template'] else 'no'}\n\ncache modes")
    for mode in report["cache_modes"]:
        if mode["legal"]:
            sizes = mode["bytes_per_token_by_type"]
            answer = coloured("yes", "green", sys.stdout) + f", {sizes['f16']} bytes a token in f16"
            answer += f", {sizes['q8']} in q8, {sizes['q4']} in q4"
        else:
            answer = coloured("no", "red", sys.stdout) + f": {mode['reason']}"
        print(f"  {mode['mode']:3} {answer}")
    if "unsupported" in report:
        print(f"  none: {report['unsupported']}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['length']} values: {', '.join(map(repr, value['first'][:6]))}, ..."
    text = repr(value) if isinstance(value, (str, list)) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
