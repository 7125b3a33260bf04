# SPDX-License-Identifier: Apache-2.0
"""The text that a conversion measures a model on: which one, its tokens, and what they do to each layer."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from slimrt import progress as bars
from slimrt.errors import UnsupportedError
from slimrt.files import decode_text
from slimrt.tokenizer import Tokenizer

from .fold import Attention, projections
from .gguf_file import ModelData
from .precision import Moments

DEFAULT_TEXT = Path(__file__).with_name("calibration.txt")
_MAX_TOKENS = 4096  # second moments are averages: more text hardly moves them
_CHUNK = 1024  # tokens whose activations are in memory at a time, for all layers


def text_ids(gguf: Path, text: str | os.PathLike[str] | None) -> np.ndarray | None:
    """Return the token ids of a text file (None: the built-in one), int32; None for a model without a tokenizer.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or not UTF-8.
        UnsupportedError: a text is named, and the model has no tokenizer for it.
    """
    try:
        tokenizer = Tokenizer(gguf)
    except UnsupportedError as error:
        if text is None:
            return None
        raise UnsupportedError(f"{text} cannot be measured on, for want of a tokenizer: {error}") from error
    path = DEFAULT_TEXT if text is None else Path(text)
    ids = tokenizer.encode(decode_text(path.read_bytes(), str(path)))
    if not ids:
        raise ValueError(f"{path}: no text")
    return np.array(ids, np.int32)


def text_moments(
    gguf: Path, model: ModelData, mode: str, ids: np.ndarray, *, show_progress: bool
) -> tuple[list[Moments], int]:
    """Return the moments of each layer's stored row and of its result over a text, and the number of tokens used.

    Args:
        gguf: the file whose activations are taken.
        model: the weights that will run, perhaps requantised.
        mode: "k" or "v".
        ids: token ids int32 [n].
    """
    from slimrt import _core

    attention = Attention.of(model)
    ids = ids[:_MAX_TOKENS]
    chunk = min(_CHUNK, model.size("context_length"), len(ids))
    engine = _core.Engine(str(gguf), n_ctx=chunk, cache="kv", cache_type_k="f32", cache_type_v="f32")
    squares = [np.zeros(2 * attention.kv_width) for _ in range(attention.n_layers)]  # of K's channels, then V's
    with bars.bar(show_progress, len(ids), "calibrating", "token") as update:
        for start in range(0, len(ids), chunk):
            inputs = engine.attention_inputs(ids[start : start + chunk])
            for layer in range(attention.n_layers):
                both = np.concatenate(
                    projections(model, attention, layer), axis=1, dtype=np.float32, casting="same_kind"
                )
                squares[layer] += np.square(inputs[layer] @ both, dtype=np.float64).sum(axis=0)
            update(min(start + chunk, len(ids)), len(ids))
    halves = [np.split(total / len(ids), 2) for total in squares]
    rows = [half if mode == "k" else half[::-1] for half in halves]
    return [Moments(row, float(result.sum())) for row, result in rows], len(ids)
