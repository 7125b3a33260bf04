# SPDX-License-Identifier: Apache-2.0
"""Whisper's published sizes (Radford et al. 2022, table 1) as GGUF files without weights, for what counts bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from gguf_shapes import finish_sparse

N_CTX, N_SOURCE = 448, 1500


@dataclass(frozen=True)
class Whisper:
    """A model by its sizes: layers of encoder and of decoder alike, heads of 64."""

    n_layers: int
    d: int
    n_vocab: int = 51865
    n_mel: int = 80

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """name -> shape, outermost first."""
        d, wide = self.d, 4 * self.d
        out: dict[str, tuple[int, ...]] = {
            "enc.conv1.weight": (d, 3 * self.n_mel),
            "enc.conv2.weight": (d, 3 * d),
            "enc.position_embd.weight": (N_SOURCE, d),
            "dec.position_embd.weight": (N_CTX, d),
            "token_embd.weight": (self.n_vocab, d),
        }
        out |= {f"enc.conv{i}.bias": (d,) for i in (1, 2)}
        for part in ("enc", "dec"):
            out |= {f"{part}.output_norm.{kind}": (d,) for kind in ("weight", "bias")}
            attentions = ("attn", "cross_attn") if part == "dec" else ("attn",)
            for layer in range(self.n_layers):
                block = f"{part}.blk.{layer}."
                for attention in attentions:
                    out |= {f"{block}{attention}_{name}.weight": (d, d) for name in "qkvo"}
                    out |= {f"{block}{attention}_{name}.bias": (d,) for name in "qvo"}
                for norm in (*(f"{attention}_norm" for attention in attentions), "ffn_norm"):
                    out |= {f"{block}{norm}.{kind}": (d,) for kind in ("weight", "bias")}
                out |= {f"{block}ffn_up.weight": (wide, d), f"{block}ffn_up.bias": (wide,)}
                out |= {f"{block}ffn_down.weight": (d, wide), f"{block}ffn_down.bias": (d,)}
        return out


SIZES = {
    "tiny": Whisper(4, 384),
    "base": Whisper(6, 512),
    "small": Whisper(12, 768),
    "medium": Whisper(24, 1024),
    "large": Whisper(32, 1280),
    "large-v3": Whisper(32, 1280, 51866, 128),
}
F32_TENSORS = ("enc.conv1.weight", "enc.conv2.weight", "enc.position_embd.weight", "dec.position_embd.weight")


def write_whisper(path: Path, shape: Whisper) -> Path:
    """A file of the model's full size, matrices in f16, that takes next to no disk: its data is a hole, all zero."""
    writer = gguf.GGUFWriter(path, "whisper")
    for key, value in {
        "block_count": shape.n_layers,
        "decoder_block_count": shape.n_layers,
        "embedding_length": shape.d,
        "feed_forward_length": 4 * shape.d,
        "attention.head_count": shape.d // 64,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "context_length": N_CTX,
        "encoder.context_length": N_SOURCE,
        "mel_bins": shape.n_mel,
        "decoder_start_token_id": 50258,
        "vocab_size": shape.n_vocab,
    }.items():
        writer.add_uint32(f"whisper.{key}", value)
    writer.add_float32("whisper.attention.layer_norm_epsilon", 1e-5)
    writer.add_string("slimrt.activation", "gelu_erf")
    for name, dims in shape.tensors().items():
        whole = len(dims) == 1 or name in F32_TENSORS
        n_bytes = int(np.prod(dims)) * (4 if whole else 2)
        writer.add_tensor_info(name, dims, np.dtype(np.float32 if whole else np.float16), n_bytes)
    return finish_sparse(writer, path)
