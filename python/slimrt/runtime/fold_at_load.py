"""Folding at load: computes the folded weights that a file lacks, and refuses caches that are too imprecise."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slimrt.cache.config import CacheChoice, LayerCache
from slimrt.cache.unfolded import cross_folds_at_load, folds_at_load, owning
from slimrt.errors import CacheUnsupportedError
from slimrt.modelfile.source import ModelSource
from slimrt.modes import RESIDUAL_MODE
from slimrt.plumbing import progress
from slimrt.plumbing.notes import note

if TYPE_CHECKING:
    from slimrt.folding.gate import Lossy


def lossy_layers(source: ModelSource, choice: CacheChoice) -> dict[Lossy, list[int]]:
    """Cached rows whose mode may be too imprecise -> the layers that have them, of both attentions."""
    from slimrt.folding.gate import CROSS, Lossy

    losing: dict[Lossy, list[int]] = {}
    for layer, cache in owning(source, choice.layers(source)):
        losing.setdefault(_lossy(cache), []).append(layer)
    if source.has_encoder and source.has_decoder:
        cross = choice.cross.resolved(source)
        losing[Lossy(CROSS, cross.mode, cross.type)] = list(range(int(source.defaults["n_layers"])))
    return {rows: layers for rows, layers in losing.items() if rows.loses}


def _lossy(cache: LayerCache) -> Lossy:
    from slimrt.folding.gate import SELF, Lossy

    residual = (cache.rank, cache.residual_type) if cache.mode == RESIDUAL_MODE else None
    return Lossy(SELF, cache.mode, cache.type, residual)


def require_precise(source: ModelSource, choice: CacheChoice) -> list[str]:
    """Refuse modes that are too imprecise (they invert a projection, or have a small residual) in layers that need not
    be folded; the other layers are judged while they are folded. Returns sentences on modes that are over the limit
    and that allow_lossy permits.

    Raises:
        CacheUnsupportedError: names the error, the layer and the nearest mode that is precise enough.
    """
    from slimrt.folding.gate import CROSS

    said = []
    unfolded = {layer for layers in folds_at_load(source, choice.layers(source)).values() for layer in layers}
    for rows, layers in lossy_layers(source, choice).items():
        judge = Judge(source, rows, choice)
        judge.predict([layer for layer in layers if rows.part == CROSS or layer not in unfolded])
        said += judge.say()
    return said


def refusal(
    source: ModelSource, choice: CacheChoice, *, only_cheap: bool, show_progress: bool | None = False
) -> str | None:
    """Why loading would refuse this choice as too imprecise; "": it would not. None: with only_cheap, if it would take
    long to determine.

    Loading predicts the error of some modes on a text; here it is predicted for white inputs, which is faster.
    """
    from slimrt.folding.gate import predicts_fast

    for rows, layers in lossy_layers(source, choice).items():
        if only_cheap and not predicts_fast(source.model, rows, layers):
            return None
        try:
            Judge(source, rows, choice).predict(layers, show_progress)
        except CacheUnsupportedError as error:
            return str(error)
    return ""


class Judge:
    """Judges the error of layers with the same cached rows: refuses those over the limit, and collects those that
    deserve a warning."""

    def __init__(self, source: ModelSource, rows: Lossy, choice: CacheChoice):
        self.source, self.rows, self.allowed = source, rows, choice.allow_lossy
        self.doubtful: dict[int, float] = {}

    def __call__(self, layer: int, error: float, inputs: str) -> None:
        """Judge a layer. CacheUnsupportedError: its error is over the limit, and allow_lossy is not set."""
        from slimrt.folding.gate import require_precise
        from slimrt.folding.report import CAUTION

        if not self.rows.loses:
            return
        if not self.allowed:
            require_precise(self.source.model, self.rows, layer, error, inputs)
        if error > CAUTION:
            self.doubtful[layer] = error

    def predict(self, layers: list[int], show_progress: bool | None = False) -> None:
        """Predict and judge the errors of layers, from the file or by folding them for white inputs."""
        from slimrt.folding.calibrate import WHITE_INPUTS
        from slimrt.folding.gate import predicted, written

        if not layers:
            return
        known = written(self.source.model, self.rows)
        with progress.bar(progress.wanted(show_progress), len(layers), "predicting errors", "layer") as update:
            for done, (layer, error) in enumerate(predicted(self.source.model, self.rows, layers), start=1):
                self(layer, error, "by its conversion" if layer in known else WHITE_INPUTS)
                update(done, len(layers))

    def say(self) -> list[str]:
        """Emit a warning on the layers collected; returns it, in a list, if one of them is over the limit, else []."""
        from slimrt.folding.gate import percent
        from slimrt.folding.report import TOO_LARGE

        if not self.doubtful:
            return []
        worst = max(self.doubtful, key=lambda layer: self.doubtful[layer])
        several = len(self.doubtful) > 1
        said = (
            f"{self.rows.part} cache mode {self.rows.mode} in {self.rows.type} loses more than 1 % of {self.rows.lost} "
            f"in layer{'s' * several} {', '.join(map(str, sorted(self.doubtful)))} of {self.source.name}"
            f"{f', most in layer {worst}' * several}: {percent(self.doubtful[worst])}"
        )
        note(said, logging.WARNING)
        return [said] if self.doubtful[worst] > TOO_LARGE else []


def fold(
    source: ModelSource,
    choice: CacheChoice,
    calibration: str | os.PathLike[str] | None,
    show_progress: bool | None,
) -> tuple[dict[str, NDArray[np.float32]], list[str]]:
    """The folded tensors that the file lacks, by name, and sentences on modes over the limit that allow_lossy permits.
    Errors as slimrt.folding.fold.fold_layers and cross.fold_cross."""
    unfolded = folds_at_load(source, choice.layers(source))
    mode = choice.cross.mode_for(source)
    missing = cross_folds_at_load(source, mode)
    if unfolded or missing:
        modes = [*dict.fromkeys(cache.mode for cache in unfolded), *([f"{mode} of cross-attention"] if missing else [])]
        note(f"folding {source.name} for cache mode {', '.join(modes)}; `slimrt convert` does it once and for all")
    derived, said = _self_attention(source, choice, unfolded, calibration, show_progress)
    if missing:
        from slimrt.folding.cross import fold_cross

        derived |= fold_cross(source.model, mode, missing, progress=progress.wanted(show_progress))
    return derived, said


def _self_attention(
    source: ModelSource,
    choice: CacheChoice,
    unfolded: Mapping[LayerCache, list[int]],
    calibration: str | os.PathLike[str] | None,
    show_progress: bool | None,
) -> tuple[dict[str, NDArray[np.float32]], list[str]]:
    if not unfolded:
        return {}, []
    from slimrt.folding.fold import fold_layers

    derived: dict[str, NDArray[np.float32]] = {}
    said: list[str] = []
    for cache, layers in unfolded.items():
        residual = cache.mode == RESIDUAL_MODE
        rows = _lossy(cache)
        judge = Judge(source, rows, choice) if rows.loses else None
        derived |= fold_layers(
            source.file,
            cache.mode,
            cache_type=cache.type,
            rank=cache.rank if residual else None,
            residual_type=cache.residual_type if residual else None,
            calibration=calibration,
            layers=layers,
            progress=progress.wanted(show_progress),
            judge=judge,
        )
        if judge is not None:
            said += judge.say()
    return derived, said
