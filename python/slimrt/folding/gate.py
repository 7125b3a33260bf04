# SPDX-License-Identifier: Apache-2.0
"""Beside an encoder there is always a mode that loses nothing, so one that does must be precise: else it is refused.

Published measurements of Whisper's cross-attention (cache-math.md, section 2): with float16 rows, mode k keeps V within
5 % in no layer of any size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from slimrt.errors import CacheUnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Calibration
from slimrt.folding.cross import folds
from slimrt.folding.exact import FOLDED as EXACT
from slimrt.folding.fold import reader
from slimrt.folding.report import CAUTION, TOO_LARGE
from slimrt.modelfile.gguf import ModelData, read_gguf
from slimrt.modes import CROSS_FOLDED, RESIDUAL_MODE

_LOST = {"k": "V", "v": "K", "k+r": "V", "e1": "K and V"}
_INVERTS = "it inverts a projection, which amplifies the rounding of the stored row"
_PARTIAL = "K tells a part of V, and the residual of this rank and type does not hold the rest"
CROSS, SELF = "cross-attention", "self-attention"
_MODES = {CROSS: tuple(CROSS_FOLDED), SELF: (*EXACT, RESIDUAL_MODE)}  # those that lose something


@dataclass(frozen=True)
class Lossy:
    """What is kept of each token, in a mode that loses something.

    Attributes:
        part: CROSS or SELF. mode: k or e1; k, v or k+r. type: of their elements.
        residual: rank and type, of k+r; None: the default for the type.
    """

    part: str
    mode: str
    type: str
    residual: tuple[int, str] | None = None


def predicted(path: Path, rows: Lossy, layers: Collection[int] | None = None) -> Iterator[tuple[int, float]]:
    """The expected relative error of what each layer computes from its rows: (layer, error).

    What a conversion wrote into the file is taken from there; the rest is folded again, a layer at a time.

    Args:
        path: a GGUF file with an encoder. rows: what its layers keep.
        layers: which; None: all.

    Raises:
        CacheUnsupportedError, ModelFormatError, OSError: as `cross.folds`.
    """
    model = read_gguf(path)
    attention = Attention.of(model)
    wanted = range(attention.n_layers) if layers is None else sorted(layers)
    written = _written(model, rows)
    if len(written) > max(wanted, default=0):
        yield from ((layer, written[layer]) for layer in wanted)
    elif rows.part == CROSS:
        yield from ((fold.layer, fold.error(rows.type)) for fold in folds(model, rows.mode, wanted))
    else:
        known = Calibration("", model, attention, [])
        for layer in wanted:
            made = reader(known.layer(layer)[0], rows.mode, rows.type, *(rows.residual or (None, None)), half=False)
            yield layer, made.value_error() if rows.mode == RESIDUAL_MODE else made.fold_error()


def _written(model: ModelData, rows: Lossy) -> list[float]:
    """The errors that a conversion for this mode wrote into the file, if it did."""
    if rows.part == CROSS:
        key, same = "slimrt.fold.cross_error", model.value("slimrt.cache.cross") == rows.mode
    else:
        key, same = "slimrt.fold.error", set(model.value("slimrt.cache.modes", [])) == {rows.mode}
    return list(model.value(f"{key}_{rows.type}", [])) if same else []


def require_precise(rows: Lossy, layer: int, error: float, *, rope: bool = False) -> bool:
    """Whether an error wants a word of caution; float32 rows may have any, since the user chose the largest type.

    Raises:
        CacheUnsupportedError: it is too large; names the figure, the layer, and what to use.
    """
    if error <= TOO_LARGE or rows.type == "f32":
        return error > CAUTION
    flag, other = ("--cross", "e") if rows.part == CROSS else ("--cache", "kv" if rope else "x")
    why = _PARTIAL if rows.mode == RESIDUAL_MODE else _INVERTS
    raise CacheUnsupportedError(
        f"{rows.part} cache mode '{rows.mode}' is too imprecise in {rows.type}: {why}, and the predicted error of "
        f"{_LOST[rows.mode]} is {error:.1%} in layer {layer} (the limit is {TOO_LARGE:.0%}): use {other} "
        f"({flag} {other}), which inverts nothing, or type f32"
    )


def check(path: Path, rows: Lossy, layers: Collection[int] | None = None) -> list[int]:
    """The layers whose error wants caution; stops at the first that is refused. Errors as both functions above."""
    if rows.mode not in _MODES[rows.part]:
        return []
    rope = Attention.of(read_gguf(path)).rope
    found = predicted(path, rows, layers)
    return [layer for layer, error in found if require_precise(rows, layer, error, rope=rope)]
