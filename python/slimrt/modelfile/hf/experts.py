# SPDX-License-Identifier: Apache-2.0
"""Hugging Face model types with experts, as data: see families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slimrt.modelfile.gguf import uint32
from slimrt.modelfile.hf import gpt_oss
from slimrt.modelfile.hf.families import LLAMA, MISTRAL, QWEN2
from slimrt.modelfile.hf.family import ALWAYS, Family, Stack
from slimrt.modelfile.hf.llama_families import GRANITE, QWEN3

_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_BIASES = (("gate", "gate_proj", "experts eff"), ("up", "up_proj", "experts eff"), ("down", "down_proj", "experts d"))
_EVERY_LAYER = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_SHARES = {"expert_weights_norm": "norm_topk_prob"}


def _with_experts(
    dense: Family,
    *,
    count: str,
    size: str,
    of: str = "mlp.experts.{}",
    names: Mapping[str, str] = _PROJECTIONS,
    router: str = "mlp.gate",
    shared: str = "",
    width: str = "",
) -> Family:
    """A family with experts in the place of its feed-forward networks.

    Args:
        dense: the family without them.
        count, size: config keys of how many there are, and how wide.
        of: what the name of one begins with, with a place for its number, or that of all as one tensor.
        names: GGUF part -> its matrix after that.
        router: the module that scores them.
        shared, width: what the names of one that every token takes begin with, and the config key of its width.
    """
    layer = {name: module for name, module in dense.layer.items() if name not in ("ffn_gate", "ffn_up", "ffn_down")}
    layer["ffn_gate_inp"] = (router, "experts d")
    for part, name in names.items():
        rows, shared_rows = ("d eff", "d sff") if part == "down" else ("eff d", "sff d")
        layer[f"ffn_{part}_exps"] = (f"{of}.{name}", rows if "{}" in of else f"experts {rows}")
        if shared:
            layer[f"ffn_{part}_shexp"] = (f"{shared}.{name}", shared_rows)
    sizes = {"expert_count": count, "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": size}
    return replace(
        dense,
        layer=layer,
        symbols={"experts": count, "eff": size, **({"sff": width} if shared else {})},
        numbers={**dense.numbers, **sizes},
        float32=("position_embd", "ffn_gate_inp", "ffn_gate_inp_shexp"),
    )


OLMOE = _with_experts(
    replace(
        LLAMA,
        arch="olmoe",
        layer={**LLAMA.layer, "attn_q_norm": ("self_attn.q_norm", "q"), "attn_k_norm": ("self_attn.k_norm", "kv")},
        biases={},
        defaults={**LLAMA.defaults, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
        only={**LLAMA.only, "attention_bias": (False,), "clip_qkv": (None,), "use_cla": (False,)},
        permuted=(),
        flags=_SHARES,
        settle=None,
    ),
    count="num_experts",
    size="intermediate_size",
)

MIXTRAL = _with_experts(
    replace(MISTRAL, defaults={**MISTRAL.defaults, "sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    count="num_local_experts",
    size="intermediate_size",
    of="block_sparse_moe.experts.{}",
    names={"gate": "w1", "up": "w3", "down": "w2"},
    router="block_sparse_moe.gate",
)

PHIMOE = replace(
    MIXTRAL,
    arch="phimoe",
    biases={
        ALWAYS: ("output_norm", "attn_norm", "ffn_norm"),
        "attention_bias": LLAMA.biases["attention_bias"],
        "lm_head_bias": ("output",),
    },
    defaults={**MIXTRAL.defaults, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    only={**MIXTRAL.only, "num_experts_per_tok": (2,), "router_jitter_noise": (0.01,)},
    permuted=(),
    settle=None,
)

QWEN2_MOE = _with_experts(
    replace(
        QWEN2,
        arch="qwen2moe",
        layer={**QWEN2.layer, "ffn_gate_inp_shexp": ("mlp.shared_expert_gate", "1 d")},
        defaults={**QWEN2.defaults, "norm_topk_prob": False},
        only={**QWEN2.only, **_EVERY_LAYER, "qkv_bias": (True,), "use_sliding_window": (False,)},
        numbers={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        flags=_SHARES,
    ),
    count="num_experts",
    size="moe_intermediate_size",
    shared="mlp.shared_expert",
    width="shared_expert_intermediate_size",
)


def _either_count(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """transformers 5 writes num_local_experts in place of num_experts."""
    return family, {"num_experts": values.get("num_local_experts"), **values}


QWEN3_MOE = _with_experts(
    replace(
        QWEN3,
        arch="qwen3moe",
        defaults={**QWEN3.defaults, "norm_topk_prob": False},
        only={**QWEN3.only, **_EVERY_LAYER, "use_sliding_window": (False,)},
        flags=_SHARES,
        settle=_either_count,
    ),
    count="num_experts",
    size="moe_intermediate_size",
)

_GRANITE_MOE = _with_experts(
    replace(GRANITE, arch="granitemoe", biases={"attention_bias": LLAMA.biases["attention_bias"]}),
    count="num_local_experts",
    size="intermediate_size",
    names={},
    router="block_sparse_moe.router.layer",
)
# Experts are stored together, gate and up as one matrix.
_GRANITE_EXPERTS = {
    "ffn_gate_exps": ("block_sparse_moe.input_linear", "experts eff d"),
    "ffn_up_exps": ("block_sparse_moe.input_linear", "experts eff d"),
    "ffn_down_exps": ("block_sparse_moe.output_linear", "experts d eff"),
}
GRANITE_MOE = replace(
    _GRANITE_MOE,
    several=(
        Stack(
            "blk.{}.",
            _GRANITE_MOE.block,
            {**_GRANITE_MOE.layer, **_GRANITE_EXPERTS},
            halves={"ffn_gate_exps": 0, "ffn_up_exps": 1},
        ),
    ),
)


def _shared_width(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """DeepSeek's shared experts are one network, as wide as they are together."""
    shared = values["n_shared_experts"] * values["moe_intermediate_size"]
    return family, {**values, "shared_width": shared}


