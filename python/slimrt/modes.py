"""The names of cache modes and of the element types of their rows, and their defaults."""

from __future__ import annotations

from collections.abc import Sequence

from slimrt.errors import UnsupportedError
from slimrt.plumbing.arguments import unknown

CACHE_TYPES = ("f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4")
AUTO = "auto"
DEFAULT_TYPE = "f16"

RESIDUAL_MODE = "k+r"  # the mode whose rows have a second plane, of a width and type of its own

# type of k -> what part of V's width the residual has, and its type (cache-math.md section 3: in floats k is nearly
# exact and a thin residual does; in 8 and 4 bits rounding matters more, so it is wider and coarser)
_RESIDUALS = {
    "f32": (16, "q8"),
    "f16": (16, "q8"),
    "bf16": (16, "q8"),
    "q8": (4, "q4"),
    "fp8_e4m3": (4, "q8"),
    "fp8_e5m2": (4, "q8"),
    "q4": (4, "q4"),
}

# mode -> the first tensor of a layer that a plain file lacks; with it come the others of the mode
FOLDED = {"k": "attn_kv.weight", "v": "attn_vk.weight", "k+r": "attn_kr_v.weight", "xr": "attn_xr_in.weight"}

CROSS_MODES = ("kv", "k", "e", "e1")  # csrc/cache/cross

# mode -> the tensors of each layer that a plain file lacks
CROSS_FOLDED = {
    "k": ("cross_attn_kv.weight",),
    "e1": ("cross_attn_k1_k.weight", "cross_attn_k1_v.weight"),
}


def check_type(name: object, what: str, known: Sequence[str]) -> None:
    """Raises UnsupportedError for a type that is not known; the message suggests the nearest."""
    if name not in known:
        raise UnsupportedError(unknown(what, name, known))


def default_residual(mode: str, type: str, e_v: int) -> tuple[int, str]:
    """Width and element type of the residual plane when nothing is said.

    Args:
        mode: a cache mode; type: of its rows; e_v: width of V, KV heads times their width.

    Returns:
        (rank, type): for mode "k+r" a multiple of 4 from 4 to e_v (or e_v itself, below 4); (0, "") for the others.
    """
    if mode != RESIDUAL_MODE:
        return 0, ""
    part, residual_type = _RESIDUALS[type]
    return min(max(e_v // part // 4 * 4, 4), e_v), residual_type
