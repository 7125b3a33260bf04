# SPDX-License-Identifier: Apache-2.0
"""Decoders that are Llama but for a few things, as families.py has the others."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from slimrt.errors import UnsupportedError
from slimrt.modelfile.hf.families import LLAMA, QWEN2
from slimrt.modelfile.hf.family import ALWAYS, Family

QWEN3 = replace(
    QWEN2,
    arch="qwen3",
    layer={**LLAMA.layer, "attn_q_norm": ("self_attn.q_norm", "dk"), "attn_k_norm": ("self_attn.k_norm", "dk")},
    biases={},
    defaults={**QWEN2.defaults, "head_dim": 128},
    only={**LLAMA.only, "attention_bias": (False,)},
)

STABLELM = replace(
    LLAMA,
    arch="stablelm",
    biases={ALWAYS: ("output_norm", "attn_norm", "ffn_norm"), "use_qkv_bias": ("attn_q", "attn_k", "attn_v")},
    defaults={
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
    },
    only={"hidden_act": ("silu", "swish"), "use_parallel_residual": (False,), "qk_layernorm": (False,)},
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    permuted=(),
    settle=None,
)

GEMMA = replace(
    LLAMA,
    arch="gemma",
    biases={},
    defaults={
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    # "gelu" in the first configurations means tanh's, as transformers has it.
    only={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "attention_bias": (False,)},
    norms_less_one=True,
    permuted=(),
    settle=None,
)

OLMO = replace(
    LLAMA,
    arch="olmo",
    outside={"token_embd": ("embed_tokens", "v d")},
    layer={name: module for name, module in LLAMA.layer.items() if not name.endswith("norm")},
    biases={},
    defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "silu"},
    only={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "layer_norm_eps": (1e-5,)},
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),  # not in the config: always the same
    scales={"attention.clamp_kqv": "clip_qkv"},
    settle=None,
)

COHERE = replace(
    LLAMA,
    arch="command-r",
    layer={name: module for name, module in LLAMA.layer.items() if name != "ffn_norm"},
    biases={},
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "logit_scale": 0.0625,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    only={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_qk_norm": (False,)},
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    scales={"logit_scale": "logit_scale"},
    permuted=(),  # pairs are neighbours as they are stored
    settle=None,
)


def _minicpm(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Its scales as GGUF has them; those that are left out are 1."""
    depth, n_layers = values.get("scale_depth", 1), float(values["num_hidden_layers"])
    width, base = values["hidden_size"], values.get("dim_model_base", 1)
    return family, {**values, "residual_multiplier": depth / sqrt(n_layers), "logits_scaling": width / base}


