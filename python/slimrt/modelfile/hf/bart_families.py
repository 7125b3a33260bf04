# SPDX-License-Identifier: Apache-2.0
"""BART and what is built like it: mBART, M2M100 and NLLB, Marian, Pegasus, as encoder_decoders.py has the others.

No other GGUF layout of them exists. Names follow Whisper's, those of norms after a sum BERT's. Tables of sinusoids are
computed where files lack them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import Any

import numpy as np

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.encoder_decoders import DECODER_LAYERS, SPELLING, projections
from slimrt.modelfile.hf.families import ACTIVATIONS
from slimrt.modelfile.hf.family import ALWAYS, Family, Source, Stack
from slimrt.modelfile.hf.generation_fields import words_of
from slimrt.modelfile.hf.safetensors_files import Entry, as_float32

_SIDES = {"enc": "encoder", "dec": "decoder"}
_LOGITS_BIAS, _HEAD_BIAS = "final_logits_bias", "lm_head.bias"
_Table = Callable[[int, int], np.ndarray]  # rows, columns -> float32
_NEVER = np.float32(-1e4)  # of a logit: finite, so that no comparison of logits sees a difference of infinities


def _stacks(names: Mapping[str, str]) -> tuple[Stack, Stack]:
    """Both stacks of layers. names: GGUF's names of the norms of self-attention, cross-attention and the FFN."""
    attention = {names["self_attn"]: ("self_attn_layer_norm", "d"), **projections("self_attn", "out_proj")}
    cross = {
        names["encoder_attn"]: ("encoder_attn_layer_norm", "d"),
        **projections("encoder_attn", "out_proj", "cross_"),
    }
    ffn = {names["ffn"]: ("final_layer_norm", "d"), "ffn_up": ("fc1", "ff d"), "ffn_down": ("fc2", "d ff")}
    return (
        Stack("enc.blk.{}.", "encoder.layers.{}.", attention | ffn),
        Stack("dec.blk.{}.", "decoder.layers.{}.", attention | cross | ffn, DECODER_LAYERS),
    )


def _both(name: str, theirs: str, shape: str) -> dict[str, tuple[str, str]]:
    """A module that encoder and decoder have one of each."""
    return {f"{ours}.{name}": (f"{side}.{theirs}", shape) for ours, side in _SIDES.items()}


