# SPDX-License-Identifier: Apache-2.0
"""A model's own generation settings from generation_config.json, or config.json, where older files have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt.errors import ModelFormatError
from slimrt.modelfile.gguf import array, boolean, float32, uint32
from slimrt.modelfile.settings import PREFIX

_NUMBERS = ("no_repeat_ngram_size", "min_length", "min_new_tokens")
_WITH_ENCODER = ("encoder_no_repeat_ngram_size", "max_length", "max_new_tokens", "num_beams")
_IDS = ("suppress_tokens", "begin_suppress_tokens")
_MOST = 1 << 31
_USUAL_LENGTH = ("max_length", 20)  # transformers' default, which older versions wrote into every config.json
# Settings that change what is generated and are not applied, with the values that ask for nothing.
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({}, []),
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "guidance_scale": (1,),
    "forced_decoder_ids": ([],),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (0,),
    "stop_strings": ("", []),
    "force_words_ids": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": (),
    "max_time": (),
}
_SAMPLING: dict[str, tuple[Any, ...]] = {"repetition_penalty": (1,), "do_sample": (False,)}


def generation_fields(
    config: Mapping[str, Any], generation: Mapping[str, Any], n_vocab: int, encoder: bool
) -> tuple[dict[str, GGUFValue], list[str]]:
    """The settings, and a warning that names those that are not applied.

    Args:
        config: config.json with the model type's defaults, which counts where generation_config.json is missing, as in
            transformers; but its bad_words_ids are of either.
        generation: generation_config.json, or nothing.
        encoder: the model has one. How a search goes, and how long a text gets, is left to the caller without.

    Raises:
        ModelFormatError: one is of another kind, or not a token of the vocabulary.
    """
    said = {key: value for key, value in (generation or config).items() if value is not None}
    if "min_new_tokens" in said:
        said.pop("min_length", None)  # transformers' generate() goes by the former alone
    found: dict[str, GGUFValue] = {}
    for key in (*_NUMBERS, *(_WITH_ENCODER if encoder else ())):
        number = _number(said, key)
        if number and (generation or (key, number) != _USUAL_LENGTH):
            found[key] = uint32(number)
    stopping = said.get("early_stopping", False)
    if encoder and stopping != "never" and not isinstance(stopping, bool):
        raise _wrong("early_stopping", stopping)
    for key in ("renormalize_logits", *(["early_stopping"] if encoder else ())):
        if said.get(key) is True:
            found[key] = boolean(True)
    penalty = said.get("length_penalty", 1)
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -40 <= penalty <= 40:
        raise _wrong("length_penalty", penalty)
    if encoder and penalty != 1:
        found["length_penalty"] = float32(float(penalty))
    end = said.get("forced_eos_token_id")
    if end := end if isinstance(end, list) else [] if end is None else [end]:
        found["forced_eos_token_id"] = uint32(min(_ids("forced_eos_token_id", end, n_vocab)))
    for key in _IDS:
        if ids := [id for id in _ids(key, said.get(key, [])) if id < n_vocab]:
            found[key] = array(ids, GGUFValueType.INT32)
    if words := words_of(config.get("bad_words_ids"), said.get("eos_token_id"), n_vocab):
        found["bad_words_ids"] = array([id for word in words for id in (*word, -1)], GGUFValueType.INT32)
    return {PREFIX + key: value for key, value in found.items()}, _unapplied(said, encoder)


def words_of(words: Any, ends: Any, n_vocab: int) -> list[list[int]]:
    """bad_words_ids without those that end a text, which stay allowed, as in transformers, and those that never come.

    ModelFormatError: they are not sequences of ids."""
    words = [] if words is None else words
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise _wrong("bad_words_ids", words)
    for word in words:
        _ids("bad_words_ids", word)
    ends = ends if isinstance(ends, list) else [ends]
    return [word for word in words if max(word) < n_vocab and not (len(word) == 1 and word[0] in ends)]


def _number(said: Mapping[str, Any], key: str) -> int:
    value = said.get(key, 0)
    if type(value) is not int or not 0 <= value < _MOST:
        raise _wrong(key, value)
    return value


def _ids(key: str, ids: Any, n_vocab: int = _MOST) -> list[int]:
    """A list of ids. Where they are ruled out n_vocab is left out: one beyond the vocabulary, such as of an image where
    the text part alone is read, never comes anyway."""
    if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < n_vocab for id in ids):
        raise _wrong(key, ids)
    return ids


def _wrong(key: str, value: Any) -> ModelFormatError:
    return ModelFormatError(f"generation_config.json: {key} is {value!r:.80}, not such a setting of this model")


def _unapplied(said: Mapping[str, Any], encoder: bool) -> list[str]:
    """A warning on settings that are not applied. Sampling without an encoder is the caller's: none on that."""
    settings = _LEFT_OUT | (_SAMPLING if encoder else {})
    names = [key for key, nothing in settings.items() if key in said and said[key] not in nothing]
    if encoder and said.get("early_stopping") == "never":
        names.append("early_stopping 'never'")
    if not names:
        return []
    return [f"of the model's own generation settings not applied, so that texts may differ: {', '.join(names)}"]
