# SPDX-License-Identifier: Apache-2.0
"""Storing a model's weights in another type."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType

from slimrt import core
from slimrt.converter.importance import NONE, Importance
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData, Tensor, uint32

_Kind = GGMLQuantizationType
_PLAIN = (_Kind.F32, _Kind.F16, _Kind.BF16)
# Quantised by the core: gguf-py has no quantisers of these.
_BY_US = (_Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K)
_WEIGHTED = (*_BY_US, _Kind.Q4_0)  # types for which columns may count more or less


@dataclass(frozen=True)
class OutType:
    """The type of each weight matrix.

    Attributes:
        kind: of all matrices but those below.
        file_type: general.file_type in the metadata.
        output: of the output matrix, or of the token embedding if that is tied to it; None: `kind`. These two are the
            most sensitive to few bits.
        embedding: of a token embedding that is not tied; None: `kind`.
        more_bits: of attn_v, attn_qkv and ffn_down in half of the layers; None: `kind`.
    """

    kind: GGMLQuantizationType
    file_type: LlamaFileType
    output: GGMLQuantizationType | None = None
    embedding: GGMLQuantizationType | None = None
    more_bits: GGMLQuantizationType | None = None


OUT_TYPES = {
    "f32": OutType(_Kind.F32, LlamaFileType.ALL_F32),
    "f16": OutType(_Kind.F16, LlamaFileType.MOSTLY_F16),
    "bf16": OutType(_Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": OutType(_Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": OutType(_Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0, output=_Kind.Q8_0, embedding=_Kind.Q8_0),
    "q2_k": OutType(_Kind.Q2_K, LlamaFileType.MOSTLY_Q2_K_S, output=_Kind.Q6_K),
    "q3_k": OutType(_Kind.Q3_K, LlamaFileType.MOSTLY_Q3_K_S, output=_Kind.Q6_K),
    "q4_k": OutType(_Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_S, output=_Kind.Q6_K),
    "q4_k_m": OutType(_Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, output=_Kind.Q6_K, more_bits=_Kind.Q6_K),
    "q5_k": OutType(_Kind.Q5_K, LlamaFileType.MOSTLY_Q5_K_S, output=_Kind.Q6_K),
    "q6_k": OutType(_Kind.Q6_K, LlamaFileType.MOSTLY_Q6_K),
}
_MORE_BITS = re.compile(r"(enc\.|dec\.|)blk\.(\d+)\.(?:attn_v|attn_qkv|cross_attn_v|ffn_down(?:_exps|_shexp)?)\.weight")
# Small tensors that are read element by element: these stay as they are.
_KEPT = re.compile(
    r"(.*\.)?(position_embd|attn_rel_b|conv\d|ffn_gate_inp|ffn_gate_inp_shexp"
    r"|rope_freqs|rope_factors_long|rope_factors_short)\.weight|slimrt\.(bolt|chronos2)\..*"
)
# The largest representable values; for K types they depend on the whole block.
_LARGEST = {_Kind.F16: 65504.0, _Kind.Q8_0: 127 * 65504.0, _Kind.Q4_0: 8 * 65504.0}
_AT_ONCE = 1 << 23  # elements in memory at once: 32 MiB of f32, quantised in a tenth of a second on one core


def check_outtype(name: str) -> None:
    """Raises ValueError unless name is a key of OUT_TYPES."""
    if name not in OUT_TYPES:
        raise ValueError(f"unknown outtype {name!r}; the types are: {', '.join(OUT_TYPES)}")


def check_weighted(outtype: str | None) -> None:
    """Raises ValueError unless an importance matrix is of use for a key of OUT_TYPES."""
    of_use = [name for name, out in OUT_TYPES.items() if out.kind in _WEIGHTED]
    if outtype not in of_use:
        given = "none is given" if outtype is None else f"not for {outtype}"
        raise ValueError(f"an importance matrix (imatrix) is for the outtypes {', '.join(of_use)}; {given}")


def requantise(model: ModelData, outtype: str, importance: Importance = NONE) -> tuple[ModelData, list[str]]:
    """Return the model with its weight matrices in another type, converted when they are written.

    Norms, biases, positions and convolutions stay float32. A matrix whose rows are no multiple of 256 becomes q8_0 in
    place of a K type, and one whose rows are no multiple of 32 becomes f16.

    q4_0 has the token embedding and the output matrix in q8_0. The K types have the output matrix, or a tied token
    embedding, in q6_k. q4_k_m also has attn_v (attn_qkv) and ffn_down in q6_k, in the first and last eighth of the
    layers and every third layer between: the tensors and layers of llama.cpp's Q4_K_M.

    Args:
        outtype: a key of OUT_TYPES.
        importance: what the columns of each matrix count; the metadata say where it is from.

    Returns:
        The model, and warnings: one for each combination of types and row length in which matrices could not get the
        type, one on matrices that are rounded twice, and one on those of which nothing is said of the columns.
    """
    out, changed = OUT_TYPES[outtype], list[Tensor]()
    others: dict[tuple[bool, _Kind, _Kind, int], list[str]] = {}  # (unchanged, type, wanted type, row length) -> names
    for tensor in model.tensors.values():
        if len(tensor.shape) == 1 or tensor.name.endswith(".bias") or _KEPT.fullmatch(tensor.name):
            continue
        wanted = _wanted(tensor.name, out, model)
        kind = _fitting(wanted, tensor.shape[-1])
        if kind != wanted:
            others.setdefault((kind == tensor.type, kind, wanted, tensor.shape[-1]), []).append(tensor.name)
        if kind != tensor.type:
            changed.append(replace(tensor, type=kind, load=partial(_converted, tensor, kind, importance)))
    warnings = [_of_another_type(*how, names) for how, names in others.items()] + _rounded_twice(model, changed)
    metadata = {"general.file_type": uint32(int(out.file_type))}
    if out.kind not in _PLAIN:
        metadata["general.quantization_version"] = uint32(2)
    if changed:  # an earlier importance matrix was for the earlier types
        model = importance.said_in(model)
    if importance:
        warnings += _of_equal_columns([tensor for tensor in changed if tensor.type in _WEIGHTED], importance)
        warnings += _of_unknown(importance.unknown_to(model))
    return model.with_tensors(*changed).with_metadata(metadata), warnings


def _of_equal_columns(weighted: list[Tensor], importance: Importance) -> list[str]:
    """A warning on matrices that an importance matrix says nothing of; [] if there are none. Embeddings are only looked
    up, and llama.cpp leaves the output matrix out unless it is told to."""
    if not weighted:
        return ["the importance matrix changes nothing: no matrix gets another type that has use for it"]
    usual = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
    multiplied = [tensor for tensor in weighted if tensor.name not in usual]
    missing = [tensor.name for tensor in multiplied if not importance.covers(tensor.name)]
    if not missing:
        return []
    return [
        f"the importance matrix says nothing of {len(missing)} of {len(multiplied)} matrices, whose columns count "
        f"alike: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
    ]


def _of_unknown(names: list[str]) -> list[str]:
    """A warning on matrices of an importance matrix that the model does not have; [] if there are none."""
    if not names:
        return []
    listed = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return [f"of the importance matrix {len(names)} are left out that this model does not have: {listed}"]


def _of_another_type(stays: bool, kind: _Kind, wanted: _Kind, row: int, names: list[str]) -> str:
    """A warning on matrices whose rows of `row` elements are no multiple of the wanted type's blocks."""
    one = len(names) == 1
    which, whose = (names[0], "its") if one else (f"{names[0]} and {len(names) - 1} more", "their")
    verb = ("stays" if stays else "becomes") if one else "stay" if stays else "become"
    block = GGML_QUANT_SIZES[wanted if kind == _Kind.Q8_0 else _Kind.Q8_0][0]
    types = f"{kind.name.lower()}, not {wanted.name.lower()}"
    return f"{which} {verb} {types}: {whose} rows of {row} are no multiple of {block}"


