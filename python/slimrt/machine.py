"""What is measured of this machine once and kept in the user's cache: the fastest access to memory, and rates."""

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

_FORMAT = 5  # of the file; raise it when kernels access memory otherwise: what was measured before is measured again
_SECONDS, _SECONDS_OF_ALL = 0.2, 0.6  # of trying, for one kind at most, and for all kinds of a load together
_ENVIRONMENT = "SLIMRT_ACCESS"
_ROWS = ("float_rows", "rows")  # kinds of the cache's
_WORTHWHILE = 1.05
_TURNS, _REPETITIONS = 3, 3  # of attention
_FEWEST_ROWS, _MOST_ROWS = 2048, 32768


@dataclass(frozen=True)
class Tuned:
    """The fastest access to memory of one kind (a type of weight; "rows" of the cache, or its "float_rows").

    Attributes:
        best: as SLIMRT_ACCESS takes it, "nta:8192:several".
        gain: the usual access takes so many times as long; 1.0 where it is the best.
        read_share: of the rate of a mere read of the same bytes that products of one token reach; 0.0 of rows.
    """

    best: str
    gain: float
    read_share: float


@dataclass(frozen=True)
class Rates:
    """What bounds all else.

    Attributes:
        read: GB/s of reading memory on all of `threads` threads; read_one: on one.
        int8: multiply-adds a second, in 1e9, of int8 dot products on one thread; f32: of float32.
        threads: of `read`.
    """

    read: float
    read_one: float
    int8: float
    f32: float
    threads: int


@dataclass(frozen=True)
class Decoding:
    """Attention of one token as a layer decodes it.

    Attributes:
        n_heads, n_kv_heads, head_dim: its shape.
        absorbed: values are whole rows of K, which turn as they are read (modes k and k+r); else rows of K and V.
        type, rest: of the rows; of V, or of the residual beside K, `rank` columns.
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


_known: dict[Path, dict[str, Any]] = {}  # what was measured where the file could not be written


def processor() -> str:
    """The CPU's name and model, as far as the system tells them."""
    wanted = ("model name", "cpu family", "model", "stepping", "cpu implementer", "cpu part")
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in wanted:
                found.setdefault(name.strip().lower(), value.strip())
    return ", ".join(f"{name} {found[name]}" for name in wanted if name in found) or platform.processor() or "unknown"


def kept_in(isa: str) -> Path:
    """The file for this CPU and an instruction set."""
    name = f"{processor()}, {platform.machine()}"
    short = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("model name ").split(",")[0]).strip("-")
    return cache_directory() / f"machine-{short}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-{isa}.json"


