# SPDX-License-Identifier: Apache-2.0
"""Hugging Face model types with latent attention (MLA), as data: see families.py.

Symbols: lat (the latent's width), kva (with what rotates), kvb (rows of K and V of all heads), ov (V of all heads),
qlat (the latent of q), nope and rot (columns of a head of K that do not rotate, and that do), dv (of V).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gguf.gguf_writer import GGUFValue

from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import float32
from slimrt.modelfile.hf.experts import DEEPSEEK
from slimrt.modelfile.hf.families import LLAMA
from slimrt.modelfile.hf.family import Family
from slimrt.modelfile.hf.layered_families import growth_of_q
from slimrt.modelfile.hf.llama_families import MINICPM
from slimrt.modelfile.hf.rope import said_of_rope

_OF_LATENTS = 1e-6  # epsilon of the norms of latents, whatever the config says of the others
_ATTENTION = {
    "attn_norm": ("input_layernorm", "d"),
    "attn_q_a": ("self_attn.q_a_proj", "qlat d"),
    "attn_q_a_norm": ("self_attn.q_a_layernorm", "qlat"),
    "attn_q_b": ("self_attn.q_b_proj", "q qlat"),
    "attn_kv_a_mqa": ("self_attn.kv_a_proj_with_mqa", "kva d"),
    "attn_kv_a_norm": ("self_attn.kv_a_layernorm", "lat"),
    "attn_kv_b": ("self_attn.kv_b_proj", "kvb lat"),
    "attn_output": ("self_attn.o_proj", "d ov"),
}
_PLAIN_Q = {"attn_q": ("self_attn.q_proj", "q d")}
_PARTS = {
    "attn_k_b": ("self_attn.kv_b_proj", "heads lat nope"),
    "attn_v_b": ("self_attn.kv_b_proj", "heads dv lat"),
}
_SYMBOLS = {
    "lat": "kv_lora_rank",
    "kva": "latent_row",
    "kvb": "latent_kv",
    "ov": "latent_v",
    "nope": "qk_nope_head_dim",
    "rot": "qk_rope_head_dim",
    "dv": "v_head_dim",
}
_NUMBERS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
}


def _epsilon(values: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, GGUFValue]:
    """GGUF has one for all norms."""
    return {} if values["rms_norm_eps"] == _OF_LATENTS else {"slimrt.latent_norm_epsilon": float32(_OF_LATENTS)}


def _with_latent(family: Family) -> Family:
    """A family with latent attention in the place of its own, K and V of the latent in one tensor."""

    def attention(layer: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        return _ATTENTION | {name: module for name, module in layer.items() if not name.startswith("attn")}

    return replace(
        family,
        layer=attention(family.layer),
        leading_layer=attention(family.leading_layer) if family.leading else {},
        only={**family.only, "attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,)},
        symbols={**family.symbols, **_SYMBOLS},
        numbers={**family.numbers, **_NUMBERS},
        permuted=(),
        extra=_epsilon,
    )


def _in_parts(family: Family) -> Family:
    """As llama.cpp's newer files have it: weights of K and V by themselves, rows of one head."""

    def parts(layer: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        return {name: module for name, module in layer.items() if name != "attn_kv_b"} | _PARTS

    mla = {"attention.key_length_mla": "head_dim", "attention.value_length_mla": "v_head_dim"}
    rows = {"attention.key_length": "latent_row", "attention.value_length": "kv_lora_rank"}
    return replace(
        family,
        layer=parts(family.layer),
        leading_layer=parts(family.leading_layer),
        latent_parts=tuple(_PARTS),
        numbers={**family.numbers, **rows, **mla, "attention.head_count_kv": "latent_heads"},
    )


def _settle_latent(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Sizes that follow, q with a latent of its own or without, YaRN's scale of scores."""
    heads, latent = values["num_attention_heads"], values["kv_lora_rank"]
    plain, rotating, v = values["qk_nope_head_dim"], values["qk_rope_head_dim"], values["v_head_dim"]
    if values.get("num_key_value_heads") not in (None, heads):
        raise UnsupportedError("config.json: num_key_value_heads other than num_attention_heads is not supported here")
    rope = said_of_rope(values)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("mscale_all_dim") and kind not in ("yarn", "default"):
        raise UnsupportedError("config.json: mscale_all_dim beside another RoPE scaling than YaRN is not supported")
    if (rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedError(
            "config.json: a partial_rotary_factor other than 1 is not supported here: qk_rope_head_dim says what turns"
        )
    if "rope_interleave" in values and values["rope_interleave"] is None:
        raise UnsupportedError("config.json: rope_interleave = null, which means false, is not supported")
    values |= {
        "head_dim": plain + rotating,
        "latent_row": latent + rotating,
        "latent_kv": heads * (plain + v),
        "latent_v": heads * v,
        "latent_heads": 1,
        "yarn_log_multiplier": 0.1 * (rope.get("mscale_all_dim") or 0),
    }
    if values.get("q_lora_rank") is None:

        def without(layer: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
            return _PLAIN_Q | {name: module for name, module in layer.items() if "attn_q_" not in name}

        return replace(
            family, layer=without(family.layer), leading_layer=without(family.leading_layer) if family.leading else {}
        ), values
    return replace(
        family,
        symbols={**family.symbols, "qlat": "q_lora_rank"},
        numbers={**family.numbers, "attention.q_lora_rank": "q_lora_rank"},
    ), values


def _without_further_tokens(family: Family, values: dict[str, Any]) -> Family:
    """Leaves out the layers after the last, which predict tokens after the next (NextN, MTP)."""
    n = values["num_hidden_layers"]
    more = "|".join(str(layer) for layer in range(n, n + (values.get("num_nextn_predict_layers") or 0)))
    return replace(family, ignored=(*family.ignored, rf"model\.layers\.({more})\..*")) if more else family


def _deepseek2(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Shared experts are one network, as wide as they are together; groups of experts where some are left out."""
    groups, used = values.get("n_group") or 1, values.get("topk_group") or 1
    if values["topk_method"] == "greedy" or groups == used:
        groups = used = 1
    if groups > 1:
        counts = {"expert_group_count": "groups", "expert_group_used_count": "groups_used"}
        family = replace(family, numbers={**family.numbers, **counts})
    values = {
        **values,
        "shared_width": values["n_shared_experts"] * values["moe_intermediate_size"],
        "gating": 2 if values["scoring_func"] == "sigmoid" else 1,
        "groups": groups,
        "groups_used": used,
    }
    return _settle_latent(_without_further_tokens(family, values), values)


def _glm4_moe_lite(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The first layer without experts, as `mlp_layer_types` says where it is there."""
    kinds = values.get("mlp_layer_types")
    dense = values["first_k_dense_replace"] if kinds is None else kinds.count("dense")
    if kinds is not None and kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise UnsupportedError("config.json: mlp_layer_types with experts before a layer without is not supported")
    return _deepseek2(family, {**values, "first_k_dense_replace": dense})


def _minicpm3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Heads of V as wide as the model gives each, where the config leaves it open; MiniCPM's scales."""
    width = values["hidden_size"] // values["num_attention_heads"]
    rope = said_of_rope(values)
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        raise UnsupportedError("config.json: MiniCPM3 with YaRN is not supported")
    family, values = _settle_latent(family, {**values, "v_head_dim": values.get("v_head_dim") or width})
    assert MINICPM.settle is not None
    return MINICPM.settle(family, values)


def _mistral4(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Q grow with their position; RoPE's share of a head is the columns that rotate."""
    heads = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    rope = dict(said_of_rope(values) or MISTRAL4_ROPE)
    if rope.pop("partial_rotary_factor", None) not in (None, values["qk_rope_head_dim"] / heads):
        raise UnsupportedError("config.json: a partial_rotary_factor that is not qk_rope_head_dim's is not supported")
    found = {
        **values,
        "rope_scaling": None,
        "rope_parameters": rope,
        "gate_and_up": 2 * values["moe_intermediate_size"],
        "growth": growth_of_q({"rope_parameters": rope}),
        "growth_length": rope.get("original_max_position_embeddings"),
    }
    return _deepseek2(family, found)


DEEPSEEK2 = _in_parts(
    _with_latent(
        replace(
            DEEPSEEK,
            arch="deepseek2",
            defaults={
                **LLAMA.defaults,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "n_shared_experts": 2,
                "first_k_dense_replace": 0,
                "routed_scaling_factor": 1.0,
                "topk_method": "greedy",
                "scoring_func": "softmax",
            },
            only={
                "hidden_act": ("silu", "swish"),
                "moe_layer_freq": (1,),
                "norm_topk_prob": (False,),
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
            },
            numbers={**DEEPSEEK.numbers, "expert_gating_func": "gating"},
            scales={"expert_weights_scale": "routed_scaling_factor"},
            settle=_deepseek2,
        )
    )
)

_SIGMOIDS = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}


def _with_choice_bias(family: Family) -> Family:
    """Experts chosen by sigmoids and a bias that does not weigh them."""
    bias = {"exp_probs_b.bias": ("mlp.gate.e_score_correction_bias", "experts")}
    return replace(
        family,
        layer={**family.layer, **bias},
        float32=(*family.float32, "exp_probs_b"),
        only={key: value for key, value in family.only.items() if key != "norm_topk_prob"} | _SIGMOIDS,
        flags={"expert_weights_norm": "norm_topk_prob"},
    )


DEEPSEEK3 = replace(
    _with_choice_bias(DEEPSEEK2),
    defaults={
        **DEEPSEEK2.defaults,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
)

GLM4_MOE_LITE = replace(
    DEEPSEEK3,
    defaults={
        **DEEPSEEK3.defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    settle=_glm4_moe_lite,
)
MINICPM3 = _with_latent(
    replace(
        MINICPM,
        arch="minicpm3",
        defaults={
            **MINICPM.defaults,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        settle=_minicpm3,
    )
)

MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4 = replace(
    DEEPSEEK2,
    arch="mistral4",
    layer={
        **{name: module for name, module in DEEPSEEK2.layer.items() if not name.endswith("_exps")},
        "ffn_gate_up_exps.weight": ("mlp.experts.gate_up_proj", "experts 2eff d"),
        "ffn_down_exps.weight": ("mlp.experts.down_proj", "experts d eff"),
    },
    symbols={**DEEPSEEK2.symbols, "2eff": "gate_and_up"},
    defaults={
        **DEEPSEEK2.defaults,
        "max_position_embeddings": 1048576,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
    },
    only={"hidden_act": ("silu", "swish"), "n_group": (1,), "attention_bias": (False,), "rope_interleave": (True,)},
    flags={"expert_weights_norm": "norm_topk_prob"},
    scales={**DEEPSEEK2.scales, "attention.temperature_scale": "growth"},
    numbers={**DEEPSEEK2.numbers, "attention.temperature_length": "growth_length"},
    settle=_mistral4,
)

LATENT: dict[str, Family] = {
    "deepseek_v2": DEEPSEEK2,
    "deepseek_v3": DEEPSEEK3,
    "kimi_k2": DEEPSEEK3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "minicpm3": MINICPM3,
    "mistral4": MISTRAL4,
}
