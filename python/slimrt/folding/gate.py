# SPDX-License-Identifier: Apache-2.0
"""Refuses cache modes whose error of V is over 5 % in a layer, unless allow_lossy is set: there is always a better one.

Modes k, v and e1 invert a projection, which amplifies the rounding of stored rows; k+r may have too small a residual.
The error of types by themselves (kv in 4 bits) is not limited. Published measurements of Whisper's cross-attention
(docs/cache-math.md, section 2): with float16 rows, mode k keeps V within 5 % in no layer of any model size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from slimrt.errors import CacheUnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Calibration
from slimrt.folding.cross import folds
from slimrt.folding.fold import reader
from slimrt.folding.readback import Sample
from slimrt.folding.report import CAUTION, TOO_LARGE
from slimrt.modelfile.gguf import ModelData
from slimrt.modes import (
    COMPUTED,
    CROSS_FOLDED,
    CROSS_LOSSY,
    DEFAULT_TYPE,
    LOSSY,
    RESIDUAL_MODE,
    default_residual,
)

_INVERTS = "it inverts a projection, which amplifies the rounding of the stored row"
_PARTIAL = "K predicts a part of V, and the residual of this rank and type does not hold the rest"
CROSS, SELF = "cross-attention", "self-attention"
CHEAP = 2 * 10**10  # multiply-adds of all layers' matrix products, with which folding takes about a second


@dataclass(frozen=True)
class Lossy:
    """The cached rows of one of a layer's attentions, in a mode that may be lossy.

    Attributes:
        part: CROSS or SELF. mode: a mode of that attention. type: element type of its rows.
        residual: rank and type, of k+r; None: the default for the type.
    """

    part: str
    mode: str
    type: str
    residual: tuple[int, str] | None = None

    @property
    def loses(self) -> bool:
        """Whether its error may be too large: with a nearly singular W_K it is even with float32 rows."""
        return self.mode in (CROSS_LOSSY if self.part == CROSS else LOSSY)

    @property
    def lost(self) -> str:
        """What is computed from the rows, with an error: "V", "K" or "K and V"."""
        if self.part == CROSS:
            return "K and V" if len(CROSS_FOLDED[self.mode]) > 1 else "V"
        return COMPUTED[self.mode]


# Errors that were predicted for a model's layers, by rows, layer and heads that store V; numbers alone, no weights.
_FOLDED: WeakKeyDictionary[ModelData, dict[tuple[Lossy, int, int], float]] = WeakKeyDictionary()


def is_cheap(attention: Attention) -> bool:
    """Whether folding all layers takes about a second."""
    return attention.n_layers * attention.d * max(attention.d, attention.kv_width) ** 2 <= CHEAP


def written(model: ModelData, rows: Lossy) -> dict[int, float]:
    """Layer -> error that a conversion for these rows wrote into the file, the larger of predicted and measured; {} if
    it has none for them."""
    modes = _names(model, "slimrt.cache.modes")
    if rows.part == CROSS:
        same = model.value("slimrt.cache.cross") == rows.mode
        return dict(enumerate(model.value(f"slimrt.fold.cross_error_{rows.type}", []) if same else []))
    errors: dict[int, float] = {}
    if set(modes) == {rows.mode}:
        errors = dict(enumerate(model.value(f"slimrt.fold.error_{rows.type}", [])))
    predicted, measured = (model.value(f"slimrt.fold.{part}_value", []) for part in ("predicted", "measured"))
    types = _names(model, "slimrt.cache.types") or [DEFAULT_TYPE] * len(modes)
    for layer, found in enumerate(zip(modes, types, predicted, measured, strict=False)):
        if found[:2] == (rows.mode, rows.type) and _residual(model, layer) == _asked(model, rows):
            of_v = max(found[2:]) if rows.lost == "V" else 0.0
            errors[layer] = max(errors.get(layer, 0.0), of_v)
    return errors


def _names(model: ModelData, key: str) -> list[str]:
    """An array of names, whose elements are bytes when read from a file."""
    return [name.decode() if isinstance(name, bytes) else name for name in model.value(key, [])]


def _residual(model: ModelData, layer: int) -> tuple[int, str]:
    """Rank and type of the residual that a layer was converted with; (0, "") if none."""
    ranks, types = model.value("slimrt.cache.ranks", []), _names(model, "slimrt.cache.residual_types")
    return (ranks[layer], types[layer]) if layer < min(len(ranks), len(types)) and ranks[layer] else (0, "")


def _asked(model: ModelData, rows: Lossy) -> tuple[int, str]:
    rank, type_name = rows.residual or default_residual(rows.mode, rows.type, Attention.of(model).kv_width)
    return (rank, type_name) if rank else (0, "")


def predicted(model: ModelData, rows: Lossy, layers: Collection[int] | None = None) -> Iterator[tuple[int, float]]:
    """The expected relative error of what each layer computes from its rows: (layer, error).

    Errors that a conversion wrote into the file are taken from there; other layers are folded again, one at a time, and
    their error is predicted for white inputs.

    Args:
        model: from a GGUF file. rows: the cached rows of its layers.
        layers: indices; None: all.

    Raises:
        CacheUnsupportedError, ModelFormatError: as `cross.folds`.
    """
    attention = Attention.of(model)
    wanted = attention.owning(layers)
    known = written(model, rows)
    yield from ((layer, known[layer]) for layer in wanted if layer in known)
    unknown = [layer for layer in wanted if layer not in known]
    if rows.part == CROSS:
        yield from (
            (fold.layer, fold.error(rows.type)) for fold in (folds(model, rows.mode, unknown) if unknown else ())
        )
    else:
        for layer in unknown:
            yield layer, _folded_error(model, rows, layer, _v_heads(model, rows, layer))


def predicts_fast(model: ModelData, rows: Lossy, layers: Collection[int]) -> bool:
    """Whether `predicted` takes at most about a second."""
    return set(layers) <= written(model, rows).keys() or is_cheap(Attention.of(model))


def white_sample(model: ModelData, attention: Attention, layer: int, v_heads: int = 0) -> Sample:
    """A layer's sample with the white inputs that are assumed if there is no text."""
    return replace(Calibration("", model, attention, []).layer(layer)[0], v_heads=v_heads)


