# SPDX-License-Identifier: Apache-2.0
"""Decoders with LayerNorm and a plain FFN, in GPT's way: BLOOM, MPT and OPT, as families.py has the others."""

from __future__ import annotations

from typing import Any

from slimrt.errors import UnsupportedError
from slimrt.modelfile.hf.families import GELU, GPT_NEOX
from slimrt.modelfile.hf.family import ALWAYS, Family


def _bloom(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Its FFN is always four times as wide; the first configurations write n_embed."""
    width = values.get("hidden_size") or values.get("n_embed")
    return family, {**values, "hidden_size": width, "intermediate_size": width and 4 * width}


def _mpt(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Keys of attn_config beside the others, and what of them is refused."""
    attention = {"alibi": True, "alibi_bias_max": 8, **(values.get("attn_config") or {})}
    heads = values.get("num_attention_heads")
    usual = {"alibi": (True,), "qk_ln": (False, None), "prefix_lm": (False, None), "softmax_scale": (None,),
             "attn_type": ("multihead_attention", None), "kv_n_heads": (heads, None)}  # fmt: skip
    for key, allowed in usual.items():
        if attention.get(key) not in allowed:
            raise UnsupportedError(f"config.json: attn_config's {key} = {attention[key]!r} is not supported for MPT")
    width, ratio = values.get("hidden_size"), values.get("expansion_ratio", 4)
    scales = {key: attention.get(key) for key in ("clip_qkv", "alibi_bias_max")}
    return family, {**values, **scales, "intermediate_size": width and ratio and int(width * ratio)}


BLOOM = Family(
    arch="bloom",
    stem="transformer.",
    block="h.{}.",
    outside={
        "token_embd": ("word_embeddings", "v d"),
        "token_embd_norm": ("word_embeddings_layernorm", "d"),
        "output_norm": ("ln_f", "d"),
    },
    layer={
        name: (module.replace("attention.", "self_attention.") if name.startswith("attn_") else module, shape)
        for name, (module, shape) in GPT_NEOX.layer.items()
    },
    biases={ALWAYS: ("token_embd_norm", *GPT_NEOX.biases[ALWAYS])},
    spelling={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
    },
    defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
    only={"apply_residual_connection_post_layernorm": (False,)},
    norm_eps=("layer_norm_epsilon", "layer_norm_epsilon"),
    rope=False,
    by_head=("attn_qkv",),
    settle=_bloom,
)

MPT = Family(
    arch="mpt",
    stem="transformer.",
    block="blocks.{}.",
    outside={"token_embd": ("wte", "v d"), "output_norm": ("norm_f", "d")},
    layer={
        "attn_norm": ("norm_1", "d"),
        "attn_qkv": ("attn.Wqkv", "qkv d"),
        "attn_output": ("attn.out_proj", "d q"),
        "ffn_norm": ("norm_2", "d"),
        "ffn_up": ("ffn.up_proj", "ff d"),
        "ffn_down": ("ffn.down_proj", "d ff"),
    },
    spelling={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",  # never written
    },
    only={
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm",),
        "logit_scale": (None,),
        "hidden_act": tuple(GELU),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_epsilon"),
    activation="hidden_act",
    rope=False,
    scales={"attention.clamp_kqv": "clip_qkv", "attention.max_alibi_bias": "alibi_bias_max"},
    settle=_mpt,
)

OPT = Family(
    arch="opt",
    stem="model.decoder.",
    block="layers.{}.",
    outside={
        "token_embd": ("embed_tokens", "v d"),
        "position_embd": ("embed_positions", "ctx d"),
        "output_norm": ("final_layer_norm", "d"),
    },
    layer={
        "attn_norm": ("self_attn_layer_norm", "d"),
        "attn_q": ("self_attn.q_proj", "q d"),
        "attn_k": ("self_attn.k_proj", "kv d"),
        "attn_v": ("self_attn.v_proj", "kv d"),
        "attn_output": ("self_attn.out_proj", "d q"),
        "ffn_norm": ("final_layer_norm", "d"),
        "ffn_up": ("fc1", "ff d"),
        "ffn_down": ("fc2", "d ff"),
    },
    biases={
        ALWAYS: (
            *("output_norm", "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_norm", "ffn_up", "ffn_down"),
        )
    },
    spelling={"intermediate_size": "ffn_dim"},
    defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    only={
        "activation_function": ("relu",),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "layer_norm_eps": (1e-5,),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),  # not in the config: always the same
    rope=False,
    equal=(("word_embed_proj_dim", "hidden_size"),),
    unused_rows={"position_embd": 2},
)

GPT_FAMILIES = {"bloom": BLOOM, "mpt": MPT, "opt": OPT}
