# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-MoE (V1) in PyTorch, of which transformers has no class: the layers of its DeepSeek-OCR 2 are the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel

DENSE, EXPERTS = 1, 5  # leading layers without experts
CONFIG = {
    "model_type": "deepseek", "dtype": "float32", "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 101, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "first_k_dense_replace": DENSE, "moe_layer_freq": 1,
    "n_routed_experts": EXPERTS, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip


class Model(nn.Module):
    """ids [tokens] -> logits [tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        same = {key: value for key, value in CONFIG.items() if key not in ("model_type", "dtype", "rope_theta")}
        layers = ["dense"] * DENSE + ["sparse"] * (CONFIG["num_hidden_layers"] - DENSE)
        config = DeepseekOcr2TextConfig(
            **same, num_experts=EXPERTS, mlp_layer_types=layers, routed_scaling_factor=1.0, topk_method="greedy",
            rope_parameters={"rope_theta": CONFIG["rope_theta"], "rope_type": "default"},
        )  # fmt: skip
        config._attn_implementation = "eager"
        self.model = DeepseekOcr2TextModel(config)
        self.lm_head = nn.Linear(CONFIG["hidden_size"], CONFIG["vocab_size"], bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids=ids[None], use_cache=False).last_hidden_state[0])


def save(model: Model, directory: Path) -> None:
    """Each expert's matrices by themselves, as published."""
    from safetensors.torch import save_file

    tensors = {}
    for name, value in model.state_dict().items():
        stem, _, last = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last if stem else "", ())
        for expert, matrix in enumerate(value if parts else ()):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                tensors[f"{stem}.experts.{expert}.{part}.weight"] = rows.contiguous()
        if not parts:
            tensors[name] = value.contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
