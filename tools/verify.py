# SPDX-License-Identifier: Apache-2.0
"""Does a converted model still say the same? Its logits against the source's, through cached decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from slimrt import progress as bars
from slimrt.quality import surprise_and_divergence

from .report import VerifyReport

_MAX_TOKENS = 256


def compare(
    source: Path, result: Path, ids: np.ndarray | None, cache_type: str, *, show_progress: bool
) -> VerifyReport:
    """Compare the logits of two models on a text.

    Half of the text is prefilled and the rest decoded a token at a time, since one prefill pass computes with fresh
    K and V and would hide what the cache costs.

    Args:
        source: a GGUF file, run with a float32 `kv` cache.
        result: a GGUF file, run with the cache it declares.
        ids: token ids int32 [n], of which at most 256 are used; None: arbitrary ones.
        cache_type: element type of the result's cache.
    """
    from slimrt import _core

    shape = _core.plan(str(source))
    n = min(_MAX_TOKENS, shape["n_ctx_train"], _MAX_TOKENS if ids is None else len(ids))
    if ids is None:
        ids = np.random.default_rng(0).integers(0, shape["n_vocab"], n)
    ids = np.asarray(ids[:n], np.int32)
    with bars.bar(show_progress, 2 * n, "verifying", "token") as update:
        wanted = _decode(source, ids, "kv", "f32", lambda done: update(done, 2 * n))
        got = _decode(result, ids, "auto", cache_type, lambda done: update(n + done, 2 * n))
    return difference(got, wanted)


def _decode(path: Path, ids: np.ndarray, cache: str, cache_type: str, update: Callable[[int], object]) -> np.ndarray:
    """Logits float64 [rows, vocab] of the last prefilled token and of each decoded one."""
    from slimrt import _core

    engine = _core.Engine(str(path), n_ctx=len(ids), cache=cache, cache_type_k=cache_type, cache_type_v=cache_type)
    sequence, half = engine.new_sequence(), max(1, len(ids) // 2)
    rows = [engine.append([(sequence, ids[:half])])[0]]
    for at in range(half, len(ids)):
        rows.append(engine.append([(sequence, ids[at : at + 1])])[0])
        update(at + 1)
    return np.array(rows, np.float64)


def difference(got: np.ndarray, wanted: np.ndarray) -> VerifyReport:
    """Compare logits [rows, vocab], float64."""
    _, kl = surprise_and_divergence(got, wanted, wanted.argmax(axis=1))
    largest = float(np.abs(got - wanted).max())
    return VerifyReport(
        tokens=len(wanted),
        max_abs=largest,
        max_rel=largest / float(np.abs(wanted).max()),
        kl=float(kl.mean()),
        same_top=float((got.argmax(axis=1) == wanted.argmax(axis=1)).mean()),
    )
