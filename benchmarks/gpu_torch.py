"""PyTorch's scaled_dot_product_attention at decoding: the best of its kernels, as a rival."""

from __future__ import annotations

import statistics
from contextlib import suppress
from typing import Any


def attention_seconds(heads: int, dim: int, n: int, batch: int, calls: int) -> dict[str, Any] | None:
    """Seconds of a call over bf16 K and V [batch, heads, n, dim], a query each, and the kernel; None without torch."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads, n, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend), suppress(RuntimeError):  # this kernel does not take the shape
            found[backend.name] = _time(torch, (q, k, v), calls)
    del q, k, v
    torch.cuda.empty_cache()
    if not found:
        return None
    kernel = min(found, key=lambda name: found[name])
    return {"seconds": found[kernel], "kernel": kernel}


def _time(torch: Any, tensors: Any, calls: int) -> float:
    """The median of three times so many calls."""
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(*tensors)
    taken = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        for _ in range(calls):
            attend(*tensors)
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1000 / calls)
    return statistics.median(taken)
