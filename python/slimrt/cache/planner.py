"""Memory that a model would take, by the core's own allocation plan, without reading weights."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slimrt import core
from slimrt.cache.config import CacheChoice, LayerCache, kinds
from slimrt.cache.plan_result import MemorySizes, PartSizes, PlanRow
from slimrt.cache.server_sizes import ServerSizes
from slimrt.cache.unfolded import most_at_once
from slimrt.errors import SlimrtError, UnsupportedError, WontFitError
from slimrt.info import Plan
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING, AUTO, CACHE_TYPES, DEFAULT_TYPE
from slimrt.plumbing.arguments import unknown, whole
from slimrt.plumbing.notes import tell
from slimrt.plumbing.units import format_both, parse_bytes

DEVICES = (AUTO, "cpu", "cuda", "cuda:N", "cpu,cuda=LAYERS")
_ONE = r"(?:cpu|cuda(?::\d{1,3})?)"
_DEVICE = re.compile(rf"auto|{_ONE}|{_ONE}(?:=\d{{1,4}})?(?:,{_ONE}(?:=\d{{1,4}})?)*")
_GPU = re.compile(r"(?:cpu,)?(cuda(?::\d+)?)(?:=(\d+))?")
BLOCK = 32  # tokens in a cache block: memory is allocated for whole blocks


def whole_blocks(rows: int) -> int:
    """`rows` rounded up to a multiple of BLOCK."""
    return -(-rows // BLOCK) * BLOCK


_LONGEST = 1 << 20  # tokens: the longest context for which a break-even is searched


def resolve_device(device: str, n_gpu_layers: int | None = None) -> str:
    """Check a device argument, and combine it with n_gpu_layers.

    Returns "cpu", "cuda", "cuda:N", or several, separated by commas, that share the layers in this order. "auto"
    becomes SLIMRT_DEVICE if that is set, "cpu" if there is no CUDA device, and else stays (cache/placement.py chooses).

    Args:
        n_gpu_layers: this many of the last layers are on cuda, the others on the CPU; -1: all. If "auto" finds no CUDA
            device for them, they are on the CPU, with a note.

    Raises:
        UnsupportedError: another device, or one that contradicts n_gpu_layers. ValueError: n_gpu_layers below -1.
    """
    if device == AUTO:
        said = os.environ.get("SLIMRT_DEVICE", "").lower()
        device = said if said and (n_gpu_layers is None or said != "cpu") else AUTO  # the argument wins
    if device in ("gpu", "nvidia"):
        raise UnsupportedError(f"device '{device}': a GPU is called cuda, or cuda:N of several; NVIDIA's are supported")
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise UnsupportedError(unknown("device", device, DEVICES))
    if n_gpu_layers is None:
        return "cpu" if device == AUTO and not core.cuda_devices()[0] else device
    n = whole("n_gpu_layers", n_gpu_layers)
    if n < -1:
        raise ValueError(f"n_gpu_layers must be -1 (all) or more, got {n}")
    gpu = _GPU.fullmatch("cuda" if device == AUTO else device)
    if n == 0 and (gpu or device == "cpu"):
        return "cpu"
    if device == AUTO and not (found := core.cuda_devices())[0]:
        tell(f"all layers are on the CPU: {found[1]}")
        return "cpu"
    if gpu is None or "=" in gpu[0]:
        raise UnsupportedError(f"device '{device}' and n_gpu_layers {n} (-ngl) do not go together: leave one out")
    return gpu[1] if n < 0 else f"cpu,{gpu[1]}={n}"


@dataclass(frozen=True)
class Planner:
    """Plans one model under one memory limit; everything but cache and context is fixed.

    Attributes:
        limit: bytes. device: "auto" until placed() has chosen one; `limit` is the CPU's then.
        each: no limit was given: of several devices each is limited by its own free memory.
        max_queue: most waiting requests of a server of the model; None: no server.
        draft: a draft model in the same memory; None: none. by_itself: the model drafts for itself.
    """

    source: ModelSource
    limit: int
    n_seqs: int
    n_batch: int
    n_threads: int
    device: str = "cpu"
    cache_tokens: int = 0
    max_queue: int | None = None
    draft: ModelSource | None = None
    by_itself: bool = False
    each: bool = False

    @classmethod
    def of(
        cls,
        source: ModelSource,
        memory_limit: str | int | None,
        n_seqs: int,
        n_batch: int,
        n_threads: int | None,
        device: str = "cpu",
        cache_tokens: int = 0,
        max_queue: int | None = None,
    ) -> Planner:
        """From the arguments of slimrt.Model. TypeError, ValueError: an argument of a wrong type, or an invalid limit.
        UnsupportedError: there is no such device, or no cache that cache_tokens could be of."""
        device = resolve_device(device)
        cache_tokens = whole("cache_tokens", cache_tokens)
        if cache_tokens and not source.has_decoder:
            raise UnsupportedError(f"{source.name} has no decoder, and so no cache: leave out cache_tokens")
        return cls(
            source,
            memory_limit_bytes(memory_limit, "cpu" if device == AUTO else device),
            whole("n_seqs", n_seqs),
            whole("n_batch", n_batch),
            0 if n_threads is None else whole("n_threads", n_threads),
            device,
            cache_tokens,
            None if max_queue is None else whole("max_queue", max_queue),
            each=memory_limit is None and device != "cpu",
        )

    def ask(self, choice: CacheChoice, n_ctx: int) -> Plan:
        """core.plan for a choice of cache."""
        return core.plan(
            self.source.file,
            n_ctx=n_ctx,
            n_seqs=self.n_seqs,
            cache_tokens=self.cache_tokens,
            n_batch=self.n_batch,
            n_threads=self.n_threads,
            device=self.device,
            **choice.arguments(self.source),
        )

    def of_draft(self, n_ctx: int) -> tuple[Planner, int]:
        """The planner of the draft model, for as many sequences, and its context: at most what it was trained on."""
        assert self.draft is not None
        n_ctx = min(n_ctx, self.draft.n_ctx_train)
        tokens = max(self.cache_tokens, n_ctx) if self.cache_tokens else 0
        return replace(self, source=self.draft, draft=None, cache_tokens=tokens, max_queue=None), n_ctx

    def sizes(self, choice: CacheChoice, n_ctx: int) -> MemorySizes:
        sizes = self.ask(choice, n_ctx)
        parts = sizes["parts"]
        resolved = choice.layers(self.source)
        server = self.server(sizes)
        drafts: dict[str, int] = {}
        if self.draft is not None:
            own, own_ctx = self.of_draft(n_ctx)
            one = own.sizes(CacheChoice.of(), own_ctx)
            drafts = {
                "draft_weights": one.mapped + one.weights + one.derived,
                "draft_cache": one.cache_bytes,
                "draft_scratch": one.scratch,
            }
        return MemorySizes(
            modes=tuple(layer["mode"] for layer in sizes["layers"]),
            types=tuple(layer["type"] for layer in sizes["layers"]),
            ranks=tuple(layer.rank for layer in resolved),
            residual_types=tuple(layer.residual_type for layer in resolved),
            mapped=sizes["mapped"],
            weights=sizes["weights"],
            derived=sizes["derived"],
            cache_bytes=sizes["cache"],
            scratch=sizes["scratch"],
            logits=server.logits,
            masks=server.masks,
            queue=server.queue,
            **drafts,
            total=sizes["total"]
            + sizes["mapped"]
            + sum(drafts.values())
            + (server.total if self.device == "cpu" else 0),
            folding=most_at_once(self.source, choice, resolved, sizes) if self.device == "cpu" else 0,
            bytes_per_token=sizes["cache_bytes_per_token"],
            held_bytes=sum(layer["bytes_held"] for layer in sizes["layers"]),
            parts=tuple(
                PartSizes(**part, available=self.available(part["device"])) for part in parts if len(parts) > 1
            ),
        )

    def server(self, sizes: Plan) -> ServerSizes:
        """Memory of a server beside an engine of these sizes; 0 if no server is planned."""
        if self.max_queue is None:
            return ServerSizes(0, 0, 0)
        sounds = self.source.kind in ("whisper", "moonshine")
        n_threads = self.n_threads or sizes["n_threads"]
        drafts = self.draft is not None or self.by_itself
        return ServerSizes.of(sizes["n_vocab"], self.n_seqs, n_threads, self.max_queue, sounds=sounds, drafts=drafts)

    def fits(self, choice: CacheChoice, n_ctx: int) -> bool:
        return self.fit(self.sizes(choice, n_ctx))

    def available(self, device: str) -> int:
        return core.available_memory(device) if self.each else 0

    def fit(self, sizes: MemorySizes) -> bool:
        most = max(sizes.total, sizes.folding)
        return most <= self.limit and not (self.each and any(part.too_large for part in sizes.parts))

    def largest_n_ctx(self, choice: CacheChoice, n_ctx: int = 0) -> int:
        """The largest context that fits the limit, in whole blocks, at most the trained one or `n_ctx` if that is more;
        0 if none fits."""
        most = max(self.source.n_ctx_train, n_ctx)
        if self.cache_tokens:
            most = min(most, self.cache_tokens)
        if self.fits(choice, most):
            return most
        return (_first_block(-(-most // BLOCK), lambda n_ctx: not self.fits(choice, n_ctx)) - 1) * BLOCK

    def most_tokens(self, choice: CacheChoice, n_ctx: int) -> int:
        """The largest cache_tokens, in whole blocks, below the requested one (by default n_ctx * n_seqs), that fits the
        limit; 0 if not even one sequence fits, or only one is requested."""
        least, asked = whole_blocks(n_ctx), self.cache_tokens or n_ctx * self.n_seqs

        def too_many(more: int) -> bool:
            return not replace(self, cache_tokens=least + more).fits(choice, n_ctx)

        if asked <= least or too_many(0):
            return 0
        return least + (_first_block(-(-(asked - least) // BLOCK), too_many) - 1) * BLOCK

    def most_gpu_layers(self, choice: CacheChoice, n_ctx: int) -> int:
        """How many layers fit on the GPU with the others on the CPU, fewer than `device` has there; 0 if none."""
        gpu = _GPU.fullmatch(self.device)
        if gpu is None or self.source.has_encoder:
            return 0

        def too_many(n: int) -> bool:
            device = f"cpu,{gpu[1]}={n}"
            limit = core.available_memory(device) if self.each else self.limit
            return not replace(self, device=device, limit=limit).fits(choice, n_ctx)

        layers = int(self.source.defaults["n_layers"])
        most = min(int(gpu[2] or layers), layers)
        try:
            return bisect_left(range(1, most), True, key=too_many)
        except UnsupportedError:  # the model's layers cannot be on different devices
            return 0

    def smaller_from(self, choice: CacheChoice, plain: CacheChoice | None = None) -> int | None:
        """The context, in whole blocks, from which the model takes less memory in all, derived weights and scratch
        included, than with `plain`, by default the baseline mode in the same type. None: it never does, up to a million
        tokens, or up to the number of learned positions."""
        kv, most = plain or choice.with_mode(self.source.baseline), self.source.n_ctx_limit or _LONGEST

        def smaller(n_ctx: int) -> bool:
            wide = replace(self, draft=None, cache_tokens=self.cache_tokens and max(self.cache_tokens, n_ctx))
            return wide.sizes(choice, n_ctx).total < wide.sizes(kv, n_ctx).total

        return _first_block(most // BLOCK, smaller) * BLOCK if smaller(most // BLOCK * BLOCK) else None

    def break_evens(self, choice: CacheChoice) -> dict[str, int | None]:
        """smaller_from() compared with the baseline in f16, and in the type of the choice if all layers have the same:
        by label, such as "kv q8"."""
        own = {layer.type for layer in choice.layers(self.source)}
        types = {DEFAULT_TYPE, *(own if len(own) == 1 else ())} & set(CACHE_TYPES)
        plain = [CacheChoice.of(self.source.baseline, type).with_cross(choice.cross) for type in sorted(types)]
        return {kinds(self.sizes(one, BLOCK).layers()): self.smaller_from(choice, one) for one in plain}

    def row(self, choice: CacheChoice, n_ctx: int) -> PlanRow:
        sizes = self.sizes(choice, n_ctx)
        fits, largest = self.fit(sizes), self.largest_n_ctx(choice, n_ctx)
        if not sizes.modes:  # no decoder
            return PlanRow(cache="none", max_n_ctx=largest, fits=fits, **vars(sizes))
        cache = sizes.modes[0] if len(set(sizes.modes)) == 1 else "mixed"
        plain = self.sizes(CacheChoice.of(self.source.baseline, DEFAULT_TYPE).with_cross(choice.cross), n_ctx)
        return PlanRow(
            cache=cache,
            max_n_ctx=max(largest, n_ctx) if fits else largest,
            fits=fits,
            smaller_from=None if cache == self.source.baseline else self.smaller_from(choice),
            times_by_types=_times_by_types(sizes),
            times_held=plain.held_bytes / sizes.held_bytes,
            **vars(sizes),
        )

    def options(
        self, choice: CacheChoice, n_ctx: int, usable: Callable[[CacheChoice], bool] = lambda _: True
    ) -> tuple[str, ...]:
        """What would fit instead, as command-line flags: fewer layers on the GPU; the same cache with less context; the
        same context with fewer cache_tokens, or in kv q8, the fastest cache at half of 16 bits; then other modes.
        usable: whether a cache would be precise enough."""
        found = []
        if layers := self.most_gpu_layers(choice, n_ctx):
            found.append(f"--gpu-layers {layers}")
        largest, sizes = self.largest_n_ctx(choice), self.sizes(choice, n_ctx)
        if 0 < largest < n_ctx:
            found.append(f"--ctx {largest}")
        if tokens := self.most_tokens(choice, n_ctx):
            found.append(f"--cache-tokens {tokens}")
        in_q8 = CacheChoice.of(self.source.baseline, "q8").with_cross(choice.cross)
        if set(sizes.types) <= set(core.FLOAT_TYPES) and self.fits(in_q8, n_ctx) and usable(in_q8):
            found.append(f"--cache {self.source.baseline}:q8")
        modes = set(sizes.modes)
        for other in self.legal(choice):
            mode = other.configs[0].mode
            if {mode} != modes and self.fits(other, n_ctx) and usable(other):
                found.append(f"--cache {mode}")
        return tuple(found)

    def legal(self, choice: CacheChoice) -> list[CacheChoice]:
        """Every mode that is legal for the model, as choice.with_mode(); aging modes only if rows change by age."""
        found = [choice.with_mode(mode.name) for mode in self.source.modes().values() if mode.legal]
        return [one for one in found if one.configs[0].mode not in AGING or _age_changes(one.layers(self.source)[0])]


def _age_changes(layer: LayerCache) -> bool:
    """Whether rows of a layer are changed as they age: quantised or truncated."""
    return any(
        level.part < 1 or not {level.type_k, level.type_v} <= set(core.FLOAT_TYPES)
        for level in core.levels(layer.mode, layer.type_k).of
    )


def _times_by_types(sizes: MemorySizes) -> float | None:
    """PlanRow.times_by_types. Layers may differ in their levels, but are of the same shape."""
    if not set(sizes.modes) <= set(AGING):
        return None
    bits = [core.levels(mode, text).bits for mode, text in zip(sizes.modes, sizes.types, strict=True)]
    return 32 * len(bits) / sum(bits) if any(bits) else None


def _first_block(most: int, reached: Callable[[int], bool]) -> int:
    """The smallest number of blocks in 1 ... most for which reached(tokens) is true, by bisection: reached() must be
    monotonic, and is assumed to be true for `most`."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle * BLOCK) else (middle, high)
    return high


def require_together(sizes: Sequence[MemorySizes], limit: int, what: str) -> None:
    """Raises WontFitError if several caches of one model do not fit at the same time. what: advice for the message."""
    needed = sum(one.total - one.mapped for one in sizes) + max(one.mapped for one in sizes)
    if needed > limit:
        wanted, there = format_both(needed, limit)
        message = f"{len(sizes)} caches at once need {wanted}, {there} available. {what}"
        raise WontFitError(message, needed, limit)


def memory_limit_bytes(limit: str | int | None, device: str = "cpu") -> int:
    """A memory_limit argument in bytes; None: the memory that the device has available now."""
    return parse_bytes(limit) if limit is not None else core.available_memory(device)


def wont_fit(
    error: WontFitError, planner: Planner, choice: CacheChoice, n_ctx: int, usable: Callable[[CacheChoice], bool]
) -> WontFitError:
    """The core's WontFitError with the options that would fit and be usable."""
    try:
        options = planner.options(choice, n_ctx, usable)
    except SlimrtError:  # a failed search for options must not hide the original error
        options = ()
    message = str(error) + (f". These would fit: {', '.join(options)}" if options else "")
    return WontFitError(message, error.needed, error.available, options)
