# SPDX-License-Identifier: Apache-2.0
"""Measures the largest sparse_delta, the softmax weight that decoding may leave unread, that changes little.

The bound of sparse_delta is statistical: it assumes that skipped values are independent, which does not hold for many
equal weights on similar rows. So its effect is measured, on a text and on one in which parts are repeated, where
attention has to find and copy, as in retrieval.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from slimrt.cache.config import CacheChoice
from slimrt.converter.request import shown
from slimrt.errors import CacheUnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Text, text_ids
from slimrt.folding.report import SparseReport
from slimrt.measure.quality import compare_caches
from slimrt.modelfile.gguf import ModelData
from slimrt.modelfile.reading import runnable
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AUTO, SPARED

KEY = "slimrt.cache.sparse_delta"
MOST_KL = 1e-4  # nats that skipping may add to a cache's mean KL divergence from kv f32
DELTAS = (0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03)
_WINDOW = 1024  # tokens, unless the model was trained on fewer
_SCORED = 512  # tokens scored of each text


def check_sparse(model: ModelData, attention: Attention, cache: str | None) -> None:
    """Raises CacheUnsupportedError or ValueError if sparse_delta does not apply to the mode, or there is no text to
    measure on."""
    if cache not in (*SPARED, AUTO):
        raise ValueError(f"sparse is for cache {', '.join(SPARED)} and {AUTO}, not for {shown(cache)}")
    if attention.encoder_decoder:
        raise CacheUnsupportedError(f"sparse measures on a text, which says nothing beside an encoder ('{model.arch}')")


def find_delta(path: Path, origin: Path, calibration: Text, *, show_progress: bool) -> SparseReport:
    """Measure a converted file and write the largest delta that changes little to its key KEY; 0 if there is none.

    Args:
        path: the file, before it is moved to its place; it must have KEY, whose four bytes are changed in place.
        origin: what it was converted from. calibration: the text to measure on. Errors as text_ids.
    """
    ids = text_ids(runnable(origin, show_progress), None if calibration == "none" else calibration)
    source = ModelSource(path, show_progress=show_progress)
    window = min(_WINDOW, source.n_ctx_train)
    if ids is None or len(ids) < window:
        return SparseReport(0.0, {}, "no text is long enough to measure on")
    unable = {layer.mode for layer in CacheChoice.of().layers(source)} - set(SPARED)
    if unable:
        return SparseReport(0.0, {}, f"layers in mode {', '.join(sorted(unable))} have nothing that a delta skips")
    texts, tried = (ids, _twice(ids, window)), dict[float, float]()
    low, high = 0, len(DELTAS)  # bisection: deltas before `low` change little, those from `high` on too much
    while low < high:
        middle = (low + high) // 2
        delta = DELTAS[middle]
        tried[delta] = max(_added(source, text, delta, window, show_progress) for text in texts)
        low, high = (middle + 1, high) if tried[delta] <= MOST_KL else (low, middle)
    if low == 0:
        return SparseReport(0.0, tried, f"every delta adds more than {MOST_KL:.0e} to the divergence from kv f32")
    _write(path, DELTAS[low - 1])
    return SparseReport(DELTAS[low - 1], tried)


def _twice(ids: np.ndarray, window: int) -> np.ndarray:
    """Windows in which the second half repeats the first."""
    half = window // 2
    parts = [ids[at : at + half] for at in range(0, len(ids) - half + 1, half)]
    return np.concatenate([np.concatenate([part, part]) for part in parts])


def _added(source: ModelSource, ids: np.ndarray, delta: float, window: int, show_progress: bool) -> float:
    """What skipping adds to the mean KL divergence from kv f32, nats, over the second halves of windows."""
    choices = [CacheChoice.of(sparse_delta=one) for one in (0.0, delta)]
    found = compare_caches(
        source, ids.tolist(), choices, window=window, prefix=window // 2, max_tokens=_SCORED, progress=show_progress
    )
    _, whole, spared = found.rows
    return max(spared.kl_mean - whole.kl_mean, 0.0)


def _write(path: Path, delta: float) -> None:
    field = GGUFReader(path, "r+").fields[KEY]
    field.parts[field.data[0]][0] = delta
