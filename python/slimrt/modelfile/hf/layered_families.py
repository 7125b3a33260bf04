# SPDX-License-Identifier: Apache-2.0
"""Decoders whose layers or positions differ: windows in some, RoPE of another base or none in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from slimrt.errors import UnsupportedError
from slimrt.modelfile.hf.families import LLAMA, MISTRAL, OLMO2
from slimrt.modelfile.hf.family import Family
from slimrt.modelfile.hf.llama_families import COHERE, GEMMA, QWEN3
from slimrt.modelfile.hf.rope import by_kinds_of_layers, said_of_rope


def _scale_of_scores(values: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """Where it is not what a head's width says, or in a 27B model its share of the model's: arch/gemma2.cpp."""
    scalar, usual = values["query_pre_attn_scalar"], values["head_dim"]
    if values["num_hidden_layers"] == layers_of_27b:
        usual = values["hidden_size"] // values["num_attention_heads"]
    return {} if scalar == usual else {"attention_multiplier": 1 / sqrt(scalar)}


def _require_windows(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Refuses models without: their files always say a window, or positions are known beside it alone."""
    if not values["sliding_window"] or "sliding_attention" not in (values.get("layer_types") or ("sliding_attention",)):
        key = "layer_types" if values["sliding_window"] else "sliding_window"
        raise UnsupportedError(
            f"config.json: {key} = {values[key]!r} is not supported: layers of {values['model_type']} have a window"
        )
    return family, values


def _gemma2(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not values[key]:
            raise UnsupportedError(f"config.json: {key} = {values[key]!r} is not supported: Gemma 2 has one")
    return _require_windows(family, {**values, **_scale_of_scores(values, 46)})


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
    only={
        "hidden_act": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (False,),
        "sliding_window_pattern": (2,),  # no other is read: layer_types says it
    },
    scales={
        "attention.scale": "attention_multiplier",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    window=True,
    settle=_gemma2,
)


def _gemma3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    base, of_windows = values.get("rope_theta", 1e6), values.get("rope_local_base_freq", 1e4)
    rope = by_kinds_of_layers(values, {"full_attention": base, "sliding_attention": of_windows})
    return family, {**values, **rope, **_scale_of_scores(values, 62)}


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
        "hidden_act": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    scales={"attention.scale": "attention_multiplier"},
    window=True,
    window_rope=True,
    settle=_gemma3,
)


