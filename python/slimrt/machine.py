"""Measurements of this machine, made once and stored in the user's cache directory: the fastest prefetch policy for
each type of weight, memory bandwidth, and arithmetic rates."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slimrt import core
from slimrt.errors import WontFitError
from slimrt.plumbing.files import cache_directory, written_beside

_FORMAT = 6  # of the file; raise it when kernels prefetch differently, so that older measurements are repeated
_SECONDS, _SECONDS_OF_ALL = 0.2, 0.6  # time to tune one kind at most, and all kinds of a load together
ENVIRONMENT = "SLIMRT_ACCESS"
_ROWS = ("float_rows", "rows")  # kinds that are cache rows, not weights
_TURNS, _REPETITIONS = 3, 3  # of timing attention: rounds over all kinds, repetitions in a round
_FEWEST_ROWS, _MOST_ROWS = 2048, 32768


@dataclass(frozen=True)
class Tuned:
    """The fastest prefetch policy for one kind of data (a type of weight; "rows" of the cache, or "float_rows").

    Attributes:
        best: the policy, in the syntax of SLIMRT_ACCESS: "nta:8192:several".
        gain: time with the default policy over time with this one; 1.0 if the default is the best.
        read_share: rate at which products of one token read weights, over the rate of only reading the same bytes; 0.0
            for rows.
    """

    best: str
    gain: float
    read_share: float


@dataclass(frozen=True)
class Rates:
    """Peak rates of the machine.

    Attributes:
        read: GB/s of reading memory with `threads` threads. read_one: with one thread.
        int8, f32: 1e9 multiply-adds per second on one thread, of int8 and of float32 dot products.
        threads: threads of `read`.
    """

    read: float
    read_one: float
    int8: float
    f32: float
    threads: int


@dataclass(frozen=True)
class Decoding:
    """Attention of one decoded token in one layer.

    Attributes:
        n_heads, n_kv_heads, head_dim: shape.
        absorbed: the values are whole rows of K, to which RoPE is applied when they are read (modes k and k+r); else
            separate rows of K and V.
        type: of rows of K. rest: type of V, or of the residual beside K, of `rank` columns.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    absorbed: bool
    type: str
    rest: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.n_heads}/{self.n_kv_heads}x{self.head_dim} {self.type} {self.rest} {self.absorbed:d} {self.rank}"


_known: dict[Path, dict[str, Any]] = {}  # measurements of this process whose file could not be written


def processor() -> str:
    """The CPU's name and model from /proc/cpuinfo, or what Python knows of it."""
    wanted = ("model name", "cpu family", "model", "stepping", "cpu implementer", "cpu part")
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in wanted:
                found.setdefault(name.strip().lower(), value.strip())
    return ", ".join(f"{name} {found[name]}" for name in wanted if name in found) or platform.processor() or "unknown"


def kept_in(isa: str) -> Path:
    """Path of the file with measurements of this CPU and an instruction set."""
    name = f"{processor()}, {platform.machine()}"
    short = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("model name ").split(",")[0]).strip("-")
    return cache_directory() / f"machine-{short}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-{isa}.json"


def tuned(kinds: Iterable[str], n_threads: int, *, isa: str = "", again: bool = False) -> dict[str, Tuned]:
    """The fastest prefetch policy for each kind with n_threads threads (0: the default).

    Kinds that were not measured before are measured now: a quarter of a second each, less if there are many. again:
    measure all of them. Kinds for which memory does not suffice are left out.

    Raises:
        ValueError: an unknown kind or instruction set.
    """
    isa, n_threads = _resolved(isa, n_threads)
    wanted = list(dict.fromkeys(kinds))
    known = {} if again else known_access(n_threads, isa=isa)
    fresh: dict[str, Tuned] = {}
    missing = [kind for kind in wanted if kind not in known]
    for kind in missing:
        seconds = _SECONDS if again else min(_SECONDS, _SECONDS_OF_ALL / len(missing))
        with suppress(WontFitError):  # too little memory to measure: keep the default policy
            fresh[kind] = Tuned(**core.tune(kind, isa, n_threads, seconds))
    if fresh:
        _keep(isa, n_threads, {"access": {kind: asdict(one) for kind, one in fresh.items()}})
    return {kind: one for kind, one in (known | fresh).items() if kind in wanted}


def known_access(n_threads: int = 0, *, isa: str = "") -> dict[str, Tuned]:
    """The prefetch policies that were measured before, with n_threads threads (0: the default)."""
    isa, n_threads = _resolved(isa, n_threads)
    return {kind: Tuned(**one) for kind, one in _of_threads(isa, n_threads).get("access", {}).items()}


def rates(n_threads: int = 0, *, again: bool = False) -> Rates:
    """Peak rates of this machine; measured, in about a second, if they are not stored yet. again: measure anyway."""
    isa, n_threads = _resolved("", n_threads)
    known = _of_threads(isa, n_threads).get("rates")
    if known and not again:
        return Rates(**known)
    found = Rates(
        read=core.read_bandwidth(n_threads),
        read_one=core.read_bandwidth(1),
        int8=core.ops.dot_peak("q8_0", isa),
        f32=core.ops.dot_peak("f32", isa),
        threads=n_threads,
    )
    _keep(isa, n_threads, {"rates": asdict(found)})
    return found


