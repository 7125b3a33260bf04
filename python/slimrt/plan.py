"""What a model would take in memory, by the allocator's own count, without reading a weight."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrt import _core
from slimrt.arguments import real, unknown, whole
from slimrt.errors import CacheUnsupportedError, SlimrtError, UnsupportedError, WontFitError
from slimrt.results import MemorySizes, PlanResult, PlanRow
from slimrt.source import ModelSource
from slimrt.units import parse_bytes

DEVICES = ("auto", "cpu")
CACHE_TYPES = ("f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4")
BLOCK = 32  # tokens in a cache block: a context between two multiples costs as much as the larger


@dataclass(frozen=True)
class CacheChoice:
    """The checked cache arguments, in the form the core takes.

    Attributes:
        mode: "auto", a mode, or a mode for each layer.
    """

    mode: str | tuple[str, ...]
    type_k: str
    type_v: str
    sparse_threshold: float

    @classmethod
    def of(
        cls,
        cache: str | Sequence[str],
        cache_type: str,
        cache_type_k: str | None,
        cache_type_v: str | None,
        *,
        sparse_threshold: float,
    ) -> CacheChoice:
        type_k = cache_type if cache_type_k is None else cache_type_k
        type_v = cache_type if cache_type_v is None else cache_type_v
        for name in (cache_type, type_k, type_v):
            if name not in CACHE_TYPES:
                raise UnsupportedError(unknown("cache type", name, CACHE_TYPES))
        if not isinstance(cache, Sequence) or not cache:
            raise ValueError(f"cache must be a mode, or a mode for each layer, got {cache!r}")
        share = real("sparse_threshold", sparse_threshold)
        if not 0 <= share < 1:
            raise ValueError(f"sparse_threshold must be at least 0 and below 1, got {sparse_threshold}")
        return cls(cache if isinstance(cache, str) else tuple(cache), type_k, type_v, share)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "cache": self.mode if isinstance(self.mode, str) else list(self.mode),
            "cache_type_k": self.type_k,
            "cache_type_v": self.type_v,
            "sparse_threshold": self.sparse_threshold,
        }


def check_device(device: str) -> None:
    """Raises UnsupportedError for a device that slimrt does not have."""
    if device not in DEVICES:
        raise UnsupportedError(unknown("device", device, DEVICES))


def check_cache(source: ModelSource, choice: CacheChoice) -> None:
    """Refuses a cache mode that is unknown, or illegal for the model, before anything slow begins.

    Raises:
        UnsupportedError: an unknown mode (the message suggests the nearest).
        CacheUnsupportedError: an illegal one; the message names the layer, the reason and the legal modes.
    """
    modes = {mode["mode"]: mode for mode in _core.cache_modes(str(source.gguf))}
    asked = [choice.mode] if isinstance(choice.mode, str) else list(choice.mode)
    for name in asked:
        if name != "auto" and name not in modes:
            raise UnsupportedError(unknown("cache mode", name, ["auto", *modes]))
    if choice.mode in modes and not modes[choice.mode]["legal"]:
        legal = ", ".join(name for name, mode in modes.items() if mode["legal"])
        raise CacheUnsupportedError(
            f"cache mode '{choice.mode}' cannot be used with {source.path.name}: {modes[choice.mode]['reason']}. "
            f"Legal for this model: {legal}"
        )


@dataclass(frozen=True)
class Planner:
    """Asks the core about one model under one limit; everything but cache and context is fixed."""

    source: ModelSource
    limit: int
    n_seqs: int
    n_batch: int
    n_threads: int

    @classmethod
    def of(
        cls, source: ModelSource, memory_limit: str | int | None, n_seqs: int, n_batch: int, n_threads: int | None
    ) -> Planner:
        """From the arguments of slimrt.Model. TypeError, ValueError: one of a wrong kind, or a limit that is none."""
        return cls(
            source,
            memory_limit_bytes(memory_limit),
            whole("n_seqs", n_seqs),
            whole("n_batch", n_batch),
            0 if n_threads is None else whole("n_threads", n_threads),
        )

    def sizes(self, choice: CacheChoice, n_ctx: int) -> MemorySizes:
        sizes = _core.plan(
            str(self.source.gguf),
            n_ctx=n_ctx,
            n_seqs=self.n_seqs,
            n_batch=self.n_batch,
            n_threads=self.n_threads,
            **choice.arguments,
        )
        return MemorySizes(
            modes=tuple(layer["mode"] for layer in sizes["layers"]),
            types=tuple(layer["type"] for layer in sizes["layers"]),
            mapped=sizes["mapped"],
            weights=sizes["weights"],
            derived=sizes["derived"],
            cache_bytes=sizes["cache"],
            scratch=sizes["scratch"],
            total=sizes["total"] + sizes["mapped"],
            bytes_per_token=sizes["cache_bytes_per_token"],
        )

    def fits(self, choice: CacheChoice, n_ctx: int) -> bool:
        return self.sizes(choice, n_ctx).total <= self.limit

    def largest_n_ctx(self, choice: CacheChoice) -> int:
        """The largest context, up to the trained one and in whole blocks, that fits the limit; 0 if none does."""
        most = self.source.n_ctx_train
        if self.fits(choice, most):
            return most
        low, high = 0, -(-most // BLOCK)  # blocks: low fits (or is none), high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(choice, middle * BLOCK) else (low, middle)
        return low * BLOCK

    def row(self, choice: CacheChoice, n_ctx: int) -> PlanRow:
        sizes = self.sizes(choice, n_ctx)
        cache = sizes.modes[0] if len(set(sizes.modes)) == 1 else "mixed"
        fits = sizes.total <= self.limit
        return PlanRow(cache=cache, max_n_ctx=self.largest_n_ctx(choice), fits=fits, **vars(sizes))

    def options(self, choice: CacheChoice, n_ctx: int) -> tuple[str, ...]:
        """What would fit instead, as flags: the same cache with less context, another mode with the same."""
        found = []
        largest = self.largest_n_ctx(choice)
        if 0 < largest < n_ctx:
            found.append(f"--ctx {largest}")
        for other in self.legal(choice):
            if other.mode != choice.mode and self.fits(other, n_ctx):
                found.append(f"--cache {other.mode}")
        return tuple(found)

    def legal(self, choice: CacheChoice) -> list[CacheChoice]:
        """Every mode that is legal for the model, with the types of the choice, and its sparsity where V is kept."""
        modes = [mode["mode"] for mode in _core.cache_modes(str(self.source.gguf)) if mode["legal"]]
        return [replace(choice, mode=mode, sparse_threshold=choice.sparse_threshold * (mode == "kv")) for mode in modes]


def memory_limit_bytes(limit: str | int | None) -> int:
    """Bytes of a memory_limit argument; None: what the machine has available now."""
    return parse_bytes(limit) if limit is not None else int(_core.cpu_info()["memory_available"])


def plan(
    path: str | os.PathLike[str] | ModelSource,
    *,
    device: str = "auto",
    n_ctx: int = 0,
    n_seqs: int = 1,
    n_batch: int = 512,
    n_threads: int | None = None,
    cache: str | Sequence[str] = "auto",
    cache_type: str = "f16",
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    sparse_threshold: float = 0.0,
    memory_limit: str | int | None = None,
    progress: bool | None = None,
) -> PlanResult:
    """What a model would take in memory for every cache mode that is legal for it. No weights are loaded.

    Args: as for slimrt.Model; memory_limit in bytes or as "6GiB", None: what the machine has available now.

    Raises:
        FileNotFoundError, ModelFormatError, UnsupportedError, CacheUnsupportedError: as slimrt.Model.
        ValueError, TypeError: an argument out of its range, or of a wrong kind.
    """
    check_device(device)
    source = ModelSource.of(path, progress)
    choice = CacheChoice.of(cache, cache_type, cache_type_k, cache_type_v, sparse_threshold=sparse_threshold)
    check_cache(source, choice)
    planner = Planner.of(source, memory_limit, n_seqs, n_batch, n_threads)
    context = source.n_ctx(n_ctx)
    modes = _core.cache_modes(str(source.gguf))
    return PlanResult(
        path=str(source.path),
        n_ctx=context,
        n_ctx_train=source.n_ctx_train,
        n_seqs=n_seqs,
        n_batch=n_batch,
        memory_limit=planner.limit,
        asked=planner.row(choice, context),
        rows=tuple(planner.row(legal, context) for legal in planner.legal(choice)),
        refused=tuple((mode["mode"], mode["reason"]) for mode in modes if not mode["legal"]),
    )


def wont_fit(error: WontFitError, planner: Planner, choice: CacheChoice, n_ctx: int) -> WontFitError:
    """The core's refusal with what would fit added to it."""
    try:
        options = planner.options(choice, n_ctx)
    except SlimrtError:  # the refusal is the news; a failed search for ways out must not hide it
        options = ()
    message = str(error) + (f". These would fit: {', '.join(options)}" if options else "")
    return WontFitError(message, error.needed, error.available, options)