def _v_heads(model: ModelData, rows: Lossy, layer: int) -> int:
    """How many KV heads of a layer store V, if the file was converted for this mode; else 0."""
    heads, modes = model.value("slimrt.cache.v_heads", []), _names(model, "slimrt.cache.modes")
    return heads[layer] if heads and modes[layer] == rows.mode else 0


def _folded_error(model: ModelData, rows: Lossy, layer: int, v_heads: int = 0) -> float:
    """The error predicted for white inputs. It is kept as long as the model is: refusals and their advice ask for the
    same errors again and again."""
    known = _FOLDED.setdefault(model, {})
    if (key := (rows, layer, v_heads)) not in known:
        sample = white_sample(model, Attention.of(model), layer, v_heads)
        known[key] = reader(sample, rows.mode, rows.type, *(rows.residual or (None, None)), half=False).fold_error()
    return known[key]


def percent(error: float) -> str:
    """The error in percent, with enough digits to differ from both limits: 5.03 % is not shown as 5.0 %."""
    for digits in range(1, 6):
        if round(error, digits + 2) not in (CAUTION, TOO_LARGE):
            break
    return f"{error:.{digits}%}"


def require_precise(model: ModelData, rows: Lossy, layer: int, error: float, inputs: str = "") -> bool:
    """Whether an error deserves a warning. inputs: a phrase on the inputs for which it was predicted.

    Raises:
        CacheUnsupportedError: it is too large; names the error, the layer, and what to use.
    """
    if error <= TOO_LARGE or not rows.loses:
        return error > CAUTION
    why = _PARTIAL if rows.mode == RESIDUAL_MODE else _INVERTS
    raise CacheUnsupportedError(
        f"{rows.part} cache mode '{rows.mode}' is too imprecise in {rows.type}: {why}, and the predicted error of "
        f"{rows.lost} is {percent(error)} in layer {layer} (the limit is {TOO_LARGE:.0%}): "
        f"{_instead(model, rows, layer)}{_or_f32(model, rows, layer)}; allow_lossy=True (--allow-lossy) allows it"
        + (f" (predicted {inputs})" if inputs else "")
    )


def _instead(model: ModelData, rows: Lossy, layer: int) -> str:
    """Advice: the modes that are precise enough in this layer, in the same type or else in a larger one."""
    if rows.part == CROSS:
        return "use e (--cross e), which inverts nothing"
    attention = Attention.of(model)
    plain = "kv" if attention.rope else "x"
    for type_name in dict.fromkeys((rows.type, "q8", DEFAULT_TYPE)):
        found = []
        for mode in (RESIDUAL_MODE, plain) if attention.rope else (plain,):
            try:
                error = _folded_error(model, Lossy(SELF, mode, type_name), layer)
            except CacheUnsupportedError:  # W_K cannot be inverted at all
                continue
            if error <= TOO_LARGE and (mode, type_name) != (rows.mode, rows.type):
                found.append(f"{mode} (--cache {mode}:{type_name}), of which {error:.1%} is expected there")
        if found:
            return f"use {', or '.join(found)}"
    return f"use {plain} (--cache {plain})"


def _or_f32(model: ModelData, rows: Lossy, layer: int) -> str:
    """Advice: the same mode in float32, if that is precise enough."""
    wide = replace(rows, type="f32")
    fine = rows.type != "f32" and all(error <= TOO_LARGE for _, error in predicted(model, wide, [layer]))
    return ", or type f32" if fine else ""


def check(model: ModelData, rows: Lossy, layers: Collection[int] | None = None) -> list[int]:
    """The layers whose error deserves a warning; stops at the first that is refused. Errors as predicted() and
    require_precise()."""
    if not rows.loses:
        return []
    found = predicted(model, rows, layers)
    return [layer for layer, error in found if require_precise(model, rows, layer, error)]