def _rounded_twice(model: ModelData, changed: list[Tensor]) -> list[str]:
    """A warning on matrices that are quantised in the source and again now; [] if there are none."""
    kinds = [model.tensor(tensor.name).type for tensor in changed if tensor.type not in _PLAIN]
    before = [kind.name.lower() for kind in kinds if kind not in _PLAIN]
    if not before:
        return []
    return [
        f"what is {' or '.join(sorted(set(before)))} in the source is rounded a second time (matrices: {len(before)}): "
        "the unquantised model, where there is one, gives a better result"
    ]


def weight_type(model: ModelData) -> str:
    """The type of a model's weights by general.file_type ("q4_k_m"), else the type of most bytes."""
    said = model.value("general.file_type")
    known = {int(kind): kind.name for kind in LlamaFileType if kind != LlamaFileType.GUESSED}
    if said in known:
        return known[said].removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__).lower()


def stored_as(
    name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, values: Callable[[], np.ndarray]
) -> Tensor:
    """A tensor whose float32 values [shape] are computed and quantised when it is written. If its rows are no multiple
    of the type's blocks, it has the type that `requantise` would choose.

    Raises when it is written:
        ModelFormatError, UnsupportedError: a value is not finite, or too large for the type.
    """
    kind = _fitting(kind, shape[-1])
    plain = Tensor(name, shape, _Kind.F32, lambda: np.ascontiguousarray(values(), np.float32).view(np.uint8))
    return plain if kind == _Kind.F32 else replace(plain, type=kind, load=partial(_converted, plain, kind))


