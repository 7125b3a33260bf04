# SPDX-License-Identifier: Apache-2.0
"""Converting for a mode of cross-attention: the folded tensors, their metadata, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt.folding.attention import Attention
from slimrt.folding.cross import folds, require_cross
from slimrt.folding.gate import CROSS, SELF, Lossy, require_precise
from slimrt.folding.layers import in_file
from slimrt.folding.noise import ROUNDOFF
from slimrt.folding.report import CrossReport, LayerReport
from slimrt.modelfile.gguf import ModelData, array, string
from slimrt.modes import AUTO, CACHE_TYPES, CROSS_FOLDED, CROSS_MODES, DEFAULT_TYPE, LOSSY
from slimrt.plumbing import progress as bars


def check_cross(model: ModelData, mode: str | None, type_name: str) -> None:
    """Refuse impossible conversions before they begin.

    Raises:
        ValueError: an unknown mode or type, or a type without a mode.
        UnsupportedError: the model has no encoder. CacheUnsupportedError: K is too narrow for the mode.
    """
    if type_name not in (AUTO, *CACHE_TYPES):
        raise ValueError(f"unknown cross-attention cache type {type_name!r}; the types are: {', '.join(CACHE_TYPES)}")
    if mode is None:
        if type_name != AUTO:
            raise ValueError("cross_type is for a conversion with cross, and this one has none")
        return
    if mode not in CROSS_MODES:
        raise ValueError(f"unknown cross-attention cache mode {mode!r}; the modes are: {', '.join(CROSS_MODES)}")
    attention = Attention.cross(model)
    if mode in CROSS_FOLDED:
        require_cross(attention, mode)


def fold_cross_model(
    model: ModelData, mode: str, type_name: str, spool: Path, *, allow_lossy: bool = False, show_progress: bool
) -> tuple[ModelData, list[CrossReport]]:
    """Return the model with the folded tensors of the mode, whose data is in files in `spool`, and a report per layer;
    the model itself and [] if the mode needs no folding.

    Raises:
        CacheUnsupportedError: a W_K to be inverted is singular, or (without allow_lossy) the error is too large.
    """
    if mode not in CROSS_FOLDED:
        return model, []
    n_layers, type_name = Attention.cross(model).n_layers, DEFAULT_TYPE if type_name == AUTO else type_name
    made, reports = [], []
    with bars.bar(show_progress, n_layers, "folding cross-attention", "layer") as update:
        for fold in folds(model, mode):
            errors = {name: fold.error(name) for name in dict.fromkeys((*ROUNDOFF, type_name))}
            if not allow_lossy:
                require_precise(model, Lossy(CROSS, mode, type_name), fold.layer, errors[type_name])
            reports.append(CrossReport(fold.layer, mode, type_name, fold.cond, errors))
            made += [in_file(spool, name, values) for name, values in fold.tensors.items()]
            update(fold.layer + 1, n_layers)
    return model.with_tensors(*made), reports


def cross_fields(reports: Sequence[CrossReport], mode: str, type_name: str) -> dict[str, GGUFValue]:
    """Metadata: the mode and type that the runtime uses by default, and the reports, one value per layer."""
    fields = {"slimrt.cache.cross": string(mode)}
    if type_name != AUTO:
        fields["slimrt.cache.cross_type"] = string(type_name)
    for name in reports[0].errors if reports else ():
        errors = [one.errors[name] for one in reports]
        fields[f"slimrt.fold.cross_error_{name}"] = array(errors, GGUFValueType.FLOAT32)
    if reports:
        fields["slimrt.fold.cross_cond"] = array([one.cond for one in reports], GGUFValueType.FLOAT32)
    return fields


def require_all_precise(model: ModelData, layers: Sequence[LayerReport]) -> None:
    """Refuse folds of self-attention whose error is too large, as predicted or as measured on held-out text."""
    for layer in layers:
        if (error := lost(layer)) is not None:
            require_precise(model, Lossy(SELF, layer.mode, layer.type), layer.layer, error)


def lost(layer: LayerReport) -> float | None:
    """A layer's relative error of V (in mode "v": of K), the larger of predicted and measured; None if its mode stores
    both, or x."""
    if layer.mode not in LOSSY:
        return None
    measured = layer.measured.value if layer.measured and layer.mode != "v" else 0.0
    predicted = layer.errors[layer.type] if layer.errors else layer.predicted.value if layer.predicted else 0.0
    return max(predicted, measured)
