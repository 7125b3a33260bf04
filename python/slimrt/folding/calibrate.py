# SPDX-License-Identifier: Apache-2.0
"""Calibration: the text that a conversion measures a model on, and its activations in each layer.

One run of the model yields the attention inputs of all layers at once, and a layer's second moment is d x d. For a 7B
model neither fits in memory for all layers, so the inputs are written to one file per layer, and layers are processed
one at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from slimrt import core
from slimrt.errors import UnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.readback import Sample
from slimrt.folding.rotation import Rotation
from slimrt.folding.weights import LayerWeights
from slimrt.folding.wiener import shrunk
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import GgufPath, ModelData, opened
from slimrt.modelfile.source import CALIBRATION_CHUNK, MEASURED_ROWS, WHITE_ROWS
from slimrt.modelfile.text import file_ids
from slimrt.plumbing import progress as bars
from slimrt.plumbing.units import format_both
from slimrt.tokenizer.gguf import read_fields
from slimrt.tokenizer.tokenizer import Tokenizer

DEFAULT_TEXT = Path(__file__).with_name("calibration.txt")
_MIN_TOKENS = 4096
_PER_WIDTH = 4  # tokens per dimension of x: fewer leave directions unseen, more hardly change the second moments
_HELD_OUT = 5  # every fifth chunk is held out for measuring
WHITE_INPUTS = "for white inputs"

Text = str | os.PathLike[str] | None


def text_ids(gguf: GgufPath, text: Text, limit: int | None = None) -> np.ndarray | None:
    """Return the token ids of a text file (None: the built-in text), int32; None if no text is given and the model has
    no tokenizer.

    Only as much of the file is read as `limit` ids need.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or not UTF-8.
        UnsupportedError: a text is given, and the model has no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_gguf_fields(read_fields(opened(gguf)))
    except UnsupportedError as error:
        if text is None:
            return None
        raise UnsupportedError(f"{text} cannot be used for calibration without a tokenizer: {error}") from error
    path = DEFAULT_TEXT if text is None else Path(text)
    ids = file_ids(tokenizer, path, limit)
    if len(ids) == 0:
        raise ValueError(f"{path}: no text")
    return ids


@dataclass(frozen=True)
class Calibration:
    """Statistics of the inputs of a model's attention layers.

    Attributes:
        basis: a phrase on what they were measured on.
        model: the weights that will run.
        warnings: for the user.
        folder: has a file of inputs for each layer; None: no text, white inputs are assumed.
        chunks: number of tokens of each chunk of the text, in order.
        v_heads: for each layer, how many KV heads (the last ones) store V in modes k and k+r; (): none.
    """

    basis: str
    model: ModelData
    attention: Attention
    warnings: list[str]
    folder: Path | None = None
    chunks: tuple[int, ...] = ()
    v_heads: tuple[int, ...] = ()

    @property
    def inputs(self) -> str:
        """A phrase on the inputs for which errors are predicted."""
        return WHITE_INPUTS if self.folder is None else f"on {self.basis}"

    def keeps_v(self, layer: int) -> bool:
        """Whether all heads of a layer store V, so that its mode is kv."""
        return bool(self.v_heads) and self.v_heads[layer] == self.attention.n_kv_heads

    def layer(self, layer: int) -> tuple[Sample, list[Window]]:
        """The sample to fold one layer for, and windows of held-out text (none without a text)."""
        attention = self.attention.in_layer(layer)
        weights = LayerWeights(self.model, attention, layer)
        v_heads = self.v_heads[layer] if self.v_heads and not self.keeps_v(layer) else 0
        longest = max(self.chunks, default=WHITE_ROWS)
        rotation = Rotation.of(self.model, attention, longest)
        if self.folder is None:
            moment, x = white_inputs(weights)
            return Sample(weights, moment, [Window(weights, rotation, x)], v_heads), []
        moment, count = np.zeros((self.attention.d, self.attention.d)), 0
        windows: list[Window] = []
        held_out: list[Window] = []
        for number, x in enumerate(self._inputs(layer)):
            kept = held_out if self._is_held_out(number) else windows
            if sum(map(len, kept)) < MEASURED_ROWS:
                kept.append(Window(weights, rotation, x))
            if kept is windows:
                wide = x.astype(np.float64)
                moment += wide.T @ wide
                count += len(x)
        return Sample(weights, shrunk(moment / count, count), windows, v_heads), held_out

    def _inputs(self, layer: int) -> Iterator[np.ndarray]:
        assert self.folder is not None
        with _file(self.folder, layer).open("rb") as file:
            for length in self.chunks:
                x = np.fromfile(file, np.float32, length * self.attention.d)
                yield x.reshape(length, self.attention.d)

    def _is_held_out(self, number: int) -> bool:
        return number % _HELD_OUT == _HELD_OUT - 1


