"""What figures were measured on and with."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, dict[str, Any]]:
    """machine: what must be the same for figures to be compared. versions: of what ran."""
    from slimrt import _core

    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "machine": {
            "cpu": names[0] if names else platform.processor(),
            "cores": os.cpu_count(),
            "memory_gib": memory_gib(),
        },
        "versions": {
            "slimrt": _core.__version__,
            "slimrt_commit": commit(),
            "slimrt_core": hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()[:16],
            "isa": _core.cpu_info()["isa"],
            "llama-cpp-python": llama_cpp_version(),
            "python": platform.python_version(),
            "system": platform.platform(),
            "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_", "GGML_"))},
        },
    }


def access_rows_as_measured(n_threads: int) -> str:
    """Has cached rows accessed as slimrt.Model would on so many threads, and says how."""
    from slimrt import core
    from slimrt.machine import tuned

    access = ",".join(f"{kind}={one.best}" for kind, one in tuned(["float_rows", "rows"], n_threads).items())
    core.set_access(access)
    return access


def memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def commit() -> str:
    """The commit of this checkout, with "-dirty" where files differ; the core may be older."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def llama_cpp_version() -> str:
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "missing"


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in _lines("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
