# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders whose directories say the same in another way, or what the converter does not handle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slimrt
from seq2seq_models import MODELS
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData
from slimrt.modelfile.hf.directory import read_hf

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

each_seeded = pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if not tiny.fixture])


# ---------------------------------------------------------------- other ways to store the same
def rewritten(directory: Path, target: Path, change, **config) -> Path:
    """A directory with other tensors: change(dict) alters them in place; config: other values ("out": left out)."""
    target.mkdir()
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    values = json.loads((directory / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({key: v for key, v in values.items() if v != "out"}))
    return target


def same(one: ModelData, other: ModelData) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        np.array_equal(tensor.values(), other.tensor(name).values()) for name, tensor in one.tensors.items()
    )


def test_the_embedding_may_have_other_names(seq2seq, tmp_path):
    """transformers 4 stored any of three names of one tensor, or all; t5-small has a bias that nothing reads."""
    source = seq2seq("t5")

    def other_name(tensors):
        tensors["decoder.embed_tokens.weight"] = tensors.pop("shared.weight")

    def all_names(tensors):
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors["shared.weight"].copy()
        bias = tensors["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = bias.copy()

    def differing(tensors):
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1

    wanted, _ = read_hf(source)
    for number, change in enumerate((other_name, all_names)):
        assert same(read_hf(rewritten(source, tmp_path / str(number), change))[0], wanted)
    with pytest.raises(ModelFormatError, match="encoder.embed_tokens.weight differs from shared.weight"):
        read_hf(rewritten(source, tmp_path / "differing", differing))


def other_head(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1


UNSAID = {"tie_word_embeddings": "out", "scale_decoder_outputs": "out"}
HEADS = {  # family, tensors, config -> whether the file has a head, and whether it is the embedding
    "scaled, as transformers 4 says": ("t5", dict.copy, UNSAID, None),
    "tied but not scaled, as 5 says": ("t5", dict.copy, {"scale_decoder_outputs": False}, "embedding"),
    "own head, as 5 says": ("t5", other_head, {"scale_decoder_outputs": False}, "own"),
    "own head, as 4 says": ("t5", other_head, {"tie_word_embeddings": False, "scale_decoder_outputs": "out"}, "own"),
    "UMT5's own, as 5 says": ("umt5", other_head, {"tie_word_embeddings": True, "scale_decoder_outputs": False}, "own"),
    "UMT5's, as 4 says": ("umt5", other_head, {"tie_word_embeddings": False, "scale_decoder_outputs": "out"}, "own"),
    "mT5's own": ("mt5", other_head, {}, "own"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_whether_the_head_is_tied(case, seq2seq, tmp_path):
    name, change, config, wanted = HEADS[case]
    model, _ = read_hf(rewritten(seq2seq(name), tmp_path / "model", change, **config))
    found = model.tensors.get("output.weight")
    assert (found is None) == (wanted is None)
    if found is not None:
        embedding = model.tensor("token_embd.weight").values()
        assert np.array_equal(found.values(), embedding + (wanted == "own"))


@pytest.mark.parametrize("name", ["t5", "umt5"])  # whose input transformers would scale, as that of a tied one
def test_a_head_that_contradicts_the_config(name, seq2seq, tmp_path):
    says = {"tie_word_embeddings": True, "scale_decoder_outputs": True}
    with pytest.raises(ModelFormatError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        read_hf(rewritten(seq2seq(name), tmp_path / "model", other_head, **says))


@pytest.mark.parametrize(("projection", "gated", "activation"),
                         [("relu", False, "relu"), ("gated-silu", True, "silu"),
                          ("gated-relu", True, "relu"), ("gated-gelu", True, "gelu_tanh")])  # fmt: skip
def test_feed_forward_of_t5(projection, gated, activation, seq2seq, tmp_path):
    source = seq2seq("t5_v11" if gated else "t5")
    config = {"feed_forward_proj": projection, "dense_act_fn": "out"}
    model, _ = read_hf(rewritten(source, tmp_path / "model", dict.copy, **config))
    assert ("dec.blk.1.ffn_gate.weight" in model.tensors) == gated
    assert model.value("slimrt.activation") == activation


def test_an_activation_of_t5_in_words_of_its_own(seq2seq, tmp_path):
    """dense_act_fn counts more than feed_forward_proj, as in transformers."""
    model, _ = read_hf(rewritten(seq2seq("t5_v11"), tmp_path / "model", dict.copy, dense_act_fn="gelu"))
    assert model.value("slimrt.activation") == "gelu_erf"


def test_sizes_that_configs_leave_out(seq2seq, tmp_path):
    """num_decoder_layers null: as many as the encoder has; n_positions counts where it is larger than 512."""
    source = seq2seq("t5")

    def third_layer(tensors):
        for name in [name for name in tensors if name.startswith("decoder.block.1.")]:
            tensors[name.replace("block.1", "block.2")] = tensors[name].copy()

    config = {"num_decoder_layers": None, "n_positions": 1024, "decoder_start_token_id": "out"}
    model, _ = read_hf(rewritten(source, tmp_path / "model", third_layer, **config))
    assert [model.size(key) for key in ("decoder_block_count", "context_length", "decoder_start_token_id")] == [
        3,
        1024,
        0,
    ]
    (tmp_path / "model" / "generation_config.json").write_text('{"decoder_start_token_id": 5}')
    assert read_hf(tmp_path / "model")[0].size("decoder_start_token_id") == 5


# ---------------------------------------------------------------- what is refused
REFUSED = {
    "unequal heads": ("whisper", {"decoder_attention_heads": 2}, UnsupportedError, "encoder_attention_heads and"),
    "unequal widths": ("whisper", {"decoder_ffn_dim": 64}, UnsupportedError, "encoder_ffn_dim and decoder_ffn_dim"),
    "scaled embedding": ("whisper", {"scale_embedding": True}, UnsupportedError, "scale_embedding"),
    "another activation": ("whisper", {"activation_function": "relu"}, UnsupportedError, "activation_function"),
    "grouped heads": ("moonshine", {"decoder_num_key_value_heads": 2}, UnsupportedError, "key_value_heads"),
    "biased attention": ("moonshine", {"attention_bias": True}, UnsupportedError, "attention_bias"),
    "another decoder activation": ("moonshine", {"decoder_hidden_act": "gelu"}, UnsupportedError, "decoder_hidden_act"),
    "an odd rotation": ("moonshine", {"rope_parameters": {"partial_rotary_factor": 0.6}}, ModelFormatError, "turns 7"),
    "another feed-forward": ("t5", {"feed_forward_proj": "gated-tanh"}, UnsupportedError, "feed_forward_proj"),
    "another activation of its own": ("t5", {"dense_act_fn": "gelu"}, UnsupportedError, "dense_act_fn = 'gelu'"),
    "an encoder alone": ("t5", {"is_encoder_decoder": False}, UnsupportedError, "is_encoder_decoder"),
    "no layers": ("t5", {"num_layers": 0}, ModelFormatError, "num_layers is 0"),
    "a layer too many": ("t5", {"num_decoder_layers": 3}, ModelFormatError, "'decoder.block.2.*missing"),
    "a layer too few": ("t5", {"num_decoder_layers": 1}, UnsupportedError, "'decoder.block.1.*no place"),
    "other buckets": ("t5", {"relative_attention_num_buckets": 16}, ModelFormatError, "expected .16, 2."),
    "other mel bins": ("whisper", {"num_mel_bins": 128}, ModelFormatError, "conv1.*expected .64, 128, 3."),
    "no start": ("t5", {"decoder_start_token_id": "first"}, ModelFormatError, "decoder_start_token_id"),
    "another Chronos": ("t5", {"chronos_config": {"tokenizer_class": "Quantiles"}}, UnsupportedError, "Quantiles"),
    "odd Chronos": ("t5", {"chronos_config": {"tokenizer_class": "MeanScaleUniformBins", "n_tokens": "x"}},
                    ModelFormatError, "n_tokens is 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(case, seq2seq, tmp_path):
    name, config, error, match = REFUSED[case]
    source = rewritten(seq2seq(name), tmp_path / "model", dict.copy, **config)
    with pytest.raises(error, match=match):
        slimrt.convert(source, tmp_path / "out.gguf", progress=False)
    assert not (tmp_path / "out.gguf").exists()


@each_seeded
def test_every_tensor_is_used_or_refused(name, seq2seq, tmp_path):
    def extra(tensors):
        tensors["proj.surprise.weight"] = np.ones((3, 3), np.float32)

    with pytest.raises(UnsupportedError, match="tensor 'proj.surprise.weight' has no place"):
        read_hf(rewritten(seq2seq(name), tmp_path / "extra", extra))
    for number, victim in enumerate(load_file(seq2seq(name) / "model.safetensors")):
        if number % 7 == 0 and victim != "final_logits_bias":  # which is 0 where it is missing
            with pytest.raises(ModelFormatError, match=f"tensor '{victim}' is missing"):
                read_hf(rewritten(seq2seq(name), tmp_path / str(number), lambda tensors, v=victim: tensors.pop(v)))
