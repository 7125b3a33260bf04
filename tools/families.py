# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face model type is called and how it is laid out, as data: one block a family.

Shapes are written in symbols: d (width of the model), q (of all query heads), kv (of all key heads), qkv (q + 2 kv),
ff (of the feed-forward network), 2ff, v (vocabulary), ctx (positions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ALWAYS = ""  # in place of a config key: the biases do not depend on the config
LLAMA_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type.

    Attributes:
        arch: GGUF architecture.
        stem: what the names of all tensors but the head begin with (a bare model leaves it out).
        block: what the names of a layer's tensors begin with, after the stem.
        outside: GGUF module -> (Hugging Face module, shape of its weight), outside the layers.
        layer: the same in each layer, after `blk.N.`.
        biases: config key -> modules that have a bias when it is true (ALWAYS: they do).
        spelling: the usual name of a config key -> this family's.
        defaults: what the model type means by a config key that is left out or, for sizes, null.
        only: config key -> the values that are supported.
        norm_eps: GGUF key, config key.
        rope: positions are rotary.
        rope_aliases: other names this family has for a RoPE scaling.
        permuted: modules whose rows GGUF reorders, so that the two halves of a RoPE pair are neighbours.
        conv1d: the layers' matrices are stored [in, out].
        window: whether the runtime honours the model type's sliding window (None: the model type has none).
        ignored: tensors (regular expressions) that are computed, not learned.
    """

    arch: str
    stem: str
    block: str
    outside: Mapping[str, tuple[str, str]]
    layer: Mapping[str, tuple[str, str]]
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    norm_eps: tuple[str, str] = ("layer_norm_rms_epsilon", "rms_norm_eps")
    rope: bool = True
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    permuted: tuple[str, ...] = ()
    conv1d: bool = False
    window: bool | None = None
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)


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
    only={"hidden_act": ("silu", "swish")},
    rope_aliases={"yarn": "longrope"},  # as transformers reads the first Phi-3 configurations
    permuted=(),
    window=True,
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
        "activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_epsilon"),
    rope=False,
    conv1d=True,
    ignored=(r".*attn\.(masked_)?bias",),
)

# GPT-2's activation is the one thing GGUF has no key for.
GELU = {"gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}

# By Hugging Face model_type. Vicuna, CodeLlama, OpenLLaMA and SmolLM2 call themselves "llama".
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "phi3": PHI3,
    "gpt2": GPT2,
}
