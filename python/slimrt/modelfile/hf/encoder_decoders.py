# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face model types with an encoder, as data: T5 and its kin, Whisper, Moonshine.

GGUF's names are those of llama.cpp's "t5"; "whisper" and "moonshine" have no other GGUF layout and follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slimrt.errors import UnsupportedError
from slimrt.modelfile.hf.families import ACTIVATIONS
from slimrt.modelfile.hf.family import ALWAYS, Family, Stack
from slimrt.modelfile.hf.seq2seq_fields import chronos_fields, whisper_fields

BOLT = "ChronosBoltModelForForecasting"
DECODER_LAYERS = ("num_decoder_layers", "num_hidden_layers")


def _t5_attention(block: int, theirs: str, cross: str = "") -> dict[str, tuple[str, str]]:
    """The norm and the four matrices of one of a T5 layer's attentions."""
    names = {"q": "q d", "k": "kv d", "v": "kv d", "o": "d q"}
    return {f"{cross}attn_norm": (f"layer.{block}.layer_norm", "d")} | {
        f"{cross}attn_{name}": (f"layer.{block}.{theirs}.{name}", shape) for name, shape in names.items()
    }


def _t5_stacks(*, gated: bool) -> tuple[Stack, ...]:
    """v1.0 has one matrix before the activation, v1.1 two (T5 v1.1: Shazeer, "GLU Variants Improve Transformer")."""
    bias = {"attn_rel_b": ("layer.0.SelfAttention.relative_attention_bias", "buckets heads")}

    def ffn(block: int) -> dict[str, tuple[str, str]]:
        inner = {"ffn_gate": "wi_0", "ffn_up": "wi_1"} if gated else {"ffn_up": "wi"}
        prefix = f"layer.{block}.DenseReluDense."
        made = {"ffn_norm": (f"layer.{block}.layer_norm", "d")}
        made |= {module: (prefix + theirs, "ff d") for module, theirs in inner.items()}
        return made | {"ffn_down": (f"{prefix}wo", "d ff")}

    encoder = _t5_attention(0, "SelfAttention") | bias | ffn(1)
    decoder = _t5_attention(0, "SelfAttention") | bias | _t5_attention(1, "EncDecAttention", "cross_") | ffn(2)
    return (
        Stack("enc.blk.{}.", "encoder.block.{}.", encoder, only_first=("attn_rel_b",)),
        Stack("dec.blk.{}.", "decoder.block.{}.", decoder, DECODER_LAYERS, only_first=("attn_rel_b",)),
    )


