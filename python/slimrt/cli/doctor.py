"""slimrt doctor: what this machine has, and what slimrt makes of it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slimrt import __version__, core, machine
from slimrt.cli.common import Flags, print_json
from slimrt.cli.values import positive
from slimrt.plumbing.units import format_bytes

_PACKAGES = ("numpy", "gguf", "safetensors", "tokenizers", "jinja2", "tqdm")


def add_flags(flags: Flags) -> None:
    flags.add("-t", "--threads", type=positive, metavar="N", help="to measure the bandwidth with")
    flags.add("--tune", action="store_true", help="measure again how memory is accessed fastest, and rates")
    flags.output()


def run(args: argparse.Namespace) -> int:
    report = _report(args.threads, args.tune)
    if args.json:
        print_json(report)
        return 0
    for name, value in report.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        if isinstance(shown, list):
            shown = ", ".join(shown)
        elif name.startswith("memory_"):
            shown = format_bytes(value)
        elif name.startswith("read_"):
            shown = f"{value:.1f} GB/s"
        print(f"{name.replace('_', ' '):<18} {shown}")
    return 0


def _report(threads: int | None, tune: bool) -> dict[str, Any]:
    cpu = core.cpu_info()
    if tune:
        machine.tuned(cpu["access_kinds"], threads or 0, again=True)
        machine.rates(threads or 0, again=True)
    return {
        "slimrt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "isas": cpu["isas"],
        "isa": cpu["isa"],
        "logical_cores": os.cpu_count(),
        "threads": threads or cpu["default_threads"],
        "memory_available": core.available_memory(),
        "read_bandwidth": core.read_bandwidth(threads or 0),
        **_access(threads or 0),
        "devices": {"cpu": cpu["isa"], **_cuda_devices()},
        "architectures": [one.name for one in core.architectures()],
        "executable": sys.executable,
    }


def _access(threads: int) -> dict[str, Any]:
    """How memory is accessed: as the environment says, or as was measured with so many threads."""
    if fixed := os.environ.get("SLIMRT_ACCESS"):
        return {"access": core.access(), "access_from": f"SLIMRT_ACCESS={fixed}"}
    known = machine.known_access(threads)
    found = {
        kind: f"{one.best} (x{one.gain:.2f}{f', {one.read_share:.0%} of a read' if one.read_share else ''})"
        for kind, one in known.items()
    }
    isa = str(core.cpu_info()["isa"])
    return {
        "access": found or "as usual: nothing was measured yet (--tune, or loading a large model)",
        "access_from": str(machine.kept_in(isa)),
    }


def _cuda_devices() -> dict[str, str]:
    """What each is, or why there is none."""
    names, why_none = core.cuda_devices()
    return {f"cuda:{i}": name for i, name in enumerate(names)} or {"cuda": f"none ({why_none})"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
