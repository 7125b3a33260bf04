# SPDX-License-Identifier: Apache-2.0
"""Attention layers made of given matrices, for tests of folding."""

from __future__ import annotations

import numpy as np

from slimrt.folding.attention import Attention
from slimrt.folding.weights import LayerWeights
from slimrt.modelfile.gguf import ModelData, Tensor, float32, string, uint32


def layer_of(w_k: np.ndarray, w_v: np.ndarray, n_heads: int = 1, arch: str = "gpt2") -> LayerWeights:
    """A layer with these projections [d, e], float32, in heads of equal width, and random queries."""
    d, e = w_k.shape
    head_dim = e // n_heads
    sizes = {
        "embedding_length": d,
        "block_count": 1,
        "attention.head_count": max(n_heads, d // head_dim),
        "attention.head_count_kv": n_heads,
        "attention.key_length": head_dim,
        "context_length": 4096,
    }
    metadata = {f"{arch}.{key}": uint32(value) for key, value in sizes.items()}
    metadata |= {"general.architecture": string(arch), f"{arch}.rope.freq_base": float32(1e4)}
    w_q = np.random.default_rng(0).normal(size=(d, sizes["attention.head_count"] * head_dim)) / np.sqrt(d)
    named = {"q": w_q, "k": w_k, "v": w_v}
    tensors = [Tensor.of(f"blk.0.attn_{part}.weight", w.T) for part, w in named.items()]
    model = ModelData(metadata, {tensor.name: tensor for tensor in tensors})
    return LayerWeights(model, Attention.of(model), 0)
