"""Cache modes and the element types of their rows, as defined by the core: names, properties and defaults."""

from __future__ import annotations

from collections.abc import Sequence

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.plumbing.arguments import unknown

CACHE_TYPES = core.CACHE_TYPES
AUTO = "auto"
FASTEST = "fastest"  # not a mode: chooses among kv and the file's modes by predicted speed (cache/fastest.py)
DEFAULT_TYPE = "f16"

# any shape: the names and properties read below are the same for all
_ANY = {"d_model": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 1, "n_rot": 0, "qk_norm": "none"}
_SELF, _CROSS = core.attention_modes(**_ANY), core.attention_modes(**_ANY, cross=True)
MODES = tuple(mode.name for mode in _SELF)
CROSS_MODES = tuple(mode.name for mode in _CROSS)

# k+r: the mode whose rows have a second plane, the residual, with its own width and type
RESIDUAL_MODE = next(mode.name for mode in _SELF if mode.residual)

# the modes that store what attention itself computes: K and V, or with MLA the latent (core.baseline)
BASELINES = ("kv", next(mode.name for mode in _SELF if mode.latent))

# modes whose rows are requantised as they age, in levels: their cache type may be a text of levels (core.levels)
AGING = tuple(mode.name for mode in _SELF if mode.ages)

# those of them whose oldest level is quantised by default
CODED_BY_AGE = tuple(mode for mode in AGING if core.levels(mode).of[0].type_k not in core.FLOAT_TYPES)

# modes in which all heads read the same values, where sparse_delta applies: skipping a row saves work for every head
SPARED = tuple(mode.name for mode in _SELF if mode.of_all)

# mode -> the projection that its fold inverts
INVERTED = {mode.name: mode.inverts for mode in _SELF if mode.inverts}

# modes that compute K or V from a stored row of something else, which amplifies the row's rounding
LOSSY = tuple(mode.name for mode in _SELF if mode.inverts or mode.residual)
CROSS_LOSSY = tuple(mode.name for mode in _CROSS if mode.inverts)

# mode -> the projection that it computes from its rows: "V", or "K" where W_V is inverted
COMPUTED = {mode: "K" if INVERTED.get(mode) == "W_V" else "V" for mode in LOSSY}

# mode -> its first folded tensor in a layer: a file that has this one has the mode's others too
FOLDED = {mode.name: next(fold.suffix for fold in mode.folds if fold.required) for mode in _SELF if mode.folds}

# mode of cross-attention -> all its folded tensors in a layer
CROSS_FOLDED = {mode.name: tuple(fold.suffix for fold in mode.folds if fold.required) for mode in _CROSS if mode.folds}

# types with scales shared by channels, for which static scales make the channels' ranges alike
STATIC_SCALES = ("q8", "fp8_e4m3", "q4", "q3", "q2")

# suffixes of the names of folded tensors
FOLD_SUFFIXES = tuple(sorted({f".{fold.suffix}" for mode in (*_SELF, *_CROSS) for fold in mode.folds}))

# type of k -> (V's width / the residual's rank, the residual's type). docs/cache-math.md: in float types k is nearly
# exact and a narrow residual is enough; in 8 and 4 bits rounding matters more, so the residual is wider and coarser
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


def reads_text(mode: str, type: str) -> bool:
    """Whether a fold for rows of this type measures the layer's inputs on a text."""
    return mode in (RESIDUAL_MODE, *AGING) or (mode == "xr" and type in STATIC_SCALES)


def check_type(name: object, what: str, known: Sequence[str]) -> None:
    """Raises UnsupportedError if `name` is not among `known`; the message suggests the nearest. what: names its kind in
    the message."""
    if name not in known:
        raise UnsupportedError(unknown(what, name, known))


def cross_hint(mode: str) -> str:
    """The end of a message on a mode that self-attention does not have: "", or that cross-attention has it."""
    return f". '{mode}' is a mode of cross-attention: give it as cross (--cross {mode})" if mode in CROSS_MODES else ""


def check_row_type(mode: str, type: str) -> None:
    """Raises UnsupportedError or ValueError unless `type` is an element type, or, in an aging mode, levels."""
    if mode in AGING and type not in (AUTO, ""):
        core.levels(mode, type)
    else:
        check_type(type, "cache type", (*CACHE_TYPES, AUTO))


def default_residual(mode: str, type: str, e_v: int) -> tuple[int, str]:
    """Default width and element type of the residual plane.

    Args:
        mode: a cache mode. type: element type of its rows. e_v: width of V, n_kv_heads * head_dim.

    Returns:
        (rank, type): for mode "k+r" a multiple of 4 from 4 to e_v (or e_v itself, below 4); (0, "") for the others.
    """
    if mode != RESIDUAL_MODE:
        return 0, ""
    part, residual_type = _RESIDUALS[type]
    return min(max(e_v // part // 4 * 4, 4), e_v), residual_type
