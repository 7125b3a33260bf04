# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face model type is called and how it is laid out: one block a family, in family.py's terms.

Encoder-decoders are in encoder_decoders.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slimrt.modelfile.hf.family import ALWAYS, Family

LLAMA_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}

# The one thing GGUF has no key for where an architecture is used with several: config value -> slimrt.activation.
GELU = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
ACTIVATIONS = {**GELU, "relu": "relu", "relu2": "relu_squared", "silu": "silu", "swish": "silu"}


def _cla(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Cross-layer attention in Llama's layout, with the config keys of Hunyuan."""
    return (replace(family, sharing="cla") if values.get("use_cla") else family), values


def _mlkv(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """MLKV's GPT-NeoX (Zuhri et al., 2024): heads and layers may share K and V, and projections are three."""
    if values.get("num_key_value_layers") is None and values.get("num_key_value_heads") is None:
        return family, values
    parts = {part: (f"attention.{name}", "q d" if part == "attn_q" else "kv d") for part, name in _QKV.items()}
    layer = parts | {name: module for name, module in family.layer.items() if name != "attn_qkv"}
    biases = {key: (*parts, *(name for name in names if name != "attn_qkv")) for key, names in family.biases.items()}
    return replace(family, sharing="mlkv", layer=layer, biases=biases, by_head=()), values


_QKV = {"attn_q": "query", "attn_k": "key", "attn_v": "value"}

LLAMA = Family(
    arch="llama",
    stem="model.",
    block="layers.{}.",
    outside={"token_embd": ("embed_tokens", "v d"), "output_norm": ("norm", "d")},
    layer={
        "attn_norm": ("input_layernorm", "d"),
        "attn_q": ("self_attn.q_proj", "q d"),
        "attn_k": ("self_attn.k_proj", "kv d"),
        "attn_v": ("self_attn.v_proj", "kv d"),
        "attn_output": ("self_attn.o_proj", "d q"),
        "ffn_norm": ("post_attention_layernorm", "d"),
        "ffn_gate": ("mlp.gate_proj", "ff d"),
        "ffn_up": ("mlp.up_proj", "ff d"),
        "ffn_down": ("mlp.down_proj", "d ff"),
    },
    biases=LLAMA_BIASES,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    only={"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)},
    permuted=("attn_q", "attn_k"),
    settle=_cla,
)

MISTRAL = replace(
    LLAMA,
    biases={},
    defaults={**LLAMA.defaults, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    window=True,
)

QWEN2 = replace(
    LLAMA,
    arch="qwen2",
    biases={ALWAYS: ("attn_q", "attn_k", "attn_v")},
    defaults={**LLAMA.defaults, "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28},
    permuted=(),
    window=False,
)

PHI3 = replace(
    LLAMA,
    arch="phi3",
    layer={
        "attn_norm": ("input_layernorm", "d"),
        "attn_qkv": ("self_attn.qkv_proj", "qkv d"),
        "attn_output": ("self_attn.o_proj", "d q"),
        "ffn_norm": ("post_attention_layernorm", "d"),
        "ffn_up": ("mlp.gate_up_proj", "2ff d"),
        "ffn_down": ("mlp.down_proj", "d ff"),
    },
    biases={},
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
    only={"hidden_act": ("silu", "swish"), "use_cla": (False,)},
    rope_aliases={"yarn": "longrope"},  # as transformers reads the first Phi-3 configurations
    permuted=(),
    window=True,
)

OLMO2 = replace(
    LLAMA,
    arch="olmo2",
    layer={
        "attn_q": ("self_attn.q_proj", "q d"),
        "attn_k": ("self_attn.k_proj", "kv d"),
        "attn_v": ("self_attn.v_proj", "kv d"),
        "attn_q_norm": ("self_attn.q_norm", "q"),
        "attn_k_norm": ("self_attn.k_norm", "kv"),
        "attn_output": ("self_attn.o_proj", "d q"),
        "post_attention_norm": ("post_attention_layernorm", "d"),
        "ffn_gate": ("mlp.gate_proj", "ff d"),
        "ffn_up": ("mlp.up_proj", "ff d"),
        "ffn_down": ("mlp.down_proj", "d ff"),
        "post_ffw_norm": ("post_feedforward_layernorm", "d"),
    },
    biases={},
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    only={**LLAMA.only, "attention_bias": (False,), "use_cla": (False,)},
    permuted=(),
)

GPT_NEOX = Family(
    arch="gptneox",
    stem="gpt_neox.",
    block="layers.{}.",
    outside={"token_embd": ("embed_in", "v d"), "output_norm": ("final_layer_norm", "d")},
    layer={
        "attn_norm": ("input_layernorm", "d"),
        "attn_qkv": ("attention.query_key_value", "qkv d"),
        "attn_output": ("attention.dense", "d q"),
        "ffn_norm": ("post_attention_layernorm", "d"),
        "ffn_up": ("mlp.dense_h_to_4h", "ff d"),
        "ffn_down": ("mlp.dense_4h_to_h", "d ff"),
    },
    biases={
        ALWAYS: ("output_norm", "attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    },
    spelling={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    only={
        "hidden_act": tuple(GELU),
        "attention_bias": (True,),
        "use_parallel_residual": (True, False),
        "use_key_value_mlp": (False,),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    head="embed_out",
    activation="hidden_act",
    flags={"use_parallel_residual": "use_parallel_residual"},
    by_head=("attn_qkv",),
    ignored=(r".*rotary_emb\.inv_freq", r".*attention\.(masked_)?bias"),
    settle=_mlkv,
)

PHI = Family(
    arch="phi2",
    stem="model.",
    block="layers.{}.",
    outside={"token_embd": ("embed_tokens", "v d"), "output_norm": ("final_layernorm", "d")},
    layer={
        "attn_norm": ("input_layernorm", "d"),
        "attn_q": ("self_attn.q_proj", "q d"),
        "attn_k": ("self_attn.k_proj", "kv d"),
        "attn_v": ("self_attn.v_proj", "kv d"),
        "attn_output": ("self_attn.dense", "d q"),
        "ffn_up": ("mlp.fc1", "ff d"),
        "ffn_down": ("mlp.fc2", "d ff"),
    },
    biases={
        ALWAYS: (
            "output_norm",
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_up",
            "ffn_down",
            "output",
        ),
    },
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    },
    only={"hidden_act": tuple(GELU), "qk_layernorm": (False,)},
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    activation="hidden_act",
)

GPT2 = Family(
    arch="gpt2",
    stem="transformer.",
    block="h.{}.",
    outside={
        "token_embd": ("wte", "v d"),
        "position_embd": ("wpe", "ctx d"),
        "output_norm": ("ln_f", "d"),
    },
    layer={
        "attn_norm": ("ln_1", "d"),
        "attn_qkv": ("attn.c_attn", "qkv d"),
        "attn_output": ("attn.c_proj", "d d"),
        "ffn_norm": ("ln_2", "d"),
        "ffn_up": ("mlp.c_fc", "ff d"),
        "ffn_down": ("mlp.c_proj", "d ff"),
    },
    biases={
        ALWAYS: ("output_norm", "attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    },
    spelling={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    only={
        "activation_function": tuple(GELU),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_epsilon"),
    activation="activation_function",
    rope=False,
    conv1d=True,
    ignored=(r".*attn\.(masked_)?bias",),
)

# By Hugging Face model_type. Vicuna, CodeLlama, OpenLLaMA and SmolLM2 call themselves "llama"; Pythia, Dolly 2 and
# RedPajama "gpt_neox"; Phi-1, 1.5 and 2 "phi".
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "phi3": PHI3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "phi": PHI,
    "olmo2": OLMO2,
}
