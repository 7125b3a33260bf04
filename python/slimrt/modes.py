"""The names of cache modes and of the element types of their rows, as the core has them, and their defaults."""

from __future__ import annotations

from collections.abc import Sequence

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.plumbing.arguments import unknown

CACHE_TYPES = core.CACHE_TYPES
AUTO = "auto"
FASTEST = "fastest"  # of kv and what the file says: no mode, but a way to choose one
DEFAULT_TYPE = "f16"

_ANY = {"d_model": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 1, "n_rot": 0, "qk_norm": "none"}  # names suit all
_SELF, _CROSS = core.attention_modes(**_ANY), core.attention_modes(**_ANY, cross=True)
MODES = tuple(mode.name for mode in _SELF)
CROSS_MODES = tuple(mode.name for mode in _CROSS)

# the mode whose rows have a second plane, of a width and type of its own
RESIDUAL_MODE = next(mode.name for mode in _SELF if mode.residual)

# the mode that keeps what attention itself makes of a token: kv, or that of latent attention (core.baseline)
BASELINES = ("kv", next(mode.name for mode in _SELF if mode.latent))

# modes whose rows age, in levels: the type of a cache of theirs may be a text that says which (core.levels)
AGING = tuple(mode.name for mode in _SELF if mode.ages)

# those whose older rows are codes where nothing else is said
CODED_BY_AGE = tuple(mode for mode in AGING if core.levels(mode).of[0].type_k not in core.FLOAT_TYPES)

# those whose values all heads read, so that passing rows over saves the most
SPARED = tuple(mode.name for mode in _SELF if mode.of_all)

# mode -> the projection that its fold inverts
INVERTED = {mode.name: mode.inverts for mode in _SELF if mode.inverts}

# modes that compute K or V from a rounded row of something else, so that its rounding comes out larger
LOSSY = tuple(mode.name for mode in _SELF if mode.inverts or mode.residual)
CROSS_LOSSY = tuple(mode.name for mode in _CROSS if mode.inverts)

# mode -> what it computes from its rows: "V", or "K" of the one that inverts W_V
COMPUTED = {mode: "K" if INVERTED.get(mode) == "W_V" else "V" for mode in LOSSY}

# mode -> the first tensor of a layer that a plain file lacks; with it come the others of the mode
FOLDED = {mode.name: next(fold.suffix for fold in mode.folds if fold.required) for mode in _SELF if mode.folds}

# mode of cross-attention -> all of them
CROSS_FOLDED = {mode.name: tuple(fold.suffix for fold in mode.folds if fold.required) for mode in _CROSS if mode.folds}

# how the names of tensors end that only folding makes
FOLD_SUFFIXES = tuple(sorted({f".{fold.suffix}" for mode in (*_SELF, *_CROSS) for fold in mode.folds}))

# type of k -> what part of V's width the residual has, and its type (docs/cache-math.md: in floats k is nearly
# exact and a thin residual does; in 8 and 4 bits rounding matters more, so it is wider and coarser)
_RESIDUALS = {
    "f32": (16, "q8"),
    "f16": (16, "q8"),
    "bf16": (16, "q8"),
    "q8": (4, "q4"),
    "fp8_e4m3": (4, "q8"),
    "fp8_e5m2": (4, "q8"),
    "q4": (4, "q4"),
    "q3": (4, "q4"),
    "q2": (4, "q4"),
}


def check_type(name: object, what: str, known: Sequence[str]) -> None:
    """Raises UnsupportedError for a type that is not known; the message suggests the nearest."""
    if name not in known:
        raise UnsupportedError(unknown(what, name, known))


def check_row_type(mode: str, type: str) -> None:
    """Raises UnsupportedError or ValueError for a text that is no element type, nor levels of a mode that has some."""
    if mode in AGING and type not in (AUTO, ""):
        core.levels(mode, type)
    else:
        check_type(type, "cache type", (*CACHE_TYPES, AUTO))


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
