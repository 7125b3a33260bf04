# SPDX-License-Identifier: Apache-2.0
"""Chronos-2 (Ansari et al. 2025): an encoder alone, whose layers attend in time and then among the series of a group.
Published with model type "t5" and a class of its own."""

from __future__ import annotations

from typing import Any

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.encoder_decoders import BLOCK_SIZES, T5_SPELLING, outer_blocks
from slimrt.modelfile.hf.family import ALWAYS, Family, Stack
from slimrt.modelfile.hf.seq2seq_fields import CHRONOS2_CLASS, chronos_fields


def _attention(block: int, prefix: str) -> dict[str, tuple[str, str]]:
    names = {"q": "q d", "k": "kv d", "v": "kv d", "o": "d q"}
    return {f"{prefix}attn_norm": (f"layer.{block}.layer_norm", "d")} | {
        f"{prefix}attn_{name}": (f"layer.{block}.self_attention.{name}", shape) for name, shape in names.items()
    }


_LAYER = {
    **_attention(0, ""),
    **_attention(1, "group_"),
    "ffn_norm": ("layer.2.layer_norm", "d"),
    "ffn_up": ("layer.2.mlp.wi", "ff d"),
    "ffn_down": ("layer.2.mlp.wo", "d ff"),
}
_BLOCKS = outer_blocks("chronos2")


def _settle(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Adds sizes that config.json does not say outright: of a patch with its times and mask, of all quantiles of a
    patch, and of the rows of one series.

    Raises:
        ModelFormatError: what they follow from is not there.
        UnsupportedError: what chronos-forecasting does not run, or patches that overlap.
    """
    chronos = values.get("chronos_config")
    chronos = chronos if isinstance(chronos, dict) else {}
    sizes: list[Any] = [chronos.get(key) for key in ("input_patch_size", "context_length", "max_output_patches")]
    quantiles = chronos.get("quantiles")
    if not all(type(size) is int and 0 < size < 2**24 for size in sizes) or not isinstance(quantiles, list):
        raise ModelFormatError(
            "config.json: chronos_config says no input_patch_size, context_length, max_output_patches or quantiles"
        )
    patch, context, most = sizes
    for key, only in (("input_patch_stride", patch), ("output_patch_size", patch), ("use_reg_token", True)):
        if chronos.get(key) != only:
            raise UnsupportedError(
                f"config.json: chronos_config's {key} {chronos.get(key)!r} is not supported beside an input_patch_size "
                f"of {patch}; supported: {only}"
            )
    rows = -(-context // patch) + 1 + most  # the series, [REG], the forecast
    more = {"outer_inputs": 3 * patch, "outer_outputs": patch * len(quantiles), "max_position_embeddings": rows}
    return family, values | more


CHRONOS2 = Family(
    arch="chronos2",
    stem="",
    outside={
        "token_embd": ("shared", "v d"),
        "enc.output_norm": ("encoder.final_layer_norm", "d"),
        **_BLOCKS,
    },
    several=(Stack("enc.blk.{}.", "encoder.block.{}.", _LAYER),),
    biases={ALWAYS: tuple(_BLOCKS)},
    spelling=T5_SPELLING,
    defaults={"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6, "rope_theta": 10000.0},
    only={"feed_forward_proj": ("relu",), "is_encoder_decoder": (False,)},
    norm_eps=("layer_norm_rms_epsilon", "layer_norm_epsilon"),
    head="",
    symbols=BLOCK_SIZES,
    numbers={"encoder.context_length": "max_position_embeddings"},
    float32=tuple(_BLOCKS),
    settle=_settle,
    extra=chronos_fields,
)

CLASSES = {CHRONOS2_CLASS: CHRONOS2}
