# SPDX-License-Identifier: Apache-2.0
"""OpenLM in PyTorch, as DCLM-7B is, of which transformers has no class: from the description of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, VOCABULARY, CONTEXT, EPS = 48, 4, 2, 101, 128, 1e-5
HIDDEN = 256  # 256 ceil(8 / 3 width / 256)
CONFIG = {
    "model_type": "openlm",
    "dtype": "float32",
    "eos_token_id": 0,
    "params_args_dict": {
        "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "vocab_size": VOCABULARY, "seq_len": CONTEXT,
        "norm_eps": EPS, "qk_norm": True, "ffn_type": "swiglu_torch", "positional_embedding_type": "rotary",
        "weight_tying": False, "model_norm": "gain_only_lp_layer_norm", "post_embed_norm": False,
    },
}  # fmt: skip


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH, eps=EPS, bias=False)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, width of a head]: dimension i turns with i + half."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (3, 1))
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (one.view(len(x), HEADS, -1) for one in (self.q_norm(q), self.k_norm(k), v))
        q, k, v = (one.transpose(0, 1) for one in (rotated(q), rotated(k), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(0, 1).reshape(len(x), -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = norm(), norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    """ids [tokens] -> logits [tokens, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(VOCABULARY, WIDTH), norm()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def save(model: Model, directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