GRANITE = replace(
    LLAMA,
    arch="granite",
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    scales={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    settle=None,
)

MINICPM = replace(
    LLAMA,
    arch="minicpm",
    biases={},
    defaults={**LLAMA.defaults, "scale_emb": 1, "tie_word_embeddings": True},
    only={**LLAMA.only, "attention_bias": (False,), "num_experts": (0,), "sparse_config": (None,)},
    scales={"embedding_scale": "scale_emb", "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
    head_decides=True,
    settle=_minicpm,
)

GLM4 = replace(
    LLAMA,
    arch="glm4",
    layer={
        "attn_norm": ("input_layernorm", "d"),
        "attn_q": ("self_attn.q_proj", "q d"),
        "attn_k": ("self_attn.k_proj", "kv d"),
        "attn_v": ("self_attn.v_proj", "kv d"),
        "attn_output": ("self_attn.o_proj", "d q"),
        "post_attention_norm": ("post_self_attn_layernorm", "d"),
        "ffn_norm": ("post_attention_layernorm", "d"),
        "ffn_up": ("mlp.gate_up_proj", "2ff d"),
        "ffn_down": ("mlp.down_proj", "d ff"),
        "post_ffw_norm": ("post_mlp_layernorm", "d"),
    },
    biases={"attention_bias": ("attn_q", "attn_k", "attn_v")},
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "hidden_act": "silu",
        "head_dim": 128,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    only={"hidden_act": ("silu", "swish")},
    permuted=(),  # pairs are neighbours as they are stored
    settle=None,
)


def _bitnet(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Without a quantisation its weights run as they are."""
    return (family if values.get("quantization_config") else replace(family, ternary=())), values


BITNET = replace(
    LLAMA,
    arch="bitnet",
    layer={
        **LLAMA.layer,
        "attn_sub_norm": ("self_attn.attn_sub_norm", "q"),
        "ffn_sub_norm": ("mlp.ffn_sub_norm", "ff"),
    },
    biases={},
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 500000.0},
    only={"hidden_act": ("relu2", "silu"), "attention_bias": (False,)},
    activation="hidden_act",
    permuted=(),
    ternary=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    settle=_bitnet,
)

# What 1bitLLM's models call themselves, whose model_type is "llama".
BITNET_B158 = replace(
    BITNET,
    layer={
        **BITNET.layer,
        "attn_sub_norm": ("self_attn.inner_attn_ln", "q"),
        "ffn_sub_norm": ("mlp.ffn_layernorm", "ff"),
    },
    defaults={**BITNET.defaults, "hidden_act": "silu"},
    only={**BITNET.only, "weight_bits": (1,)},
    settle=None,
)


def _openlm(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Keys of params_args_dict beside the others, and what of them is refused."""
    said = {**values, **(values.get("params_args_dict") or {})}
    usual = {
        "ffn_type": ("swiglu", "swiglu_torch"),
        "positional_embedding_type": ("rotary",),
        "model_norm": ("gain_only_layer_norm", "gain_only_lp_layer_norm"),
        "post_embed_norm": (False, None),
        "moe_freq": (0, None),
        "attn_activation": (None,),
    }
    for key, allowed in usual.items():
        if said.get(key) not in allowed:
            raise UnsupportedError(f"config.json: {key} = {said.get(key)!r} is not supported for OpenLM")
    if not (said.get("qk_norm") or said.get("apply_qk_norm")):
        raise UnsupportedError("config.json: OpenLM without qk_norm is not supported")
    names = {
        "hidden_size": ("dim", "hidden_dim"),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "max_position_embeddings": ("seq_len",),
        "layer_norm_eps": ("norm_eps",),
        "tie_word_embeddings": ("weight_tying",),
    }
    for ours, theirs in names.items():
        said[ours] = next((said[key] for key in theirs if said.get(key) is not None), said.get(ours))
    width = said["hidden_size"]
    return family, {**said, "intermediate_size": width and 256 * -(-int(8 * width / 3) // 256)}


OPENLM = Family(
    arch="openlm",
    stem="model.",
    block="layers.{}.",
    outside={"token_embd": ("tok_embeddings", "v d"), "output_norm": ("norm", "d")},
    layer={
        "attn_norm": ("attention_norm", "d"),
        "attn_qkv": ("attention.in_proj", "qkv d"),
        "attn_q_norm": ("attention.q_norm", "q"),
        "attn_k_norm": ("attention.k_norm", "kv"),
        "attn_output": ("attention.out_proj", "d q"),
        "ffn_norm": ("ffn_norm", "d"),
        "ffn_up": ("feed_forward.w12", "2ff d"),
        "ffn_down": ("feed_forward.w3", "d ff"),
    },
    defaults={"layer_norm_eps": 1e-5},
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    head="model.output",
    ignored=(r".*pos_embed\.inv_freq",),
    settle=_openlm,
)

OWN_CLASSES = {"BitnetForCausalLM": BITNET_B158}

# Vicuna and others are "llama" itself; Aya 23 is "cohere", CodeGemma "gemma".
LLAMA_FAMILIES: dict[str, Family] = {
    "qwen3": QWEN3,
    "stablelm": STABLELM,
    "stablelm_epoch": replace(STABLELM, spelling={"partial_rotary_factor": "rope_pct", "layer_norm_eps": "norm_eps"}),
    "gemma": GEMMA,
    "olmo": OLMO,
    "cohere": COHERE,
    "granite": GRANITE,
    "minicpm": MINICPM,
    "glm4": GLM4,
    "bitnet": BITNET,
    "openlm": OPENLM,
}
