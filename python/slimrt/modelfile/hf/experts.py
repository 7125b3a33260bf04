# SPDX-License-Identifier: Apache-2.0
"""Hugging Face model types with experts, as data: see families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slimrt.modelfile.hf.families import LLAMA, MISTRAL, QWEN2, Family, Stack
from slimrt.modelfile.hf.llama_families import GRANITE, QWEN3


def _with_experts(
    dense: Family,
    count: str,
    size: str,
    of: str,
    names: Mapping[str, str],
    router: str,
    used: str = "num_experts_per_tok",
) -> Family:
    """A family with experts in the place of its feed-forward networks.

    Args:
        dense: the family without them.
        count, size: config keys of how many there are, and how wide.
        of: what the name of one begins with, with a place for its number. names: GGUF part -> its matrix after that.
        router: the module that scores them. used: config key of how many a token takes.
    """
    layer = {name: module for name, module in dense.layer.items() if name not in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes = {"gate": "eff d", "up": "eff d", "down": "d eff"}
    layer["ffn_gate_inp"] = (router, "experts d")
    layer |= {f"ffn_{part}_exps": (f"{of}.{name}", shapes[part]) for part, name in names.items()}
    return replace(
        dense,
        layer=layer,
        symbols={"experts": count, "eff": size},
        numbers={"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": size},
        float32=("position_embd", "ffn_gate_inp", "ffn_gate_inp_shexp"),
    )


def _either_count(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """transformers 5 writes num_local_experts in place of num_experts."""
    return family, {"num_experts": values.get("num_local_experts"), **values}


_ONLY = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

_OLMOE = _with_experts(
    replace(
        LLAMA,
        arch="olmoe",
        layer={**LLAMA.layer, "attn_q_norm": ("self_attn.q_norm", "q"), "attn_k_norm": ("self_attn.k_norm", "kv")},
        biases={},
        defaults={**LLAMA.defaults, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
        only={**LLAMA.only, "attention_bias": (False,), "clip_qkv": ("null",), "use_cla": (False,)},
        permuted=(),
        settle=None,
    ),
    count="num_experts",
    size="intermediate_size",
    of="mlp.experts.{}",
    names=_PROJECTIONS,
    router="mlp.gate",
)
OLMOE = replace(_OLMOE, flags={"expert_weights_norm": "norm_topk_prob"})

MIXTRAL = _with_experts(
    replace(MISTRAL, defaults={**MISTRAL.defaults, "sliding_window": None}),
    count="num_local_experts",
    size="intermediate_size",
    of="block_sparse_moe.experts.{}",
    names={"gate": "w1", "up": "w3", "down": "w2"},
    router="block_sparse_moe.gate",
)

_QWEN2_MOE = _with_experts(
    replace(
        QWEN2,
        arch="qwen2moe",
        defaults={**QWEN2.defaults, "norm_topk_prob": False},
        only={**QWEN2.only, **_ONLY, "qkv_bias": (True,)},
    ),
    count="num_experts",
    size="moe_intermediate_size",
    of="mlp.experts.{}",
    names=_PROJECTIONS,
    router="mlp.gate",
)
QWEN2_MOE = replace(
    _QWEN2_MOE,
    layer={
        **_QWEN2_MOE.layer,
        "ffn_gate_inp_shexp": ("mlp.shared_expert_gate", "1 d"),
        "ffn_gate_shexp": ("mlp.shared_expert.gate_proj", "sff d"),
        "ffn_up_shexp": ("mlp.shared_expert.up_proj", "sff d"),
        "ffn_down_shexp": ("mlp.shared_expert.down_proj", "d sff"),
    },
    symbols={**_QWEN2_MOE.symbols, "sff": "shared_expert_intermediate_size"},
    numbers={**_QWEN2_MOE.numbers, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    flags={"expert_weights_norm": "norm_topk_prob"},
)

_QWEN3_MOE = _with_experts(
    replace(
        QWEN3,
        arch="qwen3moe",
        defaults={**QWEN3.defaults, "norm_topk_prob": False},
        only={**QWEN3.only, **_ONLY},
    ),
    count="num_experts",
    size="moe_intermediate_size",
    of="mlp.experts.{}",
    names=_PROJECTIONS,
    router="mlp.gate",
)
QWEN3_MOE = replace(_QWEN3_MOE, flags={"expert_weights_norm": "norm_topk_prob"}, settle=_either_count)

_GRANITE_MOE = _with_experts(
    replace(GRANITE, arch="granitemoe", biases={"attention_bias": LLAMA.biases["attention_bias"]}),
    count="num_local_experts",
    size="intermediate_size",
    of="",
    names={},
    router="block_sparse_moe.router.layer",
)
GRANITE_MOE = replace(
    _GRANITE_MOE,
    several=(
        Stack(
            "blk.{}.",
            _GRANITE_MOE.block,
            {
                **_GRANITE_MOE.layer,
                "ffn_gate_exps": ("block_sparse_moe.input_linear", "experts eff d"),
                "ffn_up_exps": ("block_sparse_moe.input_linear", "experts eff d"),
                "ffn_down_exps": ("block_sparse_moe.output_linear", "experts d eff"),
            },
            halves={"ffn_gate_exps": 0, "ffn_up_exps": 1},
        ),
    ),
)


def _shared_width(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """DeepSeek's shared experts are one network, as wide as they are together."""
    shared = values["n_shared_experts"] * values["moe_intermediate_size"]
    return family, {**values, "shared_width": shared}


_DEEPSEEK = _with_experts(
    replace(
        LLAMA,
        arch="deepseek",
        biases={},
        defaults={**LLAMA.defaults, "rms_norm_eps": 1e-6, "n_shared_experts": 2, "first_k_dense_replace": 0},
        only={
            **LLAMA.only,
            "attention_bias": (False,),
            "moe_layer_freq": (1,),
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "use_cla": (False,),
        },
    ),
    count="n_routed_experts",
    size="moe_intermediate_size",
    of="mlp.experts.{}",
    names=_PROJECTIONS,
    router="mlp.gate",
)
DEEPSEEK = replace(
    _DEEPSEEK,
    layer={
        **_DEEPSEEK.layer,
        "ffn_gate_shexp": ("mlp.shared_experts.gate_proj", "sff d"),
        "ffn_up_shexp": ("mlp.shared_experts.up_proj", "sff d"),
        "ffn_down_shexp": ("mlp.shared_experts.down_proj", "d sff"),
    },
    leading="first_k_dense_replace",
    leading_layer=LLAMA.layer,
    symbols={**_DEEPSEEK.symbols, "sff": "shared_width"},
    numbers={
        **_DEEPSEEK.numbers,
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_shared_count": "n_shared_experts",
    },
    settle=_shared_width,
)

EXPERTS: dict[str, Family] = {
    "deepseek": DEEPSEEK,
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "granitemoe": GRANITE_MOE,
}
