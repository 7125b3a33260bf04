# SPDX-License-Identifier: Apache-2.0
"""The text that a conversion measures a model on: which one, its tokens, and what they do to each layer.

Attention inputs of all layers come out of one run together, and a layer's second moment is d x d: for a 7B model
neither fits in memory, so the inputs go to files, one a layer, and each layer is taken up alone.
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
from slimrt.folding.attention import Attention, LayerWeights
from slimrt.folding.readback import Sample
from slimrt.folding.rotation import Rotation
from slimrt.folding.wiener import shrunk
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import GgufPath, ModelData, opened
from slimrt.modelfile.text import text_pieces
from slimrt.plumbing import progress as bars
from slimrt.plumbing.units import format_bytes
from slimrt.tokenizer.gguf import read_fields
from slimrt.tokenizer.tokenizer import Tokenizer

DEFAULT_TEXT = Path(__file__).with_name("calibration.txt")
_MIN_TOKENS = 4096
_PER_WIDTH = 4  # tokens for each dimension of x: fewer leave directions unseen, more hardly move the moments
_CHUNK = 1024  # tokens whose activations are in memory at a time, for all layers
_HELD_OUT = 5  # one chunk in so many is kept for measuring
_ROWS = 2048  # tokens whose rounding is looked at
WHITE_INPUTS = "for white inputs"
_WHITE = 512  # tokens in place of a text

Text = str | os.PathLike[str] | None


def text_ids(gguf: GgufPath, text: Text, limit: int | None = None) -> np.ndarray | None:
    """Return the token ids of a text file (None: the built-in one), int32; None for a model without a tokenizer.

    No more of the file is read than `limit` ids need.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or not UTF-8.
        UnsupportedError: a text is named, and the model has no tokenizer for it.
    """
    try:
        tokenizer = Tokenizer.from_gguf_fields(read_fields(opened(gguf)))
    except UnsupportedError as error:
        if text is None:
            return None
        raise UnsupportedError(f"{text} cannot be measured on, for want of a tokenizer: {error}") from error
    path = DEFAULT_TEXT if text is None else Path(text)
    ids: list[int] = []
    for piece in text_pieces(path):
        ids += tokenizer.encode(piece, add_special_tokens=not ids)
        if limit is not None and len(ids) >= limit:
            break
    if not ids:
        raise ValueError(f"{path}: no text")
    return np.array(ids[:limit], np.int32)


@dataclass(frozen=True)
class Calibration:
    """What is known about the inputs of a model's attention layers.

    Attributes:
        basis: what it rests on, for people.
        model: the weights that will run.
        warnings: what the user should know.
        folder: a file of inputs a layer; None: no text, white inputs are assumed.
        chunks: tokens in each stretch of text, in order.
        v_heads: of each layer, KV heads that keep V in modes k and k+r, the last ones; (): none.
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
        """For what inputs its predictions hold."""
        return WHITE_INPUTS if self.folder is None else f"on {self.basis}"

    def keeps_v(self, layer: int) -> bool:
        """Whether all heads of a layer keep V: it has mode kv."""
        return bool(self.v_heads) and self.v_heads[layer] == self.attention.n_kv_heads

    def layer(self, layer: int) -> tuple[Sample, list[Window]]:
        """The sample to fold one layer for, and windows of text that had no part in it (none without a text)."""
        attention = self.attention.in_layer(layer)
        weights = LayerWeights(self.model, attention, layer)
        v_heads = self.v_heads[layer] if self.v_heads and not self.keeps_v(layer) else 0
        longest = max(self.chunks, default=_WHITE)
        rotation = Rotation.of(self.model, attention, longest)
        if self.folder is None:
            moment, x = white_inputs(weights)
            return Sample(weights, moment, [Window(weights, rotation, x)], v_heads), []
        moment, count = np.zeros((self.attention.d, self.attention.d)), 0
        windows: list[Window] = []
        held_out: list[Window] = []
        for number, x in enumerate(self._inputs(layer)):
            kept = held_out if self._is_held_out(number) else windows
            if sum(map(len, kept)) < _ROWS:
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
    """Return S and a sample of inputs without any text: the norm's output before gain and shift is taken to be white.

    Real activations are not, so what follows from this is a guess within a small factor; a text is better.
    """
    gain, shift = weights.input_norm()
    random = np.random.default_rng(weights.layer)
    x = random.normal(size=(_WHITE, len(gain))) * gain + shift
    return np.diag(gain**2) + np.outer(shift, shift), x.astype(np.float32)


@contextmanager
def calibrated(
    gguf: GgufPath, model: ModelData, text: Text | np.ndarray, *, folder: Path | None = None, show_progress: bool
) -> Iterator[Calibration]:
    """Run a text through a model and yield what it did to each layer; its files are gone afterwards.

    Args:
        gguf: the file, perhaps open, whose activations are taken.
        model: the weights that will run, perhaps requantised.
        text: a file, or its token ids; None: the built-in text; "none", None for a model without a tokenizer, any for
            a model with an encoder: no text.
        folder: where the inputs wait (None: where temporary files go): d * layers * 4 bytes a token.

    Raises:
        OSError: too little room for the inputs. Others as `text_ids`.
    """
    attention = Attention.of(model)
    wanted = max(_MIN_TOKENS, _PER_WIDTH * attention.d) * _HELD_OUT // (_HELD_OUT - 1)
    ids: np.ndarray | None
    if attention.encoder_decoder:
        text = "none"  # what a decoder computes depends on what its encoder read, which no text here says
    if isinstance(text, np.ndarray):
        ids, name = text[:wanted], "text"
    else:
        ids = None if text == "none" else text_ids(gguf, text, wanted)
        name = "the built-in text" if text is None else Path(text).name
    if ids is None:
        yield Calibration("no text: white activations assumed", model, attention, [])
        return
    length = max(1, min(_CHUNK, model.size("context_length"), len(ids) // _HELD_OUT))
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
                "serve better (--calibration FILE)"
            )
        yield found


def _run(gguf: GgufPath, attention: Attention, chunks: list[np.ndarray], folder: Path, show_progress: bool) -> None:
    n_tokens = sum(map(len, chunks))
    needed, free = n_tokens * attention.n_layers * attention.d * 4, shutil.disk_usage(folder).free
    if needed > free:
        message = f"calibration needs {format_bytes(needed)} for activations, {format_bytes(free)} free"
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