def tuned(kinds: Iterable[str], n_threads: int, *, isa: str = "", again: bool = False) -> dict[str, Tuned]:
    """The fastest access to memory for each kind on so many threads (0: the default), measured unless it is known.

    Takes a quarter of a second for each kind that is not, less where they are many. again: measure all of them.

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
        with suppress(WontFitError):  # no memory to measure with: as usual
            fresh[kind] = Tuned(**core.tune(kind, isa, n_threads, seconds))
    if fresh:
        _keep(isa, n_threads, {"access": {kind: asdict(one) for kind, one in fresh.items()}})
    return {kind: one for kind, one in (known | fresh).items() if kind in wanted}


def known_access(n_threads: int = 0, *, isa: str = "") -> dict[str, Tuned]:
    """What was measured of so many threads (0: the default) before."""
    isa, n_threads = _resolved(isa, n_threads)
    return {kind: Tuned(**one) for kind, one in _of_threads(isa, n_threads).get("access", {}).items()}


def rates(n_threads: int = 0, *, again: bool = False) -> Rates:
    """Rates of this machine, measured unless they are known; that takes about a second."""
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
    """Nanoseconds of attention for each cached row, measured unless they are known: a few tenths of a second for each.

    Turn by turn, over rows that no cache holds: what they are to each other holds on a machine that others use.
    """
    isa, n_threads = _resolved("", n_threads)
    known = _of_threads(isa, n_threads).get("attention", {})
    wanted = list(dict.fromkeys(kinds))
    if not all(str(kind) in known for kind in wanted):
        if not os.environ.get(_ENVIRONMENT):
            _follow(_ROWS, n_threads, isa)  # as engines will
        turns = [{str(kind): _per_row(kind, isa, n_threads) for kind in wanted} for _ in range(_TURNS)]
        known = {name: median(turn[name] for turn in turns) for name in turns[0]}
        core.set_access("usual")
        _keep(isa, n_threads, {"attention": known})
    return {kind: known[str(kind)] for kind in wanted}


def _per_row(kind: Decoding, isa: str, n_threads: int) -> float:
    of_row = kind.n_kv_heads * kind.head_dim * (1 if kind.absorbed else 2)  # a byte each, at least a half
    rows = min(max(2 * int(core.cpu_info()["cache_bytes"]) // of_row, _FEWEST_ROWS), _MOST_ROWS)
    seconds, _, _ = core.ops.time_attention(
        kind.n_heads, kind.n_kv_heads, kind.head_dim, kind.type, kind.rest, rows,
        repetitions=_REPETITIONS, absorbed=kind.absorbed, rank=kind.rank, isa=isa, n_threads=n_threads,
    )  # fmt: skip
    return float(1e9 * median(seconds) / rows)


def bytes_by_type(file: core.GgufFile) -> dict[str, int]:
    """What tensors of each type take, for follow(): of the types products read, which may not be the file's."""
    weights: dict[str, int] = {}
    for kind, size in core.held(file).values():
        weights[kind] = weights.get(kind, 0) + size
    return weights


def follow(weights: Mapping[str, int], n_threads: int, *, isa: str = "") -> dict[str, Tuned]:
    """Have engines opened from now on access memory as is fastest for weights of these types and bytes.

    Types without a product of their own, and weights that lie in the caches anyway, are left as they are, and so is all
    where SLIMRT_ACCESS says it. Returns what is accessed otherwise than usual.
    """
    core.set_access("usual")
    if os.environ.get(_ENVIRONMENT) or sum(weights.values()) <= core.cpu_info()["cache_bytes"]:
        return {}
    least = core.cpu_info()["cache_bytes"] // 2
    kinds = [kind for kind in core.cpu_info()["access_kinds"] if kind in _ROWS or weights.get(kind, 0) > least]
    return _follow(kinds, n_threads, isa)


def _follow(kinds: Iterable[str], n_threads: int, isa: str) -> dict[str, Tuned]:
    found = {kind: one for kind, one in tuned(kinds, n_threads, isa=isa).items() if one.gain > 1}
    if found:
        core.set_access(",".join(f"{kind}={one.best}" for kind, one in found.items()))
    return found


def use_huge_pages(file: core.GgufFile, n_threads: int) -> float:
    """Copy a model's file into huge pages where it is mapped, if products are 5 % faster there and the copy takes at
    most half of the memory that is free: it is this process's own then, and the file's pages are free to go.

    Returns how many times as fast it is read; 0.0: it stays as it is. So it does where SLIMRT_ACCESS is set, and where
    it lies in the caches anyway.
    """
    size, free = file.bytes().size, core.available_memory()
    if os.environ.get(_ENVIRONMENT) or size <= core.cpu_info()["cache_bytes"] or 2 * size > free:
        return 0.0
    with suppress(WontFitError):
        gain = core.huge_page_gain(file, n_threads)
        if gain > _WORTHWHILE and file.move_to_huge_pages():
            return gain
    return 0.0


def _resolved(isa: str, n_threads: int) -> tuple[str, int]:
    info = core.cpu_info()
    return isa or str(info["isa"]), n_threads or int(info["default_threads"])


def _of_threads(isa: str, n_threads: int) -> dict[str, Any]:
    found: dict[str, Any] = _read(isa)["threads"].get(str(n_threads), {})
    return found


def _read(isa: str) -> dict[str, Any]:
    """The file's content; nothing measured where it is missing, broken or another machine's."""
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
    """Whether all of it can be used. TypeError, ValueError, KeyError: it cannot."""
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
    """Add to the file, or where it cannot be written remember for this process."""
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
