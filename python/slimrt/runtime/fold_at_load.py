"""What a model's caches need beyond its file: folded while it is loaded, and refused where that costs too much."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.cache.config import CacheChoice, LayerCache
from slimrt.modelfile.source import ModelSource
from slimrt.modes import CROSS_FOLDED, FOLDED, RESIDUAL_MODE
from slimrt.plumbing import progress

_LOSING = {"k": "type_k", "v": "type_v", RESIDUAL_MODE: "type_k"}  # mode -> the type of its rows


def folds_at_load(source: ModelSource, choice: CacheChoice) -> dict[LayerCache, list[int]]:
    """The layers whose self-attention needs folded weights that the file lacks, by the cache they are to have."""
    present = core.GgufFile(str(source.gguf)).tensors()
    missing: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(choice.layers(source)):
        if cache.mode in FOLDED and f"{source.blocks}{layer}.{FOLDED[cache.mode]}" not in present:
            missing.setdefault(cache, []).append(layer)
    return missing


def cross_folds_at_load(source: ModelSource, mode: str) -> list[int]:
    """The same of cross-attention in this mode."""
    present = core.GgufFile(str(source.gguf)).tensors()
    names = CROSS_FOLDED.get(mode, ())
    layers = range(int(source.defaults["n_layers"]))
    return [layer for layer in layers if any(f"{source.blocks}{layer}.{name}" not in present for name in names)]


def needs_folding(source: ModelSource, choice: CacheChoice) -> bool:
    """Whether the file lacks weights that these caches need."""
    return bool(folds_at_load(source, choice) or cross_folds_at_load(source, choice.cross.mode_for(source)))


def require_precise(source: ModelSource, choice: CacheChoice, show_progress: bool | None) -> None:
    """Refuses modes of a model with an encoder that lose too much, by inverting a projection or by a small residual.

    Raises:
        CacheUnsupportedError: with the predicted error, the layer and the mode that loses nothing.
    """
    if not source.has_encoder:
        return
    from slimrt.folding.gate import CROSS, SELF, Lossy, check

    losing: dict[Lossy, list[int]] = {}
    for layer, cache in enumerate(choice.layers(source)):
        if cache.mode in _LOSING:
            residual = (cache.rank, cache.residual_type) if cache.mode == RESIDUAL_MODE else None
            rows = Lossy(SELF, cache.mode, getattr(cache, _LOSING[cache.mode]), residual)
            losing.setdefault(rows, []).append(layer)
    mode = choice.cross.mode_for(source)
    if mode in CROSS_FOLDED:
        rows = Lossy(CROSS, mode, choice.cross.resolved(source).type)
        losing[rows] = list(range(int(source.defaults["n_layers"])))
    for rows, layers in losing.items():
        doubtful = check(source.gguf, rows, layers)
        if doubtful and show_progress is not False:
            progress.note_once(
                f"{rows.part} cache mode {rows.mode} in {rows.type} loses more than 1 % in layers "
                f"{', '.join(map(str, doubtful))} of {source.path.name}; `slimrt inspect` says how far"
            )


def fold(
    source: ModelSource,
    choice: CacheChoice,
    calibration: str | os.PathLike[str] | None,
    show_progress: bool | None,
) -> dict[str, NDArray[np.float32]]:
    """The tensors that the file lacks, by name. Errors as slimrt.folding.fold.fold_layers and cross.fold_cross."""
    unfolded = folds_at_load(source, choice)
    mode = choice.cross.mode_for(source)
    missing = cross_folds_at_load(source, mode)
    if show_progress is not False and (unfolded or missing):
        modes = [*dict.fromkeys(cache.mode for cache in unfolded), *([f"{mode} of cross-attention"] if missing else [])]
        progress.note_once(
            f"folding {source.path.name} for cache mode {', '.join(modes)}; `slimrt convert` does it once and for all"
        )
    derived = _self_attention(source, unfolded, calibration, show_progress)
    if missing:
        from slimrt.folding.cross import fold_cross

        derived |= fold_cross(source.gguf, mode, missing, progress=progress.wanted(show_progress))
    return derived


def _self_attention(
    source: ModelSource,
    unfolded: Mapping[LayerCache, list[int]],
    calibration: str | os.PathLike[str] | None,
    show_progress: bool | None,
) -> dict[str, NDArray[np.float32]]:
    if not unfolded:
        return {}
    from slimrt.folding.fold import fold_layers

    derived: dict[str, NDArray[np.float32]] = {}
    for cache, layers in unfolded.items():
        residual = cache.mode == RESIDUAL_MODE
        derived |= fold_layers(
            source.gguf,
            cache.mode,
            cache_type=cache.type_k,
            rank=cache.rank if residual else None,
            residual_type=cache.residual_type if residual else None,
            calibration=calibration,
            layers=layers,
            progress=progress.wanted(show_progress),
        )
    return derived
