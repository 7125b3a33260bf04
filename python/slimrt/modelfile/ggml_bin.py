# SPDX-License-Identifier: Apache-2.0
"""Reads Whisper models in whisper.cpp's own format (ggml-*.bin), which is older than GGUF.

The format, little-endian: a magic number, eleven int32 (sizes, and the file's type), the mel filters, the tokens, then
tensors up to the end: number of dimensions, length of the name, type, dimensions (innermost first), name, data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, TokenType, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData, array, boolean, string, uint32
from slimrt.modelfile.hf.config import Config
from slimrt.modelfile.hf.directory import read_tensors
from slimrt.modelfile.hf.encoder_decoders import WHISPER
from slimrt.modelfile.hf.family import Family, Stack
from slimrt.modelfile.hf.safetensors_files import Entry
from slimrt.modelfile.hf.vocabulary_whisper import END, merges_of_ranks, restored, special_tokens
from slimrt.plumbing.files import is_ggml_bin
from slimrt.tokenizer.vocabulary import to_byte_level

_SIZES = ("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer", "n_text_ctx", "n_text_state",
          "n_text_head", "n_text_layer", "n_mels", "ftype")  # fmt: skip
_FIRST_BLOCKS = 2  # quantisation version with today's block layouts; version 1 differs
_VERSION_FACTOR = 1000  # ftype is quantisation version * 1000 + type
_MOST = 1 << 24  # the largest plausible count

# Hugging Face's names -> OpenAI's; positional embeddings have no ".weight" there.
_OUTSIDE = {
    "encoder.embed_positions": "encoder.positional_embedding",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.embed_tokens": "decoder.token_embedding",
    "decoder.embed_positions": "decoder.positional_embedding",
    "decoder.layer_norm": "decoder.ln",
}
_INSIDE = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_ATTENTIONS = {"self_attn": "attn", "encoder_attn": "cross_attn"}


def _openai_layer(theirs: str) -> str:
    if theirs in _INSIDE:
        return _INSIDE[theirs]
    attention, projection = theirs.split(".")
    return f"{_ATTENTIONS[attention]}.{_PROJECTIONS[projection]}"


def _openai() -> Family:
    """Whisper's tensors with OpenAI's names."""

    def renamed(stack: Stack) -> Stack:
        layer = {module: (_openai_layer(theirs), shape) for module, (theirs, shape) in stack.layer.items()}
        return replace(stack, block=stack.block.replace("layers", "blocks"), layer=layer)

    outside = {module: (_OUTSIDE.get(theirs, theirs), shape) for module, (theirs, shape) in WHISPER.outside.items()}
    return replace(WHISPER, stem="", outside=outside, several=tuple(map(renamed, WHISPER.several)), head="")


class GgmlTensors:
    """The tensors of a file, by name, memory-mapped."""

    def __init__(self, entries: dict[str, Entry], data: mmap.mmap):
        self.entries, self._data = entries, data

    def elements(self, name: str) -> np.ndarray:
        """Elements [shape]; if quantised their bytes, uint8 [rows, bytes of a row]."""
        entry = self.entries[name]
        kind = GGMLQuantizationType[entry.dtype]
        shape = quants.quant_shape_to_byte_shape(entry.shape, kind)
        stored = np.frombuffer(self._data, np.uint8, int(np.prod(shape)), entry.offset).reshape(shape)
        plain = {"F32": np.float32, "F16": np.float16}.get(entry.dtype)
        return stored if plain is None else stored.view(plain)


class _Cursor:
    """Reads a file sequentially; errors say at which byte it is truncated or broken."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def fail(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {message} (at byte {self.at} of {len(self.data)})")

    def take(self, size: int, what: str) -> bytes:
        return self.data[self.skip(size, what) : self.at]

    def skip(self, size: int, what: str) -> int:
        """Skip `size` bytes, and return the offset of the first one."""
        if size > len(self.data) - self.at:
            raise self.fail(f"cut off in {what}, which takes {size} bytes")
        self.at += size
        return self.at - size

    def number(self, what: str, most: int = _MOST) -> int:
        (value,) = struct.unpack("<i", self.take(4, what))
        if not 0 <= value <= most:
            self.at -= 4
            raise self.fail(f"{what} is {value}, not from 0 to {most}")
        return int(value)


