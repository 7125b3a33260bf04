# SPDX-License-Identifier: Apache-2.0
"""Beside an encoder there is always a mode that loses nothing, so one that does must be precise: else it is refused.

Published measurements of Whisper's cross-attention (cache-math.md, section 2): with float16 rows, mode k keeps V within
5 % in no layer of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from slimrt.cache import RESIDUAL_MODE
from slimrt.cross import CROSS_FOLDED
from slimrt.errors import CacheUnsupportedError

from .attention import Attention
from .calibrate import Calibration
from .cross import folds
from .exact import FOLDED as EXACT
from .fold import reader
from .gguf_file import ModelData, read_gguf
from .report import CAUTION, TOO_LARGE

ErrorOf = Callable[[str], float]  # element type -> predicted relative error
_LOST = {"k": "V", "v": "K", "k+r": "V", "e1": "K and V"}
_INVERTS = "it inverts a projection, which amplifies the rounding of the stored row"
_PARTIAL = "K tells a part of V, and the residual of this rank and type does not hold the rest"
CROSS, SELF = "cross-attention", "self-attention"


def predicted(
    path: Path,
    part: str,
    mode: str,
    type_name: str,
    layers: Collection[int] | None = None,
    residual: tuple[int, str] | None = None,
) -> Iterator[tuple[int, float]]:
    """The expected relative error of what each layer computes from its rows: (layer, error).

    What a conversion wrote into the file is taken from there; the rest is folded again, a layer at a time.

    Args:
        path: a GGUF file with an encoder.
        part: CROSS or SELF. mode: one that loses something: k or e1; k, v or k+r. type_name: of the rows.
        layers: which; None: all.
        residual: rank and type, of k+r; None: the default for the type.

    Raises:
        CacheUnsupportedError, ModelFormatError, OSError: as `cross.folds`.
    """
    model = read_gguf(path)
    attention = Attention.of(model)
    wanted = range(attention.n_layers) if layers is None else sorted(layers)
    written = _written(model, part, mode, type_name)
    if len(written) > max(wanted, default=0):
        yield from ((layer, written[layer]) for layer in wanted)
    elif part == CROSS:
        yield from ((fold.layer, fold.error(type_name)) for fold in folds(model, mode, wanted))
    else:
        known = Calibration("", model, attention, [])
        for layer in wanted:
            made = reader(known.layer(layer)[0], mode, type_name, *(residual or (None, None)), half=False)
            yield layer, made.value_error() if mode == RESIDUAL_MODE else made.fold_error()


def _written(model: ModelData, part: str, mode: str, type_name: str) -> list[float]:
    """The errors that a conversion for this mode wrote into the file, if it did."""
    if part == CROSS:
        same = model.value("slimrt.cache.cross") == mode
    else:
        same = set(model.value("slimrt.cache.modes", [])) == {mode}
    return list(model.value(f"slimrt.fold.{'cross_' if part == CROSS else ''}error_{type_name}", [])) if same else []


def require_precise(part: str, mode: str, type_name: str, layer: int, error: float, *, rope: bool = False) -> bool:
    """Whether an error wants a word of caution; float32 rows may have any, since the user chose the largest type.

    Raises:
        CacheUnsupportedError: it is too large; names the figure, the layer, and what to use.
    """
    if error <= TOO_LARGE or type_name == "f32":
        return error > CAUTION
    flag, other = ("--cross", "e") if part == CROSS else ("--cache", "kv" if rope else "x")
    why = _PARTIAL if mode == RESIDUAL_MODE else _INVERTS
    raise CacheUnsupportedError(
        f"{part} cache mode '{mode}' is too imprecise in {type_name}: {why}, and the predicted error of {_LOST[mode]} "
        f"is {error:.1%} in layer {layer} (the limit is {TOO_LARGE:.0%}): use {other} ({flag} {other}), which inverts "
        "nothing, or type f32"
    )


def check(
    path: Path,
    part: str,
    mode: str,
    type_name: str,
    layers: Collection[int] | None = None,
    residual: tuple[int, str] | None = None,
) -> list[int]:
    """The layers whose error wants caution; stops at the first that is refused. Errors as both functions above."""
    if mode not in ((*EXACT, RESIDUAL_MODE) if part == SELF else CROSS_FOLDED):
        return []
    rope = Attention.of(read_gguf(path)).rope
    found = predicted(path, part, mode, type_name, layers, residual)
    return [layer for layer, error in found if require_precise(part, mode, type_name, layer, error, rope=rope)]
