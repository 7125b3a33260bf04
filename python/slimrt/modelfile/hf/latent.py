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
from slimrt.modelfile.hf.families import LLAMA, Family
from slimrt.modelfile.hf.llama_families import MINICPM

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
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
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


def _deepseek2(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Shared experts are one network, as wide as they are together; a layout of all layers alike."""
    shared = values["n_shared_experts"] * values["moe_intermediate_size"]
    return _settle_latent(family, {**values, "shared_width": shared, "gating": 1})


def _minicpm3(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Heads of V as wide as the model gives each, where the config leaves it open; MiniCPM's scales."""
    width = values["hidden_size"] // values["num_attention_heads"]
    family, values = _settle_latent(family, {**values, "v_head_dim": values.get("v_head_dim") or width})
    assert MINICPM.settle is not None
    return MINICPM.settle(family, values)


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
            },
            only={
                "hidden_act": ("silu", "swish"),
                "moe_layer_freq": (1,),
                "norm_topk_prob": (False,),
                "scoring_func": ("softmax",),
                "topk_method": ("greedy",),
            },
            numbers={**DEEPSEEK.numbers, "expert_gating_func": "gating"},
            scales={"expert_weights_scale": "routed_scaling_factor"},
            settle=_deepseek2,
        )
    )
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

LATENT: dict[str, Family] = {"deepseek_v2": DEEPSEEK2, "minicpm3": MINICPM3}
