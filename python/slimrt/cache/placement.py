# SPDX-License-Identifier: Apache-2.0
"""Device "auto": a GPU if the model fits it, else the CPU with a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slimrt import core
from slimrt.cache.config import CacheChoice
from slimrt.cache.fastest import asks_for_fastest
from slimrt.cache.planner import Planner, require_together
from slimrt.errors import SlimrtError
from slimrt.modes import AUTO, FASTEST
from slimrt.plumbing.notes import tell
from slimrt.plumbing.units import format_both


def placed(planner: Planner, choices: Sequence[CacheChoice], n_ctx: int) -> Planner:
    """The planner with "auto" resolved: to the first CUDA device, if the model with all of these caches at once fits
    its free memory, else to the CPU. n_ctx 0: the model's own context."""
    if planner.device != AUTO:
        return planner
    on_cpu, n_ctx = _on(planner, "cpu"), planner.source.n_ctx(n_ctx)
    try:
        for choice in choices:
            if not asks_for_fastest(choice):
                on_cpu.ask(choice, n_ctx)
    except SlimrtError:
        return on_cpu  # loading raises the same error
    on_gpu = _on(planner, "cuda")
    if not (reason := _obstacle(on_gpu, choices, n_ctx)):
        return on_gpu
    tell(f"all layers are on the CPU, since on cuda {reason}")
    return on_cpu


def _on(planner: Planner, device: str) -> Planner:
    limit = core.available_memory(device) if planner.each else planner.limit
    return replace(planner, device=device, limit=limit, each=planner.each and device != "cpu")


def _obstacle(planner: Planner, choices: Sequence[CacheChoice], n_ctx: int) -> str:
    """Why the model cannot be on this device; "" if it can."""
    if any(map(asks_for_fastest, choices)):
        return f"nothing is known of what is fastest there (cache {FASTEST})"
    try:
        sizes = [planner.sizes(choice, n_ctx) for choice in choices]
        if len(choices) > 1:
            require_together(sizes, planner.limit, "")
        elif not planner.fit(sizes[0]):
            layers = planner.most_gpu_layers(choices[0], n_ctx)
            needed, free = format_both(sizes[0].total, planner.limit)
            some = f", or {layers} layers of it (-ngl {layers})" if layers else ""
            return (
                f"it does not fit: needs {needed}, {free} available. A shorter context may (--ctx), or a smaller "
                f"cache{some}"
            )
    except SlimrtError as error:  # includes a device that exists and cannot be used
        return str(error).rstrip(". ")
    return ""
