# SPDX-License-Identifier: Apache-2.0
"""Verifies a converted model: compares its logits with those of the source, decoding with the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slimrt import core
from slimrt.folding.report import VerifyReport
from slimrt.plumbing import progress as bars
from slimrt.plumbing.numbers import surprise_and_divergence
from slimrt.speech.audio import SAMPLE_RATE
from slimrt.speech.mel import HOP, log_mel

MAX_TOKENS = 256
_SECONDS = 4  # of audio, for an encoder that reads samples


def compare(
    source: Path, result: Path, ids: np.ndarray | None, cache_type: str, *, show_progress: bool
) -> VerifyReport:
    """Compare the logits of two models on a text.

    Half of the text is prefilled and the rest decoded one token at a time, since a prefill computes with unrounded K
    and V, which would hide the error of the cache. An encoder is given the beginning of the text, or noise if it reads
    audio.

    Args:
        source: a GGUF file, run with a float32 `kv` cache, also of cross-attention.
        result: a GGUF file, run with the cache in its metadata.
        ids: token ids int32 [n], of which at most 256 are used; None: random ones.
        cache_type: element type of the result's cache.
    """
    shape, rng = core.plan(str(source)), np.random.default_rng(0)
    encoder = shape["encoder"]
    n = min(MAX_TOKENS, shape["n_ctx_train"], MAX_TOKENS if ids is None else len(ids))
    if ids is None:
        ids = rng.integers(0, shape["n_vocab"], n)
    ids = np.asarray(ids[:n], np.int32)
    heard = None if encoder is None else _source(encoder, ids, rng)
    plain = {"cache": core.baseline(str(source)), "cache_type_k": "f32", "cache_type_v": "f32"}
    own = {"cache": "auto", "cache_type_k": cache_type, "cache_type_v": cache_type}
    if encoder is not None:
        plain |= {"cross": "kv", "cross_type": "f32"}
        own |= {"cross": "auto", "cross_type": "auto"}
    with bars.bar(show_progress, 2 * n, "verifying", "token") as update:
        wanted = _decode(source, ids, heard, plain, lambda done: update(done, 2 * n))
        got = _decode(result, ids, heard, own, lambda done: update(n + done, 2 * n))
    return difference(got, wanted)


def _source(encoder: Mapping[str, Any], ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Inputs for an encoder: ids int32 [n], or noise of varying loudness as samples [n, 1] or mel [frames, n_mels]."""
    if encoder["inputs"] == "tokens":
        return ids[: encoder["n_source"]]
    mel = encoder["inputs"] == "mel"
    count = 2 * int(encoder["n_source"]) * HOP if mel else _SECONDS * SAMPLE_RATE
    loudness = np.sin(np.arange(count) * (2 * np.pi / SAMPLE_RATE)) ** 2
    noise = (0.3 * loudness * rng.standard_normal(count)).astype(np.float32)
    return log_mel(noise, int(encoder["n_inputs"])) if mel else noise[:, None]


def _decode(
    path: Path, ids: np.ndarray, heard: np.ndarray | None, cache: Mapping[str, Any], update: Callable[[int], object]
) -> np.ndarray:
    """Logits float64 [rows, vocab] of the last prefilled token and of each decoded one. heard: input of the encoder, or
    None."""
    engine = core.Engine(str(path), n_ctx=len(ids), **cache)
    sequence, half = engine.new_sequence(), max(1, len(ids) // 2)
    if heard is not None:
        engine.encode([(sequence, heard)])
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
