"""slimrt doctor: the capabilities of this machine, and what slimrt uses of them."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from slimrt import __version__, core, machine
from slimrt.cli.common import Flags, print_json
from slimrt.cli.values import threads
from slimrt.plumbing.units import format_bytes

_PACKAGES = ("numpy", "gguf", "safetensors", "tokenizers", "jinja2", "tqdm")
_NOT_FOR_USERS = ("test", "oracle", "bench", "dev")
_OF_EXTRA = re.compile(r"""([\w.-]+).*;.*extra == ["']([\w-]+)["']""")


def add_flags(flags: Flags) -> None:
    flags.add("-t", "--threads", type=threads, metavar="N", help="CPU threads that measure the bandwidth")
    flags.add("--tune", action="store_true", help="measure again: the fastest access to memory, and rates")
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
        **({"extras": extras} if (extras := _extras()) else {}),
        "isas": cpu["isas"],
        "isa": cpu["isa"],
        "logical_cores": os.cpu_count(),
        "threads": threads or cpu["default_threads"],
        "memory_available": core.available_memory(),
        "read_bandwidth": core.read_bandwidth(threads or 0),
        **_access(threads or 0),
        "devices": {"cpu": cpu["isa"], **(cuda := _cuda_devices())},
        **({"cublaslt": _cublas_lt()} if "cuda:0" in cuda else {}),
        "architectures": list(core.architectures()),
        "executable": sys.executable,
        **({"advice": advice} if (advice := _advice(cpu["isa"], cpu["isas"])) else {}),
    }


def _extras() -> dict[str, str]:
    """Installed packages by extra, and how to install the missing ones; {} if slimrt runs from its source tree."""
    try:
        found = [match.groups() for one in requires("slimrt") or [] if (match := _OF_EXTRA.match(one))]
    except PackageNotFoundError:
        return {}
    extras: dict[str, str] = {}
    for extra in dict.fromkeys(extra for _, extra in found if extra not in _NOT_FOR_USERS):
        versions = {package: _version(package) for package, of in found if of == extra}
        shown = " ".join(f"{package} {value}" for package, value in versions.items())
        missing = "missing" in versions.values()
        extras[extra] = f"{shown} (pip install 'slimrt[{extra}]')" if missing else shown
    return extras


def _advice(isa: str, isas: list[str]) -> list[str]:
    """Reasons why slimrt is slower on this machine than it could be."""
    if isa != "portable":
        return []
    if os.environ.get("SLIMRT_ISA") == isa and len(isas) > 1:
        return [f"SLIMRT_ISA=portable asks for code without vector instructions; without it: {isas[0]}"]
    return ["portable code, without vector instructions, is several times slower: this CPU, or what a virtual machine "
            "shows of it, has none of AVX-512, AVX2 (x86-64) and NEON (AArch64)"]  # fmt: skip


def _access(threads: int) -> dict[str, Any]:
    """Memory access patterns: as set in the environment, or as measured with this number of threads."""
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
    """Name of each device, or why there is none."""
    names, why_none = core.cuda_devices()
    return {f"cuda:{i}": name for i, name in enumerate(names)} or {"cuda": f"none ({why_none})"}


def _cublas_lt() -> str:
    """The library for matrix products of prompts on CUDA devices (weights of all types but F32)."""
    if os.environ.get("SLIMRT_CUBLASLT") == "0":
        return "not used (SLIMRT_CUBLASLT=0)"
    return core.cublas_lt_library() or ("none: prompts take two to three times as long (pip install nvidia-cublas)")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
