# SPDX-License-Identifier: Apache-2.0
"""Small random models with a vocabulary and a chat template, for tests of what surrounds the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from gguf_shapes import Shape, finish, header
from weight_formats import random_blocks

CONTROL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
TOKENS = CONTROL + BYTES + LETTERS
# What a block's scale is multiplied by, at most.
LARGEST = {"IQ4_NL": 113, "IQ4_XS": 32 * 113, "IQ2_XXS": 167, "IQ2_XS": 167, "IQ2_S": 167, "IQ3_XXS": 480, "IQ3_S": 465}
LARGEST |= {"Q2_K": 15 * 3, "Q3_K": 32 * 4, "Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 128 * 32}
BOS, EOS, FIRST_BYTE = 1, 2, len(CONTROL)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _stored(data: np.ndarray, kind: gguf.GGMLQuantizationType, random: np.random.Generator) -> np.ndarray:
    """Of about that size; of types for which gguf has no quantiser other values."""
    try:
        return gguf.quants.quantize(data.astype(np.float32), kind)
    except NotImplementedError:
        return random_blocks(kind.name.lower(), *data.shape, random, 0.3 / LARGEST[kind.name])


def write_tiny(
    path: Path,
    *,
    arch: str = "llama",
    d: int = 32,
    d_ff: int = 64,
    n_layers: int = 2,
    n_kv_heads: int = 0,
    n_ctx: int = 256,
    seed: int = 0,
    stored: str = "F32",
    dequantised: bool = False,
    controls: Sequence[str] = (),
) -> Path:
    """A model of four heads; its text is letters and bytes. stored: type of the matrices; dequantised: their values
    after quantising, as F32. controls: further control tokens, which come last;
    no space then begins a text."""
    n_vocab = len(TOKENS) + len(controls)
    shape = Shape(d, n_layers, 4, n_ctx, n_kv_heads=n_kv_heads, d_ff=d_ff, n_vocab=n_vocab, arch=arch)
    writer, random = header(path, shape), np.random.default_rng(seed)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*TOKENS, *controls])
    writer.add_token_scores([0.0] * len(CONTROL + BYTES) + [-1.0] * len(LETTERS) + [0.0] * len(controls))
    writer.add_token_types(
        [kinds.UNKNOWN]
        + [kinds.CONTROL] * (len(CONTROL) - 1)
        + [kinds.BYTE] * 256
        + [kinds.NORMAL] * len(LETTERS)
        + [kinds.CONTROL] * len(controls)
    )
    if controls:
        writer.add_add_space_prefix(False)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    for name, dims in shape.tensors().items():
        data = random.normal(size=dims) * (0.1 if len(dims) == 1 else 0.3)
        if name.endswith("norm.weight"):
            data += 1
        kind = gguf.GGMLQuantizationType[stored if len(dims) == 2 else "F32"]
        rows = _stored(data, kind, random)
        if dequantised:
            writer.add_tensor(name, gguf.quants.dequantize(rows, kind))
        else:
            writer.add_tensor(name, rows, raw_dtype=kind)
    return finish(writer, path)
