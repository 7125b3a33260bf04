# SPDX-License-Identifier: Apache-2.0
"""What encoder-decoders are run with and GGUF has no key for: Whisper's rules for tokens, Chronos' scaling and bins,
how a text begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import array, boolean, float32, string, uint32

_UINT32, _FLOAT32, _BOOL = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL
CHRONOS2_CLASS = "Chronos2Model"
# Fields of chronos_config (chronos-forecasting's ChronosConfig, ChronosBoltConfig and Chronos2ForecastingConfig) that a
# forecast depends on.
_CHRONOS = {
    **dict.fromkeys(("context_length", "prediction_length", "n_tokens", "n_special_tokens", "num_samples"), _UINT32),
    **dict.fromkeys(("top_k", "pad_token_id", "eos_token_id"), _UINT32),
    **dict.fromkeys(("input_patch_size", "input_patch_stride", "output_patch_size"), _UINT32),
    **dict.fromkeys(("max_output_patches", "time_encoding_scale"), _UINT32),
    **dict.fromkeys(("low_limit", "high_limit", "temperature", "top_p"), _FLOAT32),
    **dict.fromkeys(("use_eos_token", "use_reg_token", "use_arcsinh"), _BOOL),
}
_BINS = "MeanScaleUniformBins"
_USUAL_ROWS = 512  # of T5's encoder where the file does not say


def whisper_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, GGUFValue]:
    """Token ids never sampled, those not sampled first, and the heads that align words with time.

    Args:
        config: config.json, which says it where generation_config.json does not.
        generation: generation_config.json, or nothing.

    Raises:
        ModelFormatError: one is not a list of such numbers.
    """
    fields = {}
    for key in ("suppress_tokens", "begin_suppress_tokens", "alignment_heads"):
        values = config.get(key) if generation.get(key) is None else generation[key]
        if values is None:
            continue
        pairs = key == "alignment_heads"
        flat = [number for pair in values for number in pair] if pairs and _is_list_of_pairs(values) else values
        if not isinstance(flat, list) or not all(type(number) is int and 0 <= number < 2**31 for number in flat):
            what = "pairs of layer and head" if pairs else "token ids"
            raise ModelFormatError(f"generation_config.json: {key} is not a list of {what}")
        fields[f"slimrt.whisper.{key}"] = array(flat, GGUFValueType.INT32)
    return fields


def _is_list_of_pairs(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in values)


def chronos_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, GGUFValue]:
    """chronos_config, if there is one: its own fields and those of its tokenizer_kwargs, and the rows they lead to.

    Raises:
        ModelFormatError: a field is not of its kind.
        UnsupportedError: another way to make tokens of a series.
    """
    chronos = config.get("chronos_config")
    if chronos is None:
        return {}
    if not isinstance(chronos, dict) or not isinstance(chronos.get("tokenizer_kwargs", {}), dict):
        raise ModelFormatError("config.json: chronos_config is not an object")
    patches = "input_patch_size" in chronos
    if not patches and chronos.get("tokenizer_class") != _BINS:
        raise UnsupportedError(
            f"config.json: chronos_config's tokenizer_class {chronos.get('tokenizer_class')!r} is not supported; "
            f"supported: {_BINS}"
        )
    named = {"pad_token_id": config.get("pad_token_id"), "eos_token_id": config.get("eos_token_id")}
    values = named | chronos | chronos.get("tokenizer_kwargs", {})
    kind = "2" if CHRONOS2_CLASS in (config.get("architectures") or ()) else "bolt" if patches else "t5"
    fields = {"kind": string(kind)}
    fields |= {key: _field(key, values[key], kind) for key, kind in _CHRONOS.items() if values.get(key) is not None}
    if isinstance(config.get("reg_token_id"), int):
        fields["reg_token_id"] = uint32(config["reg_token_id"])
    if patches:
        quantiles = chronos.get("quantiles")
        if not isinstance(quantiles, list) or not all(isinstance(q, float) and 0 < q < 1 for q in quantiles):
            raise ModelFormatError("config.json: chronos_config's quantiles are not a list of numbers between 0 and 1")
        fields["quantiles"] = array(quantiles, _FLOAT32)
    told = {f"slimrt.chronos.{key}": value for key, value in fields.items()}
    if not patches and "context_length" in fields:  # a token a value, and the end: one more than T5's usual 512
        told["t5.encoder.context_length"] = uint32(max(_USUAL_ROWS, fields["context_length"].value + 1))
    return told


def text2text_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, GGUFValue]:
    """The token that every output begins with, where there is one.

    Raises:
        ModelFormatError: it is not a token of the vocabulary.
    """
    key = "forced_bos_token_id"
    value = config.get(key) if generation.get(key) is None else generation[key]
    if value is None and config.get("force_bos_token_to_be_generated"):  # as the first configs say it
        value = config.get("bos_token_id", 0)
    if value is None:
        return {}
    if type(value) is not int or not 0 <= value < config["vocab_size"]:
        raise ModelFormatError(f"generation_config.json: {key} is {value!r}, not a token of the vocabulary")
    return {f"slimrt.text2text.{key}": uint32(value)}


def _field(key: str, value: Any, kind: GGUFValueType) -> GGUFValue:
    if kind == _BOOL and isinstance(value, bool):
        return boolean(value)
    if kind == _UINT32 and type(value) is int and 0 <= value < 2**31:
        return uint32(value)
    if kind == _FLOAT32 and isinstance(value, int | float) and not isinstance(value, bool):
        return float32(float(value))
    raise ModelFormatError(f"config.json: chronos_config's {key} is {value!r}, not {kind.name.lower()}")