def attention_rates(kinds: Iterable[Decoding], n_threads: int = 0) -> dict[Decoding, float]:
    """Nanoseconds of attention per cached row for each kind; measured, in a few tenths of a second each, if not stored.

    The kinds are timed in alternation, over more rows than fit the CPU's caches, and all again if one is missing, so
    that their ratios are right even if other processes load the machine.
    """
    isa, n_threads = _resolved("", n_threads)
    known = _of_threads(isa, n_threads).get("attention", {})
    wanted = list(dict.fromkeys(kinds))
    if not all(str(kind) in known for kind in wanted):
        if not os.environ.get(ENVIRONMENT):
            _follow(_ROWS, n_threads, isa)  # prefetch as engines will
        turns = [{str(kind): _per_row(kind, isa, n_threads) for kind in wanted} for _ in range(_TURNS)]
        known = {name: median(turn[name] for turn in turns) for name in turns[0]}
        core.set_access("usual")
        _keep(isa, n_threads, {"attention": known})
    return {kind: known[str(kind)] for kind in wanted}


def _per_row(kind: Decoding, isa: str, n_threads: int) -> float:
    of_row = kind.n_kv_heads * kind.head_dim * (1 if kind.absorbed else 2)  # bytes, at 8 bits an element
    rows = min(max(2 * int(core.cpu_info()["cache_bytes"]) // of_row, _FEWEST_ROWS), _MOST_ROWS)
    seconds, _, _ = core.ops.time_attention(
        kind.n_heads, kind.n_kv_heads, kind.head_dim, kind.type, kind.rest, rows,
        repetitions=_REPETITIONS, absorbed=kind.absorbed, rank=kind.rank, isa=isa, n_threads=n_threads,
    )  # fmt: skip
    return float(1e9 * median(seconds) / rows)


def bytes_by_type(file: core.GgufFile) -> dict[str, int]:
    """Bytes of all matrices of each type, for follow(). The types are those in memory, not always the file's."""
    weights: dict[str, int] = {}
    for kind, size in core.held(file).values():
        weights[kind] = weights.get(kind, 0) + size
    return weights


def follow(weights: Mapping[str, int], n_threads: int, *, isa: str = "") -> dict[str, Tuned]:
    """Make engines created from now on use the fastest prefetch policies for weights of these types and bytes.

    Types without a kernel of their own, and weights that fit the CPU's caches, keep the default policy, and so does
    everything if SLIMRT_ACCESS is set. Returns the policies that differ from the default.
    """
    core.set_access("usual")
    if os.environ.get(ENVIRONMENT) or sum(weights.values()) <= core.cpu_info()["cache_bytes"]:
        return {}
    least = core.cpu_info()["cache_bytes"] // 2
    kinds = [kind for kind in core.cpu_info()["access_kinds"] if kind in _ROWS or weights.get(kind, 0) > least]
    return _follow(kinds, n_threads, isa)


def _follow(kinds: Iterable[str], n_threads: int, isa: str) -> dict[str, Tuned]:
    found = {kind: one for kind, one in tuned(kinds, n_threads, isa=isa).items() if one.gain > 1}
    if found:
        core.set_access(",".join(f"{kind}={one.best}" for kind, one in found.items()))
    return found


def _resolved(isa: str, n_threads: int) -> tuple[str, int]:
    info = core.cpu_info()
    return isa or str(info["isa"]), n_threads or int(info["default_threads"])


def _of_threads(isa: str, n_threads: int) -> dict[str, Any]:
    found: dict[str, Any] = _read(isa)["threads"].get(str(n_threads), {})
    return found


def _read(isa: str) -> dict[str, Any]:
    """The file's content; without measurements if it is missing, broken or of another machine."""
    path = kept_in(isa)
    about = {"format": _FORMAT, "cpu": processor(), "isa": isa}
    if path in _known:
        return _known[path]
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(path.read_text())
        if about == {key: content[key] for key in about} and _is_sound(content):
            return dict(content)
    return about | {"threads": {}}


def _is_sound(content: Mapping[str, Any]) -> bool:
    """Whether all measurements are valid. TypeError, ValueError, KeyError: they are not."""
    for of in content["threads"].values():
        for kind, one in of.get("access", {}).items():
            tuned_one = Tuned(**one)
            if kind not in core.cpu_info()["access_kinds"] or not 1 <= tuned_one.gain < 100:
                return False
            core.access(f"{kind}={tuned_one.best}")
        if not all(0 < ns < 1e9 for ns in of.get("attention", {}).values()):
            return False
        if "rates" in of and not min(asdict(Rates(**of["rates"])).values()) > 0:
            return False
    return True


def _keep(isa: str, n_threads: int, part: Mapping[str, Any]) -> None:
    """Add measurements to the file, or remember them in this process if it cannot be written."""
    path, content = kept_in(isa), _read(isa)
    of = content["threads"].setdefault(str(n_threads), {})
    for name, value in part.items():
        of[name] = of.get(name, {}) | value
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")
    except OSError:
        _known[path] = content
    else:
        _known.pop(path, None)