DEEPSEEK = _with_experts(
    replace(
        LLAMA,
        arch="deepseek",
        biases={},
        defaults={**LLAMA.defaults, "n_shared_experts": 2, "first_k_dense_replace": 0},
        only={
            **LLAMA.only,
            "attention_bias": (False,),
            "moe_layer_freq": (1,),
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "use_cla": (False,),
        },
        numbers={
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_shared_count": "n_shared_experts",
        },
        leading="first_k_dense_replace",
        leading_layer=LLAMA.layer,
        settle=_shared_width,
    ),
    count="n_routed_experts",
    size="moe_intermediate_size",
    shared="mlp.shared_experts",
    width="shared_width",
)

GPT_OSS = _with_experts(
    replace(
        LLAMA,
        arch="gpt-oss",
        layer={
            **{"post_attention_norm" if name == "ffn_norm" else name: place for name, place in LLAMA.layer.items()},
            "attn_sinks.weight": ("self_attn.sinks", "heads"),
            **{f"ffn_{part}_exps.bias": (f"mlp.experts.{name}.bias", rows) for part, name, rows in _BIASES},
        },
        biases={ALWAYS: (*LLAMA.biases["attention_bias"], "ffn_gate_inp")},
        defaults={**gpt_oss.DEFAULTS},
        only={
            **LLAMA.only,
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
            "sliding_window_pattern": (2,),  # no other is read: layer_types says it
        },
        permuted=(),
        window=True,
        packed=("mxfp4",),
        stored=gpt_oss.Unpacked,
        settle=gpt_oss.settle,
    ),
    count="num_local_experts",
    size="intermediate_size",
    of="mlp.experts",
    router="mlp.router",
)

_SIGMOID = 2  # expert_gating_func


def _partly_rotated(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The published configurations say how many dimensions of a head turn."""
    if values.get("rotary_dim"):
        values = {"partial_rotary_factor": values["rotary_dim"] / values["head_dim"], **values}
    return family, values


MINIMAX_M2 = _with_experts(
    replace(
        LLAMA,
        arch="minimax-m2",
        layer={
            **LLAMA.layer,
            "attn_q_norm": ("self_attn.q_norm", "q"),
            "attn_k_norm": ("self_attn.k_norm", "kv"),
            "exp_probs_b.bias": ("block_sparse_moe.e_score_correction_bias", "experts"),
        },
        biases={},
        defaults={**LLAMA.defaults, "max_position_embeddings": 196608, "head_dim": 128, "rope_theta": 5000000.0},
        only={
            "hidden_act": ("silu", "swish"),
            "scoring_func": ("sigmoid",),
            "use_qk_norm": (True,),
            "use_cla": (False,),
        },
        permuted=(),
        extra=lambda values, generation: {"minimax-m2.expert_gating_func": uint32(_SIGMOID)},
        settle=_partly_rotated,
    ),
    count="num_local_experts",
    size="intermediate_size",
    of="block_sparse_moe.experts.{}",
    names={"gate": "w1", "up": "w3", "down": "w2"},
    router="block_sparse_moe.gate",
)

EXPERTS: dict[str, Family] = {
    "deepseek": DEEPSEEK,
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
    "phimoe": PHIMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "granitemoe": GRANITE_MOE,
    "gpt_oss": GPT_OSS,
    "minimax_m2": MINIMAX_M2,
}