def _gemma4(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Layers that see all have sizes of their own, and in the larger models no W_V."""
    n = values["num_hidden_layers"]
    usual = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n)]
    kinds = [*(values.get("layer_types") or usual)[: n - 1], "full_attention"]
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    own = {"head_dim": values.get("global_head_dim", 512)}
    if values.get("attention_k_eq_v") and values.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = values["num_global_key_value_heads"]
    each = {int(i): one for i, one in (values.get("per_layer_config") or dict.fromkeys(full, own)).items()}
    if each and (sorted(each) != full or any(one != each[full[0]] for one in each.values())):
        raise UnsupportedError("config.json: per_layer_config of other layers than those that see all is not supported")
    lacking = {"attn_v": full} if values.get("attention_k_eq_v") else {}
    rope = values.get("rope_parameters") or {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    settled = {"layer_types": kinds, "per_layer_config": each, "rope_parameters": rope}
    if values.get("enable_moe_block"):
        family = replace(
            family,
            layer={**family.layer, **BESIDE_DENSE},
            symbols={**family.symbols, "experts": "num_experts", "eff": "moe_intermediate_size", "2eff": "gate_and_up"},
            numbers={**family.numbers, **COUNTS_OF_EXPERTS},
            float32=(*family.float32, "ffn_gate_inp"),
        )
        settled["gate_and_up"] = 2 * values["moe_intermediate_size"]
    return _small_gemma4(replace(family, lacking=lacking), {**values, **settled})


def _small_gemma4(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """E2B and E4B: embeddings in each layer, and last layers that read the K and V of others, some of them wide."""
    n, width = values["num_hidden_layers"], values.get("hidden_size_per_layer_input") or 0
    values = {**values, "hidden_size_per_layer_input": width, "width_of_all_layers": n * width}
    if width:
        family = replace(
            family,
            outside={**family.outside, **LAYER_EMBEDDING},
            layer={**family.layer, **LAYER_EMBEDDING_OF_LAYER},
            symbols={**family.symbols, "le": "hidden_size_per_layer_input", "all": "width_of_all_layers"},
        )
    shared = values.get("num_kv_shared_layers") or 0
    if not shared:
        return family, values
    readers = range(n - shared, n)
    parts = {"attn_k": "k_proj", "attn_v": "v_proj", "attn_k_norm": "k_norm"}
    lacking = {**family.lacking, **{name: {*family.lacking.get(name, ()), *readers} for name in parts}}
    unread = rf".*layers\.({'|'.join(map(str, readers))})\.self_attn\.({'|'.join(parts.values())}|v_norm)\..*"
    if values.get("use_double_wide_mlp"):
        sizes = {i: dict(one) for i, one in values["per_layer_config"].items()}
        for i in readers:
            sizes.setdefault(i, {})["intermediate_size"] = 2 * values["intermediate_size"]
        values["per_layer_config"] = sizes
    return replace(family, sharing="gemma3n", lacking=lacking, ignored=(*family.ignored, unread)), values


LAYER_EMBEDDING = {
    "per_layer_token_embd": ("embed_tokens_per_layer", "v all"),
    "per_layer_model_proj": ("per_layer_model_projection", "all d"),
    "per_layer_proj_norm": ("per_layer_projection_norm", "le"),
}

LAYER_EMBEDDING_OF_LAYER = {
    "inp_gate": ("per_layer_input_gate", "le d"),
    "proj": ("per_layer_projection", "d le"),
    "post_norm": ("post_per_layer_input_norm", "d"),
}

# The 26B-A4B: experts beside each layer's network, with norms of their own.
BESIDE_DENSE = {
    "ffn_gate_inp": ("router.proj", "experts d"),
    "ffn_gate_inp.scale": ("router.scale", "d"),
    "ffn_gate_up_exps.weight": ("experts.gate_up_proj", "experts 2eff d"),
    "ffn_down_exps.weight": ("experts.down_proj", "experts d eff"),
    "ffn_down_exps.scale": ("router.per_expert_scale", "experts"),
    "pre_ffw_norm_2": ("pre_feedforward_layernorm_2", "d"),
    "post_ffw_norm_1": ("post_feedforward_layernorm_1", "d"),
    "post_ffw_norm_2": ("post_feedforward_layernorm_2", "d"),
}

COUNTS_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}

GEMMA4 = replace(
    GEMMA3,
    arch="gemma4",
    layer={**GEMMA3.layer, "layer_output_scale.weight": ("layer_scalar", "1")},
    norms_less_one=False,
    defaults={**GEMMA3.defaults, "sliding_window": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0},
    only={
        **GEMMA.only,
        "hidden_act": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": ("vision",),
    },
    numbers={
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "attention.shared_kv_layers": "num_kv_shared_layers",
    },
    scales={"final_logit_softcapping": "final_logit_softcapping"},
    window_pattern=True,
    settle=_gemma4,
)

# The 12B, which reads images and sound without a tower.
GEMMA4_UNIFIED = replace(GEMMA4, defaults={**GEMMA4.defaults, "sliding_window": 1024, "hidden_size_per_layer_input": 0})


def _olmo3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Transformers 5 gives a config's rope_theta to layers without a window alone, transformers 4 to all."""
    base, usual = values["rope_theta"], OLMO3.defaults["rope_theta"]
    rope = by_kinds_of_layers(values, {"full_attention": base, "sliding_attention": usual})
    own = (values.get("rope_parameters") or {}).get("sliding_attention") or {}
    if base != usual and "rope_theta" not in own:
        raise UnsupportedError(
            f"config.json: rope_theta = {base} does not say whether layers with a window have it: "
            "rope_parameters of sliding_attention do"
        )
    return family, {**values, **rope}


OLMO3 = replace(
    OLMO2,
    defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500000.0},
    only={**OLMO2.only, "sliding_window_pattern": (4,)},  # no other is read: layer_types says it
    window=True,
    window_rope=True,
    settle=_olmo3,
)

COHERE2 = replace(
    COHERE,
    arch="cohere2",
    defaults={**COHERE.defaults, "sliding_window": 4096, "rope_theta": 10000.0},
    window=True,
    settle=_require_windows,
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


def growth_of_q(values: Mapping[str, Any]) -> float:
    """How q grow with their position, which stands among RoPE's parameters."""
    rope = said_of_rope(values)
    if (growth := rope.get("llama_4_scaling_beta")) is None:
        raise UnsupportedError("config.json: RoPE's parameters say no llama_4_scaling_beta, by which q grow")
    return float(growth)


def _ministral3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Q grow past the original context, whatever scales RoPE."""
    rope = said_of_rope(values)
    length = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    found = {**values, "growth": growth_of_q(values), "growth_length": length}
    return (family if length else replace(family, numbers={})), found


MINISTRAL3 = replace(
    MISTRAL,
    arch="mistral3",
    defaults={
        **MISTRAL.defaults,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "sliding_window": None,
    },
    scales={"attention.temperature_scale": "growth"},
    numbers={"attention.temperature_length": "growth_length"},
    settle=_ministral3,
)

LAYERED_FAMILIES: dict[str, Family] = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "olmo3": OLMO3,
    "cohere2": COHERE2,
    "exaone4": EXAONE4,
    "smollm3": SMOLLM3,
    "ministral3": MINISTRAL3,
}
