# SPDX-License-Identifier: Apache-2.0
"""Writes Whisper models as whisper.cpp's own files, from the description of the format, and what to write."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from seq2seq_models import GOLDEN, weight

D, N_MELS, N_SOURCE, N_TARGET, N_LAYERS, N_HEADS = 64, 80, 50, 40, 2, 4
N_SPECIAL = 1 + 1 + 6 + 1501  # besides the languages
_PLACES = {"encoder.embed_positions": "encoder.positional_embedding", "decoder.embed_positions":
           "decoder.positional_embedding", "decoder.embed_tokens": "decoder.token_embedding",
           "encoder.layer_norm": "encoder.ln_post", "decoder.layer_norm": "decoder.ln"}  # fmt: skip
_PARTS = {"self_attn_layer_norm": "attn_ln", "encoder_attn_layer_norm": "cross_attn_ln", "final_layer_norm": "mlp_ln",
          "fc1": "mlp.0", "fc2": "mlp.2", "self_attn": "attn", "encoder_attn": "cross_attn", "q_proj": "query",
          "k_proj": "key", "v_proj": "value", "out_proj": "out"}  # fmt: skip


def tensors(n_vocab: int) -> dict[str, np.ndarray]:
    """Weights by Hugging Face's names: the golden `whisper`, but for the vocabulary and a feed-forward of 4 d."""
    shapes = json.loads((GOLDEN / "whisper" / "tensors.json").read_text())
    made = {}
    for name, shape in shapes.items():
        shape = [4 * D if size == 2 * D else size for size in shape]
        shape = [n_vocab, D] if "embed_tokens" in name else shape
        made[name] = weight(name, tuple(shape), 0)
    return made


def openai_name(name: str) -> str:
    """Of Hugging Face's."""
    name = name.removeprefix("model.")
    module, _, part = name.rpartition(".")
    if module in _PLACES:
        place = _PLACES[module]
        return place if "positional" in place else f"{place}.{part}"
    words = [_PARTS.get(word, word) for word in name.replace("layers", "blocks").split(".")]
    return ".".join(words)


def header(n_words: int, ftype: int = 1, **changes: int) -> bytes:
    """For a vocabulary of n_words; changes: other sizes."""
    sizes = {"n_vocab": n_words, "n_audio_ctx": N_SOURCE, "n_audio_state": D, "n_audio_head": N_HEADS,
             "n_audio_layer": N_LAYERS, "n_text_ctx": N_TARGET, "n_text_state": D, "n_text_head": N_HEADS,
             "n_text_layer": N_LAYERS, "n_mels": N_MELS, "ftype": ftype} | changes  # fmt: skip
    return struct.pack("<12i", 0x67676D6C, *sizes.values())


def filters(n_mels: int = N_MELS, n_fft: int = 201) -> bytes:
    return struct.pack("<2i", n_mels, n_fft) + bytes(4 * n_mels * n_fft)


def vocabulary(tokens: list[bytes]) -> bytes:
    return struct.pack("<i", len(tokens)) + b"".join(struct.pack("<i", len(token)) + token for token in tokens)


def tensor(name: str, values: np.ndarray, kind: Kind) -> bytes:
    """One tensor under OpenAI's name; small and positional ones are always float32, quantised ones are matrices."""
    name = openai_name(name)
    if name.startswith("encoder.conv") and name.endswith("bias"):
        values = values[:, None]
    if values.ndim == 1 or name.endswith(("bias", "positional_embedding")):
        kind = Kind.F32
    elif values.ndim == 3 and kind != Kind.F32:
        kind = Kind.F16
    start = struct.pack("<3i", values.ndim, len(name), int(kind)) + struct.pack(f"<{values.ndim}i", *values.shape[::-1])
    return start + name.encode() + gguf.quants.quantize(values, kind).tobytes()


def write_bin(path: Path, tokens: list[bytes], weights: dict[str, np.ndarray], kind: Kind, **changes: int) -> Path:
    """A whole file; changes: other sizes in its header."""
    n_vocab = len(weights["model.decoder.embed_tokens.weight"])
    quantised = kind not in (Kind.F32, Kind.F16)
    body = b"".join(tensor(name, values, kind) for name, values in weights.items())
    ftype = 2007 if quantised else int(kind)
    path.write_bytes(header(n_vocab, **({"ftype": ftype} | changes)) + filters() + vocabulary(tokens) + body)
    return path