def _settle_t5(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Reads feed_forward_proj, than which dense_act_fn counts more (transformers writes both), what transformers 4 and
    5 say of the head, and whether it is Chronos-Bolt.

    The head's input is scaled by d^-0.5 where it is tied. Transformers 4 says with tie_word_embeddings whether it is;
    5 always writes true there, and keeps what that once meant in scale_decoder_outputs.
    """
    projection = values["feed_forward_proj"]
    gated, activation = projection.startswith("gated-"), projection.removeprefix("gated-")
    act = values.get("dense_act_fn") or ("gelu_new" if projection == "gated-gelu" else activation)
    allowed = tuple(ACTIVATIONS) if gated else ("relu",)
    if act not in allowed:
        raise UnsupportedError(
            f"config.json: dense_act_fn = {act!r} is not supported beside feed_forward_proj = {projection!r}; "
            f"supported: {', '.join(allowed)}"
        )
    values["hidden_act"] = act
    values["max_position_embeddings"] = max(512, values.get("max_position_embeddings") or 0)
    scaled = values.get("scale_decoder_outputs")
    values["tie_word_embeddings"] = values.get("tie_word_embeddings") is not False if scaled is None else bool(scaled)
    if gated:
        per_layer = not family.several[0].only_first
        stacks = _t5_stacks(gated=True)
        family = replace(family, several=_every_layer(stacks) if per_layer else stacks)
    if BOLT in (values.get("architectures") or ()):
        family = replace(
            family, head="", outside={**family.outside, **_BOLT}, symbols={**family.symbols, **BLOCK_SIZES}
        )
        values |= _bolt_sizes(values)
    return family, values


def _settle_mt5(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """As T5, but the head's input is never scaled: published mT5 have untied heads, and transformers 5 ties without."""
    family, values = _settle_t5(family, values)
    return family, values | {"tie_word_embeddings": False}


def _every_layer(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """With a position bias in every layer."""
    return tuple(replace(stack, only_first=()) for stack in stacks)


# Chronos-Bolt and Chronos-2 read patches of series and write quantiles of patches, each through a residual block.
_BLOCK = {"hidden": ("hidden_layer", "{inner} {source}"), "output": ("output_layer", "{target} {inner}"),
          "residual": ("residual_layer", "{target} {source}")}  # fmt: skip
_BLOCKS = {
    "input": ("input_patch_embedding", {"inner": "ff", "source": "patch", "target": "d"}),
    "output": ("output_patch_embedding", {"inner": "ff", "source": "d", "target": "outputs"}),
}
BLOCK_SIZES = {"patch": "outer_inputs", "outputs": "outer_outputs"}
"""The symbols of outer_blocks()."""


def outer_blocks(model: str) -> dict[str, tuple[str, str]]:
    """The matrices of both blocks, as Family.outside has them; model: "bolt" or "chronos2"."""
    return {
        f"slimrt.{model}.{side}.{part}": (f"{theirs}.{name}", shape.format(**sizes))
        for side, (theirs, sizes) in _BLOCKS.items()
        for part, (name, shape) in _BLOCK.items()
    }


_BOLT = outer_blocks("bolt")


def _bolt_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Widths that config.json does not say outright: a patch and its mask; all quantiles of all steps."""
    chronos = values.get("chronos_config") or {}
    patch, steps = chronos.get("input_patch_size"), chronos.get("prediction_length")
    quantiles = chronos.get("quantiles")
    return {
        "outer_inputs": 2 * patch if isinstance(patch, int) else None,
        "outer_outputs": steps * len(quantiles) if isinstance(steps, int) and isinstance(quantiles, list) else None,
    }


T5_SPELLING = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
}

T5 = Family(
    arch="t5",
    stem="",
    outside={
        "token_embd": ("shared", "v d"),
        "enc.output_norm": ("encoder.final_layer_norm", "d"),
        "dec.output_norm": ("decoder.final_layer_norm", "d"),
    },
    several=_t5_stacks(gated=False),
    biases={ALWAYS: tuple(_BOLT)},
    spelling={**T5_SPELLING, "max_position_embeddings": "n_positions"},
    defaults={
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "decoder_start_token_id": 0,
    },
    only={
        "feed_forward_proj": ("relu", "gated-gelu", "gated-relu", "gated-silu"),
        "is_encoder_decoder": (True,),
    },
    norm_eps=("layer_norm_rms_epsilon", "layer_norm_epsilon"),
    activation="hidden_act",
    rope=False,
    # t5-small and its siblings hold a bias that cross attention never had.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    symbols={"buckets": "relative_attention_num_buckets"},
    numbers={
        "decoder_start_token_id": "decoder_start_token_id",
        "attention.relative_buckets_count": "relative_attention_num_buckets",
        "attention.relative_max_distance": "relative_attention_max_distance",
    },
    copies=("encoder.embed_tokens", "decoder.embed_tokens"),
    float32=("attn_rel_b", *_BOLT),
    head_or_embedding=True,
    settle=_settle_t5,
    extra=chronos_fields,
)

MT5 = replace(T5, defaults={**T5.defaults, "feed_forward_proj": "gated-gelu"}, settle=_settle_mt5)

UMT5 = replace(
    T5,
    several=_every_layer(T5.several),
    defaults={**T5.defaults, "feed_forward_proj": "gated-gelu"},
)


def projections(theirs: str, out: str, cross: str = "") -> dict[str, tuple[str, str]]:
    """The matrices of one attention, as most of transformers calls them."""
    names = {"q": ("q_proj", "q d"), "k": ("k_proj", "kv d"), "v": ("v_proj", "kv d"), "o": (out, "d q")}
    return {f"{cross}attn_{name}": (f"{theirs}.{name_}", shape) for name, (name_, shape) in names.items()}


_WHISPER_SELF = {"attn_norm": ("self_attn_layer_norm", "d"), **projections("self_attn", "out_proj")}
_WHISPER_CROSS = {
    "cross_attn_norm": ("encoder_attn_layer_norm", "d"),
    **projections("encoder_attn", "out_proj", "cross_"),
}
_WHISPER_FFN = {"ffn_norm": ("final_layer_norm", "d"), "ffn_up": ("fc1", "ff d"), "ffn_down": ("fc2", "d ff")}
_NORMS = ("output_norm", "attn_norm", "cross_attn_norm", "ffn_norm")

SPELLING = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""Of Whisper's and BART's keys."""

WHISPER = Family(
    arch="whisper",
    stem="model.",
    outside={
        "enc.conv1": ("encoder.conv1", "d mels 3"),
        "enc.conv2": ("encoder.conv2", "d d 3"),
        "enc.position_embd": ("encoder.embed_positions", "source d"),
        "enc.output_norm": ("encoder.layer_norm", "d"),
        "token_embd": ("decoder.embed_tokens", "v d"),
        "dec.position_embd": ("decoder.embed_positions", "ctx d"),
        "dec.output_norm": ("decoder.layer_norm", "d"),
    },
    several=(
        Stack("enc.blk.{}.", "encoder.layers.{}.", _WHISPER_SELF | _WHISPER_FFN),
        Stack("dec.blk.{}.", "decoder.layers.{}.", _WHISPER_SELF | _WHISPER_CROSS | _WHISPER_FFN, DECODER_LAYERS),
    ),
    biases={
        ALWAYS: (
            *("conv1", "conv2", *_NORMS, "attn_q", "attn_v", "attn_o"),
            *("cross_attn_q", "cross_attn_v", "cross_attn_o", "ffn_up", "ffn_down"),
        )
    },
    spelling={**SPELLING, "max_position_embeddings": "max_target_positions"},
    defaults={
        "activation_function": "gelu",
        "layer_norm_eps": 1e-5,  # PyTorch's; no config says it
        "tie_word_embeddings": True,
        "max_position_embeddings": 448,
        "max_source_positions": 1500,
        "num_mel_bins": 80,
        "decoder_start_token_id": 50257,
    },
    only={"activation_function": ("gelu",), "scale_embedding": (False,), "layer_norm_eps": (1e-5,)},
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    head="proj_out",
    activation="activation_function",
    rope=False,
    symbols={"mels": "num_mel_bins", "source": "max_source_positions"},
    numbers={
        "decoder_start_token_id": "decoder_start_token_id",
        "encoder.context_length": "max_source_positions",
        "mel_bins": "num_mel_bins",
    },
    equal=(("num_attention_heads", "decoder_attention_heads"), ("intermediate_size", "decoder_ffn_dim")),
    convolutions=("conv1", "conv2"),
    float32=("position_embd", "conv1", "conv2"),
    extra=whisper_fields,
)

_MOONSHINE_SELF = {"attn_norm": ("input_layernorm", "d"), **projections("self_attn", "o_proj")}

# RoPE turns neighbours (2 i, 2 i + 1) of a head's first dimensions, as GGUF's "llama" has them: no row moves.
MOONSHINE = Family(
    arch="moonshine",
    stem="model.",
    outside={
        "enc.conv1": ("encoder.conv1", "d 1 127"),
        "enc.conv_norm": ("encoder.groupnorm", "d"),
        "enc.conv2": ("encoder.conv2", "2d d 7"),
        "enc.conv3": ("encoder.conv3", "d 2d 3"),
        "enc.output_norm": ("encoder.layer_norm", "d"),
        "token_embd": ("decoder.embed_tokens", "v d"),
        "dec.output_norm": ("decoder.norm", "d"),
    },
    several=(
        Stack(
            "enc.blk.{}.",
            "encoder.layers.{}.",
            {
                **_MOONSHINE_SELF,
                "ffn_norm": ("post_attention_layernorm", "d"),
                "ffn_up": ("mlp.fc1", "ff d"),
                "ffn_down": ("mlp.fc2", "d ff"),
            },
        ),
        Stack(
            "dec.blk.{}.",
            "decoder.layers.{}.",
            {
                **_MOONSHINE_SELF,
                "cross_attn_norm": ("post_attention_layernorm", "d"),
                **projections("encoder_attn", "o_proj", "cross_"),
                "ffn_norm": ("final_layernorm", "d"),
                "ffn_up": ("mlp.fc1", "ff d"),
                "ffn_gate": ("mlp.fc1", "ff d"),
                "ffn_down": ("mlp.fc2", "d ff"),
            },
            DECODER_LAYERS,
            halves={"ffn_up": 0, "ffn_gate": 1},
        ),
    ),
    biases={ALWAYS: ("conv_norm", "conv2", "conv3", "ffn_up", "ffn_gate", "ffn_down")},
    spelling={
        "num_hidden_layers": "encoder_num_hidden_layers",
        "num_decoder_layers": "decoder_num_hidden_layers",
        "num_attention_heads": "encoder_num_attention_heads",
        "num_key_value_heads": "encoder_num_key_value_heads",
    },
    defaults={
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "partial_rotary_factor": 0.9,
        "layer_norm_eps": 1e-5,  # PyTorch's; no config says it
        "encoder_hidden_act": "gelu",
        "decoder_hidden_act": "silu",
        "decoder_start_token_id": 1,
    },
    only={
        "encoder_hidden_act": ("gelu",),
        "decoder_hidden_act": ("silu",),
        "attention_bias": (False,),
        "layer_norm_eps": (1e-5,),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    head="proj_out",
    numbers={"decoder_start_token_id": "decoder_start_token_id"},
    equal=(
        ("num_attention_heads", "decoder_num_attention_heads"),
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "decoder_num_key_value_heads"),
    ),
    convolutions=("conv1", "conv2", "conv3"),
    float32=("conv1", "conv2", "conv3"),
)

ENCODER_DECODERS: dict[str, Family] = {"t5": T5, "mt5": MT5, "umt5": UMT5, "whisper": WHISPER, "moonshine": MOONSHINE}
