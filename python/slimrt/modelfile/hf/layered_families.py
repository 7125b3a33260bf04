# SPDX-License-Identifier: Apache-2.0
"""Decoders whose layers or positions differ: windows in some, RoPE of another base or none in others."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from slimrt.errors import UnsupportedError
from slimrt.modelfile.hf.families import LLAMA, MISTRAL, OLMO2, Family
from slimrt.modelfile.hf.llama_families import COHERE, GEMMA, QWEN3


def _scale_of_scores(values: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """Where it is not what a head's width says, or in a 27B model its share of the model's: arch/gemma2.cpp."""
    scalar, usual = values["query_pre_attn_scalar"], values["head_dim"]
    if values["num_hidden_layers"] == layers_of_27b:
        usual = values["hidden_size"] // values["num_attention_heads"]
    return {} if scalar == usual else {"attention_multiplier": 1 / sqrt(scalar)}


def _gemma2(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        if not values[key]:
            raise UnsupportedError(f"config.json: {key} = {values[key]!r} is not supported: Gemma 2 has one")
    return family, {**values, **_scale_of_scores(values, 46)}


GEMMA2 = replace(
    GEMMA,
    arch="gemma2",
    layer={
        **GEMMA.layer,
        "post_attention_norm": ("post_attention_layernorm", "d"),
        "ffn_norm": ("pre_feedforward_layernorm", "d"),
        "post_ffw_norm": ("post_feedforward_layernorm", "d"),
    },
    spelling={"hidden_act": "hidden_activation"},
    defaults={
        **GEMMA.defaults,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    only={"hidden_act": ("gelu_pytorch_tanh",), "attention_bias": (False,), "use_bidirectional_attention": (False,)},
    scales={
        "attention.scale": "attention_multiplier",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    window=True,
    settle=_gemma2,
)


def _gemma3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """RoPE's two bases as transformers 5 spells them."""
    found = dict(values)
    rope = found.pop("rope_parameters", None) or {}
    if not isinstance(rope.get("full_attention"), dict):
        scaling = found.pop("rope_scaling", None) or rope
        full = {"rope_theta": values.get("rope_theta", 1e6), **scaling}
        rope = {"full_attention": full, "sliding_attention": {"rope_theta": values.get("rope_local_base_freq", 1e4)}}
    return family, {**found, "rope_parameters": rope, **_scale_of_scores(values, 62)}


GEMMA3 = replace(
    GEMMA,
    arch="gemma3",
    layer={
        **GEMMA.layer,
        "attn_q_norm": ("self_attn.q_norm", "dk"),
        "attn_k_norm": ("self_attn.k_norm", "dk"),
        "post_attention_norm": ("post_attention_layernorm", "d"),
        "ffn_norm": ("pre_feedforward_layernorm", "d"),
        "post_ffw_norm": ("post_feedforward_layernorm", "d"),
    },
    spelling={"hidden_act": "hidden_activation"},
    defaults={
        **GEMMA.defaults,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    only={
        **GEMMA.only,
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    scales={"attention.scale": "attention_multiplier"},
    window=True,
    window_rope=True,
    settle=_gemma3,
)

OLMO3 = replace(
    OLMO2,
    defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500000.0},
    window=True,
    window_rope=True,
    settle=None,
)

COHERE2 = replace(
    COHERE,
    arch="cohere2",
    defaults={**COHERE.defaults, "sliding_window": 4096, "rope_theta": 10000.0},
    window=True,
)

EXAONE4 = replace(
    QWEN3,
    arch="exaone4",
    layer={
        **{name: module for name, module in QWEN3.layer.items() if name not in ("attn_norm", "ffn_norm")},
        "post_attention_norm": ("post_attention_layernorm", "d"),
        "post_ffw_norm": ("post_feedforward_layernorm", "d"),
    },
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    window=True,
    settle=None,
)


def _smollm3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Files do not say which layers know no positions: every fourth."""
    n, interval = values["num_hidden_layers"], values.get("no_rope_layer_interval", 4)
    turned = values.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n)]
    if [bool(one) for one in turned[:n]] != [(i + 1) % 4 != 0 for i in range(n)]:
        raise UnsupportedError("config.json: no_rope_layers other than every fourth layer are not supported")
    return family, values


SMOLLM3 = replace(
    LLAMA,
    arch="smollm3",
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    only={**LLAMA.only, "use_cla": (False,)},
    window=False,
    settle=_smollm3,
)


def _ministral3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """How q grow with their position, which stands among RoPE's parameters."""
    return family, {**values, "growth": (values.get("rope_parameters") or {}).get("llama_4_scaling_beta")}


MINISTRAL3 = replace(
    MISTRAL,
    arch="mistral3",
    defaults={**MISTRAL.defaults, "max_position_embeddings": 262144, "head_dim": 128, "sliding_window": None},
    scales={"attention.temperature_scale": "growth"},
    settle=_ministral3,
)

LAYERED_FAMILIES: dict[str, Family] = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo3": OLMO3,
    "cohere2": COHERE2,
    "exaone4": EXAONE4,
    "smollm3": SMOLLM3,
    "ministral3": MINISTRAL3,
}