def _wanted(name: str, out: OutType, model: ModelData) -> GGMLQuantizationType:
    own, output = None, "output.weight" if "output.weight" in model.tensors else "token_embd.weight"
    if name == output:
        own = out.output
    elif name == "token_embd.weight":
        own = out.embedding
    elif out.more_bits and (match := _MORE_BITS.fullmatch(name)):
        n_layers = model.size("block_count")
        if match[1] == "dec.":
            n_layers = model.size("decoder_block_count", n_layers)
        own = out.more_bits if _has_more_bits(int(match[2]), n_layers) else None
    return out.kind if own is None else own


def _has_more_bits(layer: int, n_layers: int) -> bool:
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _fitting(kind: GGMLQuantizationType, row: int) -> GGMLQuantizationType:
    """The type if its blocks divide a row of `row` elements, else q8_0 or f16."""
    for candidate in (kind, _Kind.Q8_0):
        if row % GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return _Kind.F16


def _converted(tensor: Tensor, kind: GGMLQuantizationType, importance: Importance = NONE) -> np.ndarray:
    """The stored bytes of a tensor in another type, converted a few rows at a time.

    Raises:
        ModelFormatError: it contains NaN or infinity, which a scale would spread to its whole block.
        UnsupportedError: its values are too large for the type.
    """
    stored, row = tensor.load(), tensor.shape[-1]
    stored = stored.reshape(-1, stored.shape[-1])
    out = np.empty(quants.quant_shape_to_byte_shape((len(stored), row), kind), np.uint8)
    columns = importance.columns(tensor) if kind in _WEIGHTED else None
    each = len(stored) if columns is None else len(stored) // len(columns)  # rows of one expert
    step = min(max(1, _AT_ONCE // row), each)
    for start in (first + at for first in range(0, len(stored), each) for at in range(0, each, step)):
        end = min(start + step, start - start % each + each)
        part = stored[start:end]
        values = replace(tensor, shape=(len(part), row), load=partial(np.asarray, part)).values()
        out[start:end] = _stored(tensor.name, values, kind, None if columns is None else columns[start // each])
    return out.reshape(quants.quant_shape_to_byte_shape(tensor.shape, kind))


def _stored(name: str, values: np.ndarray, kind: GGMLQuantizationType, columns: np.ndarray | None) -> np.ndarray:
    """Quantise float32 values [rows, row] to bytes [rows, bytes of a row]. name: for errors. columns: what each counts,
    [row]; None: alike."""
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        raise ModelFormatError(f"tensor '{name}' holds values that are not finite")
    if largest > _LARGEST.get(kind, largest):
        limit = f"{kind.name.lower()} only {_LARGEST[kind]:.6g}"
        raise UnsupportedError(f"tensor '{name}' reaches {largest:.3g}, {limit}; use bf16 or f32")
    if kind not in _BY_US and columns is None:
        return quants.quantize(values, kind).view(np.uint8)
    try:
        return core.quantize(kind.name.lower(), np.ascontiguousarray(values, np.float32), importance=columns)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor '{name}': {error}") from error