def _file(folder: Path, layer: int) -> Path:
    return folder / f"inputs.{layer}"


def white_inputs(weights: LayerWeights) -> tuple[np.ndarray, np.ndarray]:
    """Return S = E[x^T x] float64 [d, d] and random inputs float32 [n, d], for use without a text: the norm's output
    before its weight and bias is assumed to be white.

    Real activations are not white, so errors predicted from this are right only within a small factor.
    """
    gain, shift = weights.input_norm()
    random = np.random.default_rng(weights.layer)
    x = random.normal(size=(WHITE_ROWS, len(gain))) * gain + shift
    return np.diag(gain**2) + np.outer(shift, shift), x.astype(np.float32)


@contextmanager
def calibrated(
    gguf: GgufPath, model: ModelData, text: Text | np.ndarray, *, folder: Path | None = None, show_progress: bool
) -> Iterator[Calibration]:
    """Context manager: run a text through a model and yield the statistics of its layers, whose files exist until exit.

    Args:
        gguf: the file, or an open one, that is run.
        model: the weights that will run later, possibly requantised.
        text: a file, or token ids; None: the built-in text; "none": no text. Without a tokenizer, None means no text
            too, and a model with an encoder is never given any.
        folder: for the inputs, d * n_layers * 4 bytes per token; None: the system's temporary folder.

    Raises:
        OSError: too little disk space for the inputs. Others as `text_ids`.
    """
    attention = Attention.of(model)
    wanted = max(_MIN_TOKENS, _PER_WIDTH * attention.d) * _HELD_OUT // (_HELD_OUT - 1)
    ids: np.ndarray | None
    if attention.encoder_decoder:
        text = "none"  # a decoder's activations depend on the encoder's input, which is not known here
    if isinstance(text, np.ndarray):
        ids, name = text[:wanted], "text"
    else:
        ids = None if text == "none" else text_ids(gguf, text, wanted)
        name = "the built-in text" if text is None else Path(text).name
    if ids is None:
        yield Calibration("no text: white activations assumed", model, attention, [])
        return
    length = max(1, min(CALIBRATION_CHUNK, model.size("context_length"), len(ids) // _HELD_OUT))
    chunks = [ids[start : start + length] for start in range(0, len(ids), length)]
    with TemporaryDirectory(prefix=".slimrt-inputs.", dir=folder) as inner:
        _run(gguf, attention, chunks, Path(inner), show_progress)
        found = Calibration(
            f"{len(ids)} tokens of {name}", model, attention, [], Path(inner), tuple(len(chunk) for chunk in chunks)
        )
        used = sum(size for number, size in enumerate(found.chunks) if not found._is_held_out(number))
        if used < _PER_WIDTH * attention.d:
            found.warnings.append(
                f"calibrated on {used} tokens of {name}, and inputs {attention.d} wide want "
                f"{_PER_WIDTH * attention.d}: the fold is cautious where it has seen nothing; a longer text would "
                "be better (--calibration FILE)"
            )
        yield found


def _run(gguf: GgufPath, attention: Attention, chunks: list[np.ndarray], folder: Path, show_progress: bool) -> None:
    n_tokens = sum(map(len, chunks))
    needed, free = n_tokens * attention.n_layers * attention.d * 4, shutil.disk_usage(folder).free
    if needed > free:
        wanted, there = format_both(needed, free)
        message = f"calibration needs {wanted} for activations, {there} free"
        raise OSError(errno.ENOSPC, message, str(folder.parent))
    engine = core.Engine(opened(gguf), n_ctx=len(chunks[0]), cache="kv", cache_type_k="f32", cache_type_v="f32")
    done = 0
    with bars.bar(show_progress, n_tokens, "calibrating", "token") as update:
        for chunk in chunks:
            inputs = engine.attention_inputs(chunk)
            for layer in range(attention.n_layers):
                with _file(folder, layer).open("ab") as file:
                    inputs[layer].tofile(file)
            done += len(chunk)
            update(done, n_tokens)