_INPUT_NORMS = {"self_attn": "attn_norm", "encoder_attn": "cross_attn_norm", "ffn": "ffn_norm"}
_SUM_NORMS = {"self_attn": "attn_output_norm", "encoder_attn": "cross_attn_output_norm", "ffn": "layer_output_norm"}
_EMBEDDINGS = {"token_embd": ("shared", "v d"), **_both("position_embd", "embed_positions", "ctx d")}
_EMBEDDING_NORMS = _both("token_embd_norm", "layernorm_embedding", "d")
_FINAL_NORMS = _both("output_norm", "layer_norm", "d")
_BIASES = (
    *("attn_q", "attn_k", "attn_v", "attn_o", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_o"),
    *("ffn_up", "ffn_down", *_INPUT_NORMS.values(), *_SUM_NORMS.values(), "token_embd_norm", "output_norm"),
)


@dataclass(frozen=True)
class _Whole:
    """A model's tensors with those that its files leave out or store otherwise.

    Attributes:
        positions: (rows, d) -> the table [rows, d] of a model whose files need not have it; None: they have it.
        never: ids whose logits are so low that they are never chosen.
        biased: it has a head with a bias, in files the first and only row of final_logits_bias.
    """

    source: Source
    d: int
    rows: int
    n_vocab: int
    positions: _Table | None
    never: Sequence[int]
    biased: bool

    @property
    def entries(self) -> Mapping[str, Entry]:
        entries = dict(self.source.entries)
        if not entries:
            return entries
        any_file = next(iter(entries.values()))
        stem = "model." if any(name.startswith("model.") for name in entries) else ""
        if self.positions:
            for side in _SIDES.values():
                name = f"{stem}{side}.embed_positions.weight"
                entries.setdefault(name, replace(any_file, dtype="F32", shape=(self.rows, self.d)))
        if self.biased:
            if own := entries.get(_HEAD_BIAS):
                raise UnsupportedError(
                    f"{own.file}: tensor '{_HEAD_BIAS}' is not such a model's, whose head's bias is {_LOGITS_BIAS}"
                )
            stored = entries.pop(_LOGITS_BIAS, None)
            if stored and stored.shape != (1, self.n_vocab):
                raise ModelFormatError(
                    f"{stored.file}: tensor '{_LOGITS_BIAS}' is {list(stored.shape)}, expected [1, {self.n_vocab}]"
                )
            entries[_HEAD_BIAS] = replace(stored or any_file, dtype="F32", shape=(self.n_vocab,))
        return entries

    def elements(self, name: str) -> np.ndarray:
        if self.positions and name.endswith(".embed_positions.weight") and name not in self.source.entries:
            return self.positions(self.rows, self.d)
        if name != _HEAD_BIAS or not self.biased:
            return self.source.elements(name)
        bias = np.zeros(self.n_vocab, np.float32)
        if stored := self.source.entries.get(_LOGITS_BIAS):
            bias[:] = as_float32(self.source.elements(_LOGITS_BIAS), stored.dtype)[0]
        bias[list(self.never)] = _NEVER
        return bias


def _tensor2tensor(first: int) -> _Table:
    """M2M100's table: sines, then cosines, of position / 10000^(i / (d / 2 - 1)); the first position is `first`."""

    def table(rows: int, d: int) -> np.ndarray:
        half = d // 2
        steps = np.exp(np.arange(half, dtype=np.float32) * np.float32(-log(10000) / (half - 1)))
        angles = np.arange(first, first + rows, dtype=np.float32)[:, None] * steps
        out = np.zeros((rows, d), np.float32)
        out[:, : 2 * half] = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return out

    return table


def _vaswani(rows: int, d: int) -> np.ndarray:
    """The table of Vaswani et al., 2017, section 3.5, but with the sines of all pairs first."""
    angles = np.arange(rows)[:, None] / 10000 ** (np.arange(0, d, 2) / d)
    return np.concatenate([np.sin(angles), np.cos(angles[:, : d // 2])], axis=1).astype(np.float32)


def _settle(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """What outputs begin with, the scale of embeddings, computed tables, and a head's bias for words never chosen."""
    d, rows, n_vocab = (values.get(key) for key in ("hidden_size", "max_position_embeddings", "vocab_size"))
    if type(d) is not int or type(rows) is not int or type(n_vocab) is not int:
        raise ModelFormatError("config.json: d_model, max_position_embeddings or vocab_size is not a size")
    start = values.get("decoder_start_token_id")
    values["language_starts"] = start != values.get("eos_token_id")  # in mBART, of which no language is the end
    values["decoder_start_token_id"] = values.get("bos_token_id") if start is None else start
    if values.get("scale_embedding"):
        values["embedding_scale"] = sqrt(d)
    positions: _Table | None = None
    if values.get("model_type") == "m2m_100":
        positions = _tensor2tensor(_padding(values, n_vocab) + 1)
    elif values.get("model_type") in ("marian", "pegasus"):
        positions = _vaswani
    # Where probabilities are those without them, as Marian's models say, a bias keeps single ids from being chosen,
    # which costs nothing; other words are for whoever generates.
    words = words_of(values.get("bad_words_ids"), values.get("eos_token_id"), n_vocab)
    never = [word[0] for word in words if len(word) == 1 and values.get("renormalize_logits") is True]
    values["bad_words_ids"] = [word for word in words if len(word) > 1 or word[0] not in never]
    if never:
        family = replace(family, biases={ALWAYS: (*family.biases[ALWAYS], "output")})
    biased = "output" in family.biases[ALWAYS]
    return replace(family, stored=lambda source: _Whole(source, d, rows, n_vocab, positions, never, biased)), values


def _padding(values: Mapping[str, Any], n_vocab: int) -> int:
    """The id that pads; ModelFormatError: it is none of the vocabulary."""
    id = values.get("pad_token_id")
    if type(id) is not int or not 0 <= id < n_vocab:
        raise ModelFormatError(f"config.json: pad_token_id is {id!r}, not a token of the vocabulary")
    return id


BART = Family(
    arch="bart",
    stem="model.",
    outside=_EMBEDDINGS | _EMBEDDING_NORMS,
    several=_stacks(_SUM_NORMS),
    biases={ALWAYS: (*_BIASES, "output")},
    spelling=SPELLING,
    defaults={
        "activation_function": "gelu",
        "layer_norm_eps": 1e-5,  # PyTorch's; no config says it
        "tie_word_embeddings": True,
        "scale_embedding": False,
        "max_position_embeddings": 1024,
        "decoder_start_token_id": 2,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
    },
    only={
        "activation_function": tuple(ACTIVATIONS),
        "layer_norm_eps": (1e-5,),
        "scale_embedding": (True, False),
        "is_encoder_decoder": (True,),
    },
    norm_eps=("layer_norm_epsilon", "layer_norm_eps"),
    activation="activation_function",
    rope=False,
    numbers={
        "decoder_start_token_id": "decoder_start_token_id",
        "encoder.context_length": "max_position_embeddings",
    },
    of_generation=("bos_token_id", "eos_token_id", "renormalize_logits"),
    scales={"embedding_scale": "embedding_scale"},
    equal=(("num_attention_heads", "decoder_attention_heads"), ("intermediate_size", "decoder_ffn_dim")),
    copies=("encoder.embed_tokens", "decoder.embed_tokens"),
    unused_rows={"position_embd": 2},
    ignored=(r"(model\.)?(encoder|decoder)\.version",),
    settle=_settle,
)

MBART = replace(
    BART,
    arch="mbart",
    outside=_EMBEDDINGS | _EMBEDDING_NORMS | _FINAL_NORMS,
    several=_stacks(_INPUT_NORMS),
    defaults={**BART.defaults, "decoder_start_token_id": None},
    flags={"decoder_starts_with_language": "language_starts"},
)

M2M_100 = replace(
    MBART,
    outside=_EMBEDDINGS | _FINAL_NORMS,
    biases={ALWAYS: _BIASES},
    defaults={**BART.defaults, "activation_function": "relu", "scale_embedding": True, "forced_eos_token_id": None},
    flags={},
    unused_rows={},
    ignored=(*BART.ignored, r"(model\.)?(encoder|decoder)\.embed_positions\.weights"),  # of old files
)

PEGASUS = replace(
    MBART,
    outside=_EMBEDDINGS | _FINAL_NORMS,
    defaults={
        **BART.defaults,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
    },
    flags={},
    unused_rows={},
)

MARIAN = replace(
    BART,
    outside=_EMBEDDINGS,
    defaults={
        **BART.defaults,
        "decoder_start_token_id": 58100,
        "pad_token_id": 58100,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    },
    only={**BART.only, "share_encoder_decoder_embeddings": (True,)},
    equal=(*BART.equal, ("vocab_size", "decoder_vocab_size")),
    unused_rows={},
)

BART_FAMILIES = {"bart": BART, "mbart": MBART, "m2m_100": M2M_100, "marian": MARIAN, "pegasus": PEGASUS}
