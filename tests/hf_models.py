# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face models, one for each thing that may go wrong. Needs torch and transformers.

Weights are drawn large (and norms and biases at random) so that every part of a layer matters to the logits.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

N_PROMPT, N_DECODE = 64, 16

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GPT2 = {
    "n_embd": 48,
    "n_inner": None,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 103,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT_NEOX = {key: value for key, value in SMALL.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
BLOOM = {
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 6,
    "vocab_size": 101,
    "layer_norm_epsilon": 2e-5,
    "seq_length": 128,
    "eos_token_id": [2, 3],
}
MPT = {"d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 101, "max_seq_len": 128, "eos_token_id": 0}
OPT = {key: value for key, value in SMALL.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
OPT |= {"ffn_dim": 88, "word_embed_proj_dim": 48, "tie_word_embeddings": True}
GPT_OSS = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 13,
    "eos_token_id": [2, 7, 9],
}
BASES = {"gpt2": GPT2, "gpt_neox": GPT_NEOX, "phi": GPT_NEOX, "bloom": BLOOM, "mpt": MPT, "opt": OPT}  # others: SMALL
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
           "phi3": "Phi3ForCausalLM", "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM",
           "phi": "PhiForCausalLM", "qwen3": "Qwen3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
           "stablelm": "StableLmForCausalLM", "gemma": "GemmaForCausalLM", "olmo": "OlmoForCausalLM",
           "cohere": "CohereForCausalLM", "bloom": "BloomForCausalLM", "mpt": "MptForCausalLM",
           "granite": "GraniteForCausalLM", "glm4": "Glm4ForCausalLM", "opt": "OPTForCausalLM",
           "olmoe": "OlmoeForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
           "qwen3_moe": "Qwen3MoeForCausalLM", "granitemoe": "GraniteMoeForCausalLM",
           "bitnet": "BitNetForCausalLM", "gemma2": "Gemma2ForCausalLM",
           "gemma3_text": "Gemma3ForCausalLM", "olmo3": "Olmo3ForCausalLM",
           "cohere2": "Cohere2ForCausalLM", "exaone4": "Exaone4ForCausalLM",
           "smollm3": "SmolLM3ForCausalLM", "ministral3": "Ministral3ForCausalLM",
           "gpt_oss": "GptOssForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
           "minicpm3": "MiniCPM3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
           "glm4_moe_lite": "Glm4MoeLiteForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM",
           "gemma4_text": "Gemma4ForCausalLM", "mistral4": "Mistral4ForCausalLM",
           "phimoe": "PhimoeForCausalLM"}  # fmt: skip
LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0], "long_factor": [1.2, 2.1, 3.5, 6.0, 8.5, 11.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
DEEPSEEK2 = {**LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 5,
             "num_experts_per_tok": 3, "moe_intermediate_size": 20}  # fmt: skip


GEMMA4 = {"head_dim": 20, "global_head_dim": 32, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
          "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
          "sliding_window": 9, "final_logit_softcapping": 20.0}  # fmt: skip


@dataclass
class Tiny:
    """How to make one model. prompt: golden name suffix -> prompt length and the n_ctx to load it with."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, tuple[int, int]] = field(default_factory=lambda: {"": (N_PROMPT, 128)})
    dtype: str = "float32"
    shard_size: str = "1GB"
    seed: int = 0  # chosen where a square W_K or W_V is reasonably conditioned (cond up to a few hundred)
    rewrite: Callable[[dict[str, Any]], None] | None = None  # changes config.json after it is saved
    ternary: bool = False  # its matrices run as -s, 0 and s, which transformers knows on a GPU alone
    stands_in: bool = False  # for a model type that transformers has no class of, whose mathematics are the same


def legacy_rope(config: dict[str, Any]) -> None:
    """The spelling of transformers 4: rope_theta and rope_scaling."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope


def legacy_longrope(config: dict[str, Any]) -> None:
    """As in the published Phi-3 configurations: "type", and the original context outside."""
    legacy_rope(config)
    config["rope_scaling"] = {"type": "longrope", **LONG_FACTORS}
    config["original_max_position_embeddings"] = 48


def legacy_partial_rope(config: dict[str, Any]) -> None:
    """As in Pythia's configurations."""
    rope = config.pop("rope_parameters")
    config["rotary_pct"], config["rotary_emb_base"] = rope["partial_rotary_factor"], rope["rope_theta"]


def first_gelu(config: dict[str, Any]) -> None:
    """As in the first configurations of Gemma, where "gelu" means tanh's."""
    config["hidden_act"] = "gelu"


def first_gemma2(config: dict[str, Any]) -> None:
    """As in Gemma 2's published configurations, where every other layer has a window unsaid."""
    config.pop("layer_types")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["hidden_act"] = config["hidden_activation"]


def minicpm(config: dict[str, Any]) -> None:
    """As in MiniCPM-2B's configuration."""
    config["model_type"] = "minicpm"
    config.pop("attention_multiplier")
    config["scale_emb"] = config.pop("embedding_multiplier")
    config["scale_depth"] = config.pop("residual_multiplier") * config["num_hidden_layers"] ** 0.5
    config["dim_model_base"] = config["hidden_size"] / config.pop("logits_scaling")


def online(config: dict[str, Any]) -> None:
    """As in the configuration of BitNet b1.58 2B-4T's master weights."""
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear",
                                     "quantization_mode": "online"}  # fmt: skip


def legacy_gemma3(config: dict[str, Any]) -> None:
    """As in Gemma 3's first configurations: RoPE's bases and the pattern as numbers."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"].pop("rope_theta")
    config["rope_scaling"] = rope["full_attention"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config.pop("layer_types")
    config["sliding_window_pattern"] = 3


def rotary_dim(config: dict[str, Any]) -> None:
    """As in MiniMax-M2's configurations."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rotary_dim"], config["scoring_func"], config["use_qk_norm"] = 6, "sigmoid", True


def gpt_oss(config: dict[str, Any]) -> None:
    """The spelling of gpt-oss's configurations."""
    legacy_rope(config)
    config.pop("swiglu_alpha", None)
    config["swiglu_limit"] = 7.0


def published_gemma4(config: dict[str, Any]) -> None:
    """As in Gemma 4's published configurations: sizes of layers that see all by keys of their own."""
    own = next(iter(config.pop("per_layer_config").values()))
    config["global_head_dim"], config["num_global_key_value_heads"] = own["head_dim"], own.get("num_key_value_heads")


def unused_window(config: dict[str, Any]) -> None:
    """Qwen2 configurations state a window that they do not use."""
    config["sliding_window"], config["use_sliding_window"] = 8, False


MODELS = {
    "llama_mha": Tiny("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
    "llama_gqa_tied": Tiny("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, shard_size="40KB"),
    "llama_bias": Tiny("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}, seed=2),
    "llama_head_dim": Tiny("llama", {"head_dim": 20, "num_key_value_heads": 2}),
    "llama_gqa_wide": Tiny("llama", {"head_dim": 24, "num_key_value_heads": 2, "attention_bias": True}, seed=5),
    "llama_wide": Tiny("llama", {"head_dim": 24}),
    "llama_llama3": Tiny("llama", {"rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}, rewrite=legacy_rope),
    "llama_linear": Tiny(
        "llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}}, dtype="float16"
    ),
    "llama_yarn": Tiny(
        "llama",
        {
            "head_dim": 24,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_theta": 1000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,  # the ramp begins at pair 2.8 and ends at 8.9
            },
        },
    ),
    "mistral_window": Tiny("mistral", {"num_key_value_heads": 2, "sliding_window": 13}),
    "mistral_mha": Tiny("mistral", {"sliding_window": 11, "vocab_size": 104}, seed=2),
    "qwen2_tied": Tiny(
        "qwen2",
        {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 131},
        dtype="bfloat16",
        rewrite=unused_window,
    ),
    "qwen2_mha": Tiny("qwen2", {"rms_norm_eps": 1e-6}),
    "phi3": Tiny(
        "phi3",
        {
            "num_key_value_heads": 2,
            "sliding_window": 40,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                **LONG_FACTORS,
                "original_max_position_embeddings": 48,
            },
        },
        prompts={".short": (32, 48), ".long": (N_PROMPT, 128)},
        dtype="bfloat16",
        rewrite=legacy_longrope,
    ),  # fmt: skip
    "phi3_partial": Tiny(  # as Phi-4-mini
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                **LONG_FACTORS,
                "partial_rotary_factor": 0.75,  # 12 of 16
                "original_max_position_embeddings": 48,
            },
        },
    ),
    "gptneox": Tiny("gpt_neox", {"rotary_pct": 0.5}, seed=5),
    "gptneox_sequential": Tiny(
        "gpt_neox",
        {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "rotary_pct": 0.34,  # 4.08 of 12
            "rotary_emb_base": 500,
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
        },
        dtype="float16",
        rewrite=legacy_partial_rope,
    ),
    "phi2": Tiny(
        "phi",
        {"hidden_size": 60, "num_attention_heads": 3, "partial_rotary_factor": 0.4, "vocab_size": 103},
        seed=5,
    ),
    "phi2_gqa": Tiny("phi", {"num_key_value_heads": 2, "hidden_act": "gelu", "partial_rotary_factor": 0.84}),
    "olmo2": Tiny("olmo2", {"rms_norm_eps": 1e-6}),
    "olmo2_gqa": Tiny(
        "olmo2", {"num_key_value_heads": 2, "head_dim": 20, "tie_word_embeddings": True}, dtype="bfloat16"
    ),
    "qwen3": Tiny(  # as Qwen3-0.6B: grouped heads whose K is as wide as the input
        "qwen3", {"num_attention_heads": 8, "head_dim": 12, "eos_token_id": [2, 5]}, seed=7, rewrite=unused_window
    ),
    "qwen3_gqa": Tiny(
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "tie_word_embeddings": True},
        dtype="bfloat16",
    ),
    "stablelm": Tiny(
        "stablelm", {"hidden_size": 64, "use_qkv_bias": True, "eos_token_id": [2, 7]}, seed=24
    ),  # 4 of 16 rotate
    "stablelm_plain": Tiny("stablelm", {"num_key_value_heads": 2, "hidden_size": 64, "layer_norm_eps": 2e-5}),
    "gemma": Tiny("gemma", {"head_dim": 20, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    "gemma_mqa": Tiny(
        "gemma",
        {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
        dtype="bfloat16",
        rewrite=first_gelu,
    ),
    "gemma2": Tiny(  # caps that bend most scores and logits
        "gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
            "eos_token_id": [2, 7],
        },
        dtype="bfloat16",
        rewrite=first_gemma2,
    ),
    "gemma2_mha": Tiny(  # K as wide as the input; layers in another order, scores of another scale
        "gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "sliding_window": 11,
            "query_pre_attn_scalar": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rms_norm_eps": 1e-6,
        },
        seed=7,
    ),
    "olmo": Tiny("olmo", {"tie_word_embeddings": True}, seed=40),
    "olmo_clipped": Tiny("olmo", {"num_key_value_heads": 2, "clip_qkv": 0.9}),
    "cohere": Tiny("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25, "layer_norm_eps": 1e-5}, seed=31),
    "cohere_gqa": Tiny(
        "cohere", {"num_key_value_heads": 2, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}, dtype="float16"
    ),
    "bloom": Tiny("bloom", seed=55),
    "gemma3": Tiny(  # as the 4B: windows, two bases, one of them scaled; another scale of scores
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 20,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "eos_token_id": [2, 7],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        dtype="bfloat16",
    ),
    "gemma3_mha": Tiny(  # K as wide as the input; a pattern of three
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "sliding_window": 11,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
        rewrite=legacy_gemma3,
        seed=7,
    ),
    "gemma4": Tiny(  # as the 31B: layers that see all have wider heads, fewer KV heads and no W_V
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "eos_token_id": [2, 7],
        },
        rewrite=published_gemma4,
    ),
    "gemma4_mha": Tiny(  # K as wide as the input, W_V in all layers
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
        dtype="bfloat16",
    ),
    "gemma4_small": Tiny(  # as E2B: embeddings in each layer; the last layers read K and V of others, and are wide
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 20,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 101,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        rewrite=published_gemma4,
        seed=1,
    ),
    "gemma4_experts": Tiny(  # as the 26B-A4B: experts beside each layer's network
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 28,
        },
        rewrite=published_gemma4,
        seed=1,
    ),
    "olmo3": Tiny(
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 12,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1000.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "cohere2": Tiny(
        "cohere2",
        {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "sliding_window": 10,
            "logit_scale": 0.25,
            "layer_norm_eps": 1e-5,
        },
        seed=31,
    ),
    "exaone4": Tiny("exaone4", {"num_hidden_layers": 4, "sliding_window": 13, "eos_token_id": [2, 4]}, seed=7),
    "exaone4_full": Tiny(
        "exaone4",
        {
            "num_key_value_heads": 2,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_theta": 900.0, **LLAMA3},
        },
        dtype="bfloat16",
    ),
    "ministral3": Tiny(
        "ministral3",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": None,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),  # fmt: skip
    "smollm3": Tiny("smollm3", {"num_hidden_layers": 5, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mpt": Tiny("mpt", seed=52),
    "mpt_clipped": Tiny("mpt", {"n_heads": 4, "attn_config": {"clip_qkv": 1.0}}),
    "granite": Tiny(
        "granite",
        {"embedding_multiplier": 5.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15, "logits_scaling": 3.0},
        seed=18,
    ),
    "granite_gqa": Tiny(
        "granite",
        {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "minicpm": Tiny(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "attention_multiplier": 12**-0.5,
            "logits_scaling": 48 / 16,
            "tie_word_embeddings": True,
        },
        rewrite=minicpm,
        seed=18,
        stands_in=True,
    ),
    "glm4": Tiny(
        "glm4", {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "eos_token_id": [2, 9, 11]}
    ),
    "glm4_mha": Tiny("glm4", {"head_dim": 16, "attention_bias": False}),
    "opt": Tiny("opt"),
    "bitnet": Tiny("bitnet", {"num_key_value_heads": 2, "tie_word_embeddings": True, "hidden_act": "relu2"}),
    "bitnet_online": Tiny("bitnet", {"tie_word_embeddings": True, "hidden_act": "silu"}, rewrite=online, ternary=True),
    "openlm": Tiny("openlm"),
    "deepseek": Tiny("deepseek", seed=2),
    "olmoe": Tiny("olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40}, seed=3),
    "mixtral": Tiny(
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 40},
        dtype="bfloat16",
        seed=2,  # rounding changes no token's experts
    ),
    "phimoe": Tiny(  # transformers 5 takes the short factors at any length, unlike the published code
        "phimoe",
        {
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                **LONG_FACTORS,
                "short_mscale": 1.24,
                "long_mscale": 1.24,
                "original_max_position_embeddings": 48,
            },
        },
        prompts={"": (32, 48)},
    ),
    "phimoe_plain": Tiny("phimoe", {"num_local_experts": 4, "intermediate_size": 24, "num_experts_per_tok": 2}),
    "qwen2moe": Tiny(
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3moe": Tiny(
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 12,
            "norm_topk_prob": True,
            "eos_token_id": [2, 5],
        },
        seed=7,
    ),
    "granitemoe": Tiny(
        "granitemoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "embedding_multiplier": 5.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 3.0,
        },
    ),
    "minimax_m2": Tiny(
        "minimax_m2",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 24,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "eos_token_id": [2, 5],
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
        rewrite=rotary_dim,
    ),
    "gpt_oss": Tiny(
        "gpt_oss",
        {
            **GPT_OSS,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_theta": 1000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 1024,  # the ramp begins at pair 1.9 and ends at 5.9
            },
        },
        dtype="bfloat16",
        rewrite=gpt_oss,
    ),
    "gpt_oss_plain": Tiny(
        "gpt_oss",
        {
            **GPT_OSS,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        },
    ),
    "deepseek2": Tiny("deepseek_v2", {**DEEPSEEK2, "q_lora_rank": None, "eos_token_id": [2, 5]}),
    "deepseek2_yarn": Tiny(
        "deepseek_v2",
        {
            **DEEPSEEK2,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": 28,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
        rewrite=legacy_rope,
    ),
    "deepseek2_groups": Tiny(
        "deepseek_v2",
        {
            **DEEPSEEK2,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "deepseek3": Tiny(  # its config names a layer for the token after the next, which transformers does not save
        "deepseek_v3",
        {
            **DEEPSEEK2,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": 28,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "glm4_moe_lite": Tiny("glm4_moe_lite", {**DEEPSEEK2, "q_lora_rank": 28, "n_group": 1, "topk_group": 1}),
    "mistral4": Tiny(
        "mistral4",
        {
            **DEEPSEEK2,
            "first_k_dense_replace": 0,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": 28,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.4,
            "rope_parameters": {
                "rope_theta": 1000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "minicpm3": Tiny(
        "minicpm3",
        {
            **LATENT,
            "q_lora_rank": 28,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.4],
                "long_factor": [1.2, 2.1, 3.5, 6.0],
                "original_max_position_embeddings": 48,
            },
        },
    ),
    "gpt2_tanh": Tiny("gpt2", {"activation_function": "gelu_new"}),
    "gpt2_erf": Tiny("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 80}, seed=4),
}


OWN = ("openlm", "deepseek")  # families that are modules here, since transformers has no class of them


def own(family: str) -> Any:
    """The module with its layers, which needs torch."""
    return importlib.import_module(family)


def build(name: str) -> Any:
    """The model, seeded, on the CPU in float32."""
    import torch
    import transformers

    tiny = MODELS[name]
    if tiny.family in OWN:
        model = own(tiny.family).Model().eval()
    else:
        kind = getattr(transformers, CLASSES[tiny.family])
        config = kind.config_class(**(BASES.get(tiny.family, SMALL) | tiny.changes))
        config._attn_implementation = "eager"
        model = kind(config).eval()
    random = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=random)
            if "norm" in key or ".ln_" in key:
                value.copy_(0.2 * noise + (0 if key.endswith("bias") or tiny.family in ("gemma", "gemma2") else 1))
            elif key.endswith("bias"):
                value.copy_(0.5 * noise)
            elif tiny.family == "gpt_oss" and key.endswith(("gate_up_proj", "sinks")):
                value.copy_(noise)  # so that what is clamped, and what sinks take, is some of all
            else:
                value.copy_(0.2 * noise)
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.copy_(0.2 * torch.randn(value.shape, generator=random))
            if key.endswith("layer_scalar"):
                value.copy_(1 + 0.3 * torch.randn(value.shape, generator=random))
    return model


def as_ternary(model: Any) -> Any:
    """As BitNet b1.58 (Ma et al., 2024) multiplies, without rounding what is multiplied."""
    import torch

    with torch.no_grad():
        for key, value in model.named_parameters():
            if "_proj" in key:
                scale = value.abs().mean().clamp(min=1e-5)
                value.copy_((value / scale).round().clamp(-1, 1) * scale)
    return model


def save(name: str, directory: Path) -> None:
    """Writes config.json and the weights as Hugging Face does."""
    import torch

    tiny = MODELS[name]
    if tiny.family in OWN:
        own(tiny.family).save(build(name), directory)
        return
    build(name).to(getattr(torch, tiny.dtype)).save_pretrained(directory, max_shard_size=tiny.shard_size)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if tiny.rewrite is not None:
        config = json.loads((directory / "config.json").read_text())
        tiny.rewrite(config)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def golden(name: str, directory: Path, suffix: str, seed: int = 1) -> dict[str, Any]:
    """float32 logits of Hugging Face: of a whole prompt, then of N_DECODE tokens one at a time over its cache."""
    import torch
    import transformers

    n_prompt, n_ctx = MODELS[name].prompts[suffix]
    if MODELS[name].family in OWN:
        ids = torch.randint(3, 101, (n_prompt + N_DECODE,), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = build(name)(ids).numpy()
        return {
            "ids": ids.numpy().astype(np.int32),
            "n_ctx": n_ctx,
            "prefill": logits[:n_prompt],
            "decode": logits[n_prompt:],
        }
    if MODELS[name].stands_in:
        model = build(name)
    elif MODELS[name].ternary:
        model = as_ternary(build(name))
    else:
        kind = getattr(transformers, CLASSES[MODELS[name].family])  # that of Mistral 4 has no Auto class
        model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, n_prompt + N_DECODE), generator=random)
    with torch.no_grad():
        out = model(ids[:, :n_prompt], use_cache=True)
        prefill, steps = out.logits[0].numpy(), []
        for i in range(n_prompt, n_prompt + N_DECODE):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits[0, -1].numpy())
    return {"ids": ids[0].numpy().astype(np.int32), "n_ctx": n_ctx, "prefill": prefill, "decode": np.stack(steps)}
