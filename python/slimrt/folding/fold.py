# SPDX-License-Identifier: Apache-2.0
"""Folding: computing the tensors that a cache mode needs in each layer in addition to the model's own."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from slimrt import core
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Text, calibrated
from slimrt.folding.conditioned import Conditioned
from slimrt.folding.lowrank import LowRank
from slimrt.folding.readback import KvReader, Reader, Sample, VReader, XReader, XrReader
from slimrt.folding.slim import KReader
from slimrt.folding.weights import fold_value_bias
from slimrt.modelfile.gguf import GgufPath, opened, read_gguf
from slimrt.modes import FOLDED, default_residual, reads_text
from slimrt.plumbing import progress as bars

# modes without a residual, levels, or another option
_PLAIN: dict[str, Callable[[Sample, str], Reader]] = {
    "kv": KvReader,
    "k": KReader,
    "v": VReader,
    "x": XReader,
}


def reader(
    sample: Sample,
    mode: str,
    type_name: str,
    rank: int | None = None,
    residual_type: str | None = None,
    *,
    half: bool,
    heads: int | None = None,
) -> Reader:
    """Fold one layer for a mode.

    Args:
        sample: the layer and the text it is folded for.
        mode: a mode that is legal here. type_name: element type of its rows; of mode "lowrank" its levels.
        rank, residual_type: of mode "k+r"; None: the default.
        half: folded weights may be float16 if rows have 8 bits or fewer.
        heads: KV heads that share a latent, of mode "lowrank"; None: the default.

    Raises:
        CacheUnsupportedError: a projection to be inverted is singular.
    """
    if mode == "k+r":
        usual = default_residual(mode, type_name, sample.slim)
        rank = usual[0] if rank is None else rank
        return Conditioned(sample, type_name, half=half, max_rank=rank).reader(rank, residual_type or usual[1])
    if mode == "xr":
        return XrReader(sample, type_name, half=half)
    if mode == "lowrank":
        levels = core.levels(mode, type_name)
        kept = next((level.type_k for level in levels.of if level.part), "f16")
        return LowRank(sample, heads=heads, predicts=kept if levels.predicts else None).reader(type_name)
    return _PLAIN[mode](sample, type_name)


def fold_layers(
    path: GgufPath,
    mode: str,
    *,
    cache_type: str = "f16",
    rank: int | None = None,
    residual_type: str | None = None,
    calibration: Text = None,
    layers: Collection[int] | None = None,
    progress: bool = True,
    judge: Callable[[int, float, str], object] | None = None,
) -> dict[str, np.ndarray]:
    """Return the tensors that a cache mode needs in addition to those of a plain GGUF file, for loading it without a
    conversion.

    Args:
        path: a GGUF file, or an open one.
        mode: "k", "v", "k+r", "xr" or "lowrank".
        cache_type: element type of the rows, for which k+r and xr are folded; of lowrank its levels.
        rank, residual_type: of the residual of k+r; None: the default for the type.
        calibration: a text file for k+r, xr and lowrank; None: the built-in text, if the model has a tokenizer; "none":
            no text.
        layers: indices; None: all. Layers that read another layer's rows are skipped.
        progress: show a bar on stderr if that is a terminal.
        judge: called as f(layer, error, inputs) with the expected relative error of what is computed from the layer's
            rows, and the inputs for which it is predicted; may raise to refuse it.

    Returns:
        Tensors by name ("blk.N.attn_kv.weight", ...), float32, of k+r and xr partly float16: for "k" W [e_v, e_k] with
        V = K @ W.T, for "v" W [e_k, e_v] with K = V @ W.T. Folded in float64, one layer in memory at a time.

    Raises:
        ValueError: another mode, or a rank wider than V.
        CacheUnsupportedError: the mode is not exact for this model; names the layer, the reason, and legal modes.
        ModelFormatError, UnsupportedError, OSError: the file is broken or of an unknown architecture.
    """
    if mode not in FOLDED:
        raise ValueError(f"cache mode {mode!r} needs no fold; those that do: {', '.join(FOLDED)}")
    file = opened(path)
    model = read_gguf(file)
    attention = Attention.of(model)
    attention.require(mode)
    check_rank(attention, rank)
    wanted, show = attention.owning(layers), bars.wanted(None) and progress
    made: dict[str, np.ndarray] = {}
    text = calibration if reads_text(mode, cache_type) else "none"
    with (
        calibrated(file, fold_value_bias(model, attention), text, show_progress=show) as known,
        bars.bar(show, len(wanted), "folding", "layer") as update,
    ):
        for done, layer in enumerate(wanted):
            folded = reader(known.layer(layer)[0], mode, cache_type, rank, residual_type, half=True)
            if judge is not None:
                judge(layer, folded.fold_error(), known.inputs)
            made |= {f"{attention.prefix(layer)}{name}": tensor for name, tensor in folded.tensors.items()}
            del folded  # with all that was measured of the layer, before the next one's
            update(done + 1, len(wanted))
    return made


def check_rank(attention: Attention, rank: int | None) -> None:
    """Raises ValueError for a residual wider than V, or of a negative width."""
    if rank is not None and not 0 <= rank <= attention.kv_width:
        raise ValueError(f"rank must be from 0 to {attention.kv_width}, the width of V, got {rank}")
