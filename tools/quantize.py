# SPDX-License-Identifier: Apache-2.0
"""Store a model's weights in another type."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType

from slimrt.errors import ModelFormatError, UnsupportedError

from .gguf_file import F32, ModelData, Tensor, uint32

OUT_TYPES = {name: GGMLQuantizationType[name.upper()] for name in ("f32", "f16", "bf16", "q8_0", "q4_0")}
_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}
_LARGEST_F16 = 65504.0
# Four bits cost most where a token enters and leaves the model, and these two are a small part of a large one.
_ENDS = ("token_embd.weight", "output.weight")
# Small, and read element by element: never worth a smaller type.
_KEPT = ("position_embd.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def requantise(model: ModelData, outtype: str) -> tuple[ModelData, list[str]]:
    """Return the model with its weight matrices in another type, converted when they are written.

    Norms, biases and positions stay float32. A matrix whose rows do not divide into blocks of 32 becomes f16, and in
    q4_0 the token embedding and the output matrix become q8_0.

    Args:
        outtype: a key of OUT_TYPES.

    Returns:
        The model, and a warning for each matrix that could not get the type.
    """
    wanted, warnings, changed = OUT_TYPES[outtype], [], []
    for tensor in model.tensors.values():
        kind = _type_for(tensor, wanted)
        if kind == GGMLQuantizationType.F16 != wanted:
            warnings.append(f"{tensor.name} stays f16: its rows of {tensor.shape[-1]} are no multiple of 32")
        if kind != tensor.type:
            changed.append(replace(tensor, type=kind, load=partial(_converted, tensor, kind)))
    metadata = {"general.file_type": uint32(int(_FILE_TYPES[outtype]))}
    if wanted in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0):
        metadata["general.quantization_version"] = uint32(2)
    return model.with_tensors(*changed).with_metadata(metadata), warnings


def _type_for(tensor: Tensor, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(tensor.shape) == 1 or tensor.name in _KEPT:
        return tensor.type
    block, _ = GGML_QUANT_SIZES[wanted]
    if tensor.shape[-1] % block:
        return GGMLQuantizationType.F16
    if wanted == GGMLQuantizationType.Q4_0 and tensor.name in _ENDS:
        return GGMLQuantizationType.Q8_0
    return wanted


def _converted(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """The stored bytes of a tensor in another type.

    Raises:
        ModelFormatError: it holds NaN or infinity, which a block scale would spread.
        UnsupportedError: f16 cannot hold it.
    """
    values = tensor.values()
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        raise ModelFormatError(f"tensor '{tensor.name}' holds values that are not finite")
    if kind == GGMLQuantizationType.F16 and largest > _LARGEST_F16:
        raise UnsupportedError(f"tensor '{tensor.name}' reaches {largest:.3g}, f16 only 65504; use bf16 or f32")
    return quants.quantize(values, kind).view(np.uint8) if kind != F32 else values.view(np.uint8)