def read_ggml_bin(path: Path) -> tuple[ModelData, list[str]]:
    """Open a ggml-*.bin file; tensor data stays on disk until it is needed. Returns the model, and warnings.

    The format does not contain suppressed tokens and alignment heads.

    Raises:
        ModelFormatError: truncated or damaged, with the place; a tensor is missing or of a wrong shape.
        UnsupportedError: an old block layout, or a GGML type that is not supported.
        OSError: it cannot be read.
    """
    if not is_ggml_bin(path):
        raise ModelFormatError(f"{path}: not a ggml file of whisper.cpp")
    cursor = _Cursor(path)
    cursor.skip(4, "the magic number")
    sizes = {name: cursor.number(name) for name in _SIZES}
    n_mel, n_fft = cursor.number("the number of mel filters"), cursor.number("the width of a mel filter")
    if n_mel != sizes["n_mels"]:
        raise cursor.fail(f"{n_mel} mel filters, but n_mels is {sizes['n_mels']}")
    cursor.skip(4 * n_mel * n_fft, "the mel filters")
    tokens = [cursor.take(cursor.number("the length of a token"), "a token") for _ in range(cursor.number("n_tokens"))]
    vocabulary, warnings = _vocabulary(path, tokens, sizes["n_vocab"])
    config = Config(path, _config(sizes), {}, _openai())
    version = sizes["ftype"] // _VERSION_FACTOR
    entries = {}
    while cursor.at < len(cursor.data):
        name, entry = _entry(cursor, version)
        if name in entries:
            raise cursor.fail(f"tensor '{name}' occurs twice")
        entries[name] = entry
    model = read_tensors(config, GgmlTensors(entries, cursor.data), path.stem)
    return model.with_metadata(vocabulary), warnings


def _config(sizes: Mapping[str, int]) -> dict[str, object]:
    """The sizes as keys of Hugging Face's config.json."""
    state = sizes["n_text_state"] or sizes["n_audio_state"]
    return {
        "model_type": "whisper",
        "d_model": sizes["n_audio_state"],
        "encoder_layers": sizes["n_audio_layer"],
        "decoder_layers": sizes["n_text_layer"],
        "encoder_attention_heads": sizes["n_audio_head"],
        "decoder_attention_heads": sizes["n_text_head"],
        "encoder_ffn_dim": 4 * sizes["n_audio_state"],
        "decoder_ffn_dim": 4 * state,
        "vocab_size": sizes["n_vocab"],
        "num_mel_bins": sizes["n_mels"],
        "max_source_positions": sizes["n_audio_ctx"],
        "max_target_positions": sizes["n_text_ctx"],
    }


def _entry(cursor: _Cursor, version: int) -> tuple[str, Entry]:
    """Read a tensor's header and skip its data; name and shape are those that a safetensors file would have."""
    n_dims, length = cursor.number("a tensor's number of dimensions", 4), cursor.number("the length of a name", 256)
    code = cursor.number("a tensor's type", 1000)
    dims = [cursor.number("a dimension") for _ in range(n_dims)]
    raw = cursor.take(length, "a tensor's name")
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise cursor.fail("a tensor's name is not UTF-8") from None
    if code not in GGML_QUANT_SIZES:
        raise UnsupportedError(f"{cursor.path}: tensor '{name}' is of GGML's type {code}, which nothing reads")
    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    plain = kind.name in ("F32", "F16")
    if not plain and (n_dims != 2 or dims[0] % block):
        raise cursor.fail(f"tensor '{name}' is {kind.name} of {n_dims} dimensions with rows of {dims[:1]}")
    if not plain and version != _FIRST_BLOCKS:
        raise UnsupportedError(
            f"{cursor.path}: quantised with version {version} of GGML's blocks, supported is {_FIRST_BLOCKS}; quantise "
            "the unquantised model again"
        )
    n_elements = int(np.prod(dims, dtype=object)) if dims else 0
    offset = cursor.skip(n_elements // block * block_bytes, f"tensor '{name}'")
    shape = tuple(reversed(dims))
    if name in _OUTSIDE.values():  # positions
        name += ".weight"
    if name.endswith(".bias") and len(shape) == 2 and shape[1] == 1:
        shape = shape[:1]  # biases of convolutions are stored as columns
    return name, Entry(cursor.path, kind.name, shape, offset)


def _vocabulary(path: Path, tokens: list[bytes], n_vocab: int) -> tuple[dict[str, GGUFValue], list[str]]:
    """The `tokenizer.*` fields, and warnings. The file lists text tokens; special tokens follow from their number."""
    listed = tokens[:-1] if tokens and tokens[-1] == END.encode() else tokens
    text, warnings = restored(listed), []
    if text is not listed:
        warnings.append(
            f"{path}: an early converter wrote it without the tokens that end inside a character; text beyond English "
            "will show \ufffd: convert the model from Hugging Face, or from a newer ggml file"
        )
    try:
        special = special_tokens(len(text), n_vocab)
        merges = [
            f"{to_byte_level(one)} {to_byte_level(other)}" for one, other in merges_of_ranks(text, lost=bool(warnings))
        ]
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from error
    named = [to_byte_level(token) for token in text] + special
    types = [TokenType.NORMAL] * len(text) + [TokenType.CONTROL] * len(special)
    end = uint32(len(text))
    fields = {
        "model": string("gpt2"),
        "pre": string("gpt-2"),
        "tokens": array(named, GGUFValueType.STRING),
        "token_type": array(types, GGUFValueType.INT32),
        "merges": array(merges, GGUFValueType.STRING),
        "bos_token_id": end,
        "eos_token_id": end,
        "add_bos_token": boolean(False),
        "add_eos_token": boolean(False),
    }
    start = {"whisper.decoder_start_token_id": uint32(len(text) + 1)}
    return start | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, warnings
