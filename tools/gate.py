# SPDX-License-Identifier: Apache-2.0
"""Beside an encoder there is always a mode that inverts nothing, so one that does must be precise: else it is refused.

Published measurements of Whisper's cross-attention (cache-math.md, section 2): with float16 rows, mode k keeps V within
5 % in no layer of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

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
_AMPLIFIED = {"k": "V", "v": "K", "e1": "K and V"}
CROSS, SELF = "cross-attention", "self-attention"


def predicted(
    path: Path, part: str, mode: str, type_name: str, layers: Collection[int] | None = None
) -> Iterator[tuple[int, float]]:
    """The expected relative error of what each layer computes from its rows: (layer, error).

    What a conversion wrote into the file is taken from there; the rest is folded again, a layer at a time.

    Args:
        path: a GGUF file with an encoder.
        part: CROSS or SELF. mode: one that inverts: k or e1; k or v. type_name: of the rows.
        layers: which; None: all.

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
            yield layer, reader(known.layer(layer)[0], mode, type_name, half=False).fold_error()


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
    raise CacheUnsupportedError(
        f"{part} cache mode '{mode}' is too imprecise in {type_name}: it inverts a projection, which amplifies the "
        f"rounding of the stored row, and the predicted error of {_AMPLIFIED[mode]} is {error:.1%} in layer {layer} "
        f"(the limit is {TOO_LARGE:.0%}): use {other} ({flag} {other}), which inverts nothing, or type f32"
    )


def check(path: Path, part: str, mode: str, type_name: str, layers: Collection[int] | None = None) -> list[int]:
    """The layers whose error wants caution; stops at the first that is refused. Errors as both functions above."""
    if mode not in (EXACT if part == SELF else CROSS_FOLDED):
        return []
    rope = Attention.of(read_gguf(path)).rope
    found = predicted(path, part, mode, type_name, layers)
    return [layer for layer, error in found if require_precise(part, mode, type_name, layer, error, rope=rope)]
