# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face model type is called and how it is laid out, as data: one block a family.

Shapes are written in symbols: d (width of the model), q (of all query heads), kv (of all key heads), dk (of a head),
qkv (q + 2 kv), ff (of the feed-forward network), 2d, 2ff, v (vocabulary), ctx (positions), heads, numbers, and what a
family adds.
Encoder-decoders are in encoder_decoders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from gguf.gguf_writer import GGUFValue

from slimrt.modelfile.hf.safetensors_files import Entry

ALWAYS = ""  # in place of a config key: the biases do not depend on the config
LLAMA_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}


class Source(Protocol):
    """Tensors of a model by the names that they were saved under (`safetensors_files.Checkpoint`)."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def elements(self, name: str) -> np.ndarray:
        """Elements [shape], bfloat16 as its bits; of a quantised type its bytes, uint8 [..., bytes of a row]."""
        ...


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one on the other.

    Attributes:
        prefix: what GGUF calls a layer, with a place for its number.
        block: what the Hugging Face names of a layer's tensors begin with, after the stem.
        layer: GGUF module -> (Hugging Face module, shape of its weight), after the prefix; a module with a place for a
            number is one of each expert (symbol "experts"). What ends with ".weight" or ".bias" is one tensor, whose
            Hugging Face name is written out.
        count: config keys of the number of layers, in the usual spelling; the first that is set.
        only_first: modules that layer 0 alone has.
        halves: modules that are half of their Hugging Face module's rows: 0 the upper half, 1 the lower.
    """

    prefix: str
    block: str
    layer: Mapping[str, tuple[str, str]]
    count: tuple[str, ...] = ("num_hidden_layers",)
    only_first: tuple[str, ...] = ()
    halves: Mapping[str, int] = field(default_factory=dict)


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
        head: the output matrix's module, beside the stem.
        activation: config key of the activation, where GGUF's architecture leaves it open.
        flags: GGUF key of a true or false -> config key.
        rope: positions are rotary.
        rope_aliases: other names this family has for a RoPE scaling.
        permuted: modules whose rows GGUF reorders, so that the two halves of a RoPE pair are neighbours.
        norms_less_one: the weights of norms are stored less one, which GGUF adds.
        ternary: modules whose weights run as one of -1, 0 and 1 times their mean size, and become that.
        by_head: modules of q, k, v whose rows are q | k | v in each head, which GGUF puts in order q | k | v.
        latent_parts: modules of K and V of a latent, which are one in each head of their Hugging Face module (of symbol
            "kvb" rows): K's rows, which GGUF turns, then V's.
        conv1d: the layers' matrices are stored [in, out].
        window: whether the runtime honours the model type's sliding window (None: the model type has none).
        window_rope: layers with a window turn q and k by parameters of their own.
        window_pattern: files always say which layers have one.
        lacking: modules that some layers do not have -> these layers.
        ignored: tensors (regular expressions) that are computed, not learned.
        leading: config key of how many first layers have `leading_layer` in place of `layer`.
        several: the stacks of layers, in place of `block` and `layer`, where there is more than one.
        symbols: further symbols of shapes -> config keys.
        numbers: further keys of GGUF -> config keys. scales: the same of numbers with a fraction, where they are not 0.
        of_generation: keys that generation_config.json may say in place of config.json, as it may those of numbers.
        equal: pairs of config keys that must agree, since GGUF has one key for both.
        copies: modules that are the token embedding again, where they are stored.
        unused_rows: modules whose first rows, so many, are never read.
        convolutions: modules whose weight [out, in, taps] becomes [out, taps * in], tap after tap.
        float32: modules whose weights are small, and never multiplied as a stored matrix.
        head_or_embedding: an untied head that is not stored is the token embedding.
        head_decides: what is stored says whether the head is tied, not the config.
        sharing: how layers share K and V, a key of `SHARING`; "": they do not.
        settle: the family and config values to use, where the layout depends on the config's.
        packed: what quantization_config may call weights that `stored` unpacks.
        stored: what the files hold -> the same tensors as `layer` names them.
        extra: config values, and those of generation_config.json -> what GGUF has no key for.
    """

    arch: str
    stem: str
    outside: Mapping[str, tuple[str, str]]
    block: str = ""
    layer: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    norm_eps: tuple[str, str] = ("layer_norm_rms_epsilon", "rms_norm_eps")
    head: str = "lm_head"
    activation: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    rope: bool = True
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    permuted: tuple[str, ...] = ()
    norms_less_one: bool = False
    ternary: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()
    latent_parts: tuple[str, ...] = ()
    conv1d: bool = False
    window: bool | None = None
    window_rope: bool = False
    window_pattern: bool = False
    lacking: Mapping[str, Collection[int]] = field(default_factory=dict)
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    leading: str = ""
    leading_layer: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    several: tuple[Stack, ...] = ()
    symbols: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    of_generation: tuple[str, ...] = ()
    equal: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()
    unused_rows: Mapping[str, int] = field(default_factory=dict)
    convolutions: tuple[str, ...] = ()
    float32: tuple[str, ...] = ("position_embd",)
    head_or_embedding: bool = False
    head_decides: bool = False
    sharing: str = ""
    settle: Callable[[Family, dict[str, Any]], tuple[Family, dict[str, Any]]] | None = None
    packed: tuple[str, ...] = ()
    stored: Callable[[Source], Source] | None = None
    extra: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, GGUFValue]] | None = None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of layers: of a decoder alone, one."""
        return self.several or (Stack("blk.{}.", self.block, self.layer),)


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
