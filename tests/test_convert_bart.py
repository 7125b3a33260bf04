# SPDX-License-Identifier: Apache-2.0
"""BART's kin through the converter: what config.json and generation_config.json say of ids, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import slimrt
from slimrt.errors import ContextOverflowError, ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData
from slimrt.modelfile.hf.directory import read_hf

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

BART_KIN = ("bart", "mbart", "m2m_100", "marian", "pegasus")


def said(directory: Path, target: Path, generation: dict | None = None, **config) -> ModelData:
    """The model of a directory whose config.json says something else ("out": nothing)."""
    save_file(load_file(directory / "model.safetensors"), target / "model.safetensors")
    values = json.loads((directory / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value != "out"}))
    if generation is not None:
        (target / "generation_config.json").write_text(json.dumps(generation))
    return read_hf(target)[0]


STARTS = {  # family, config.json, generation_config.json -> what outputs begin with, as in transformers
    "config.json says it": ("bart", {}, None, 3),
    "generation_config.json counts more": ("bart", {}, {"decoder_start_token_id": 7}, 7),
    "null says nothing": ("bart", {"decoder_start_token_id": None}, {"decoder_start_token_id": 7}, 7),
    "the beginning of texts, where neither does": (
        "bart",
        {"decoder_start_token_id": None, "bos_token_id": 5},
        None,
        5,
    ),
    "BART's usual": ("bart", {"decoder_start_token_id": "out"}, None, 2),
    "mBART has none": ("mbart", {"decoder_start_token_id": "out", "bos_token_id": "out"}, None, 0),
}


@pytest.mark.parametrize("case", STARTS)
def test_the_start_of_outputs(case, seq2seq, tmp_path):
    name, config, generation, wanted = STARTS[case]
    model = said(seq2seq(name), tmp_path, generation, **config)
    assert model.value(f"{name}.decoder_start_token_id") == wanted


@pytest.mark.parametrize("name", BART_KIN)
def test_words_that_are_never_chosen(name, seq2seq, tmp_path):
    """In a bias of the head, which M2M100 has for this alone. An end of texts is no such word, as in transformers."""
    (tmp_path / "plain").mkdir()
    plain = said(seq2seq(name), tmp_path / "plain")
    assert ("output.bias" in plain.tensors) == (name != "m2m_100")
    words = {"bad_words_ids": [[9], [11], [2]], "eos_token_id": [2, 4]}
    model = said(seq2seq(name), tmp_path, words | {"renormalize_logits": True}, bad_words_ids=None)
    bias = model.tensor("output.bias").values()
    assert np.flatnonzero(bias < -1000).tolist() == [9, 11]
    if name != "m2m_100":
        bias[[9, 11]] = plain.tensor("output.bias").values()[[9, 11]]
        assert np.array_equal(bias, plain.tensor("output.bias").values())
    else:
        assert bias[2] == 0


@pytest.mark.parametrize("words", ["a", [5], [[5, "6"]], [[]], [[5], [-1]]])
def test_other_words_are_refused(words, seq2seq, tmp_path):
    with pytest.raises(ModelFormatError, match="bad_words_ids is .*, not such a setting of this model"):
        said(seq2seq("bart"), tmp_path, bad_words_ids=words)


def test_words_of_several_tokens_are_a_setting(seq2seq, tmp_path):
    """For a bias knows nothing of the tokens before; ids beyond the vocabulary never come."""
    words = [[5, 6], [9], [7, 7, 8], [109], [5, 109]]
    model = said(seq2seq("bart"), tmp_path, bad_words_ids=words, renormalize_logits=True)
    assert model.value("slimrt.generation.bad_words_ids") == [5, 6, -1, 7, 7, 8, -1]
    assert np.flatnonzero(model.tensor("output.bias").values() < -1000).tolist() == [9]


def test_single_words_are_a_setting_where_they_count_in_probabilities(seq2seq, tmp_path):
    """Else a beam search would have other scores than transformers'."""
    model = said(seq2seq("bart"), tmp_path, bad_words_ids=[[5, 6], [9]])
    assert model.value("slimrt.generation.bad_words_ids") == [5, 6, -1, 9, -1]
    assert model.tensor("output.bias").values().min() > -1000


@pytest.mark.parametrize("wrong", [None, "1", [1], -1, 109, True])
def test_positions_of_m2m100_begin_after_the_padding(wrong, seq2seq, tmp_path):
    with pytest.raises(ModelFormatError, match="pad_token_id is .*, not a token of the vocabulary"):
        said(seq2seq("m2m_100"), tmp_path, pad_token_id=wrong)


def test_a_scale_that_is_no_truth_value(seq2seq, tmp_path):
    with pytest.raises(UnsupportedError, match="scale_embedding = 'no' is not supported"):
        said(seq2seq("bart"), tmp_path, scale_embedding="no")


@pytest.mark.parametrize("name", BART_KIN)
def test_files_without_tensors(name, seq2seq, tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((seq2seq(name) / "config.json").read_text())
    with pytest.raises(ModelFormatError, match="tensor 'shared.weight' is missing"):
        read_hf(tmp_path)


def test_a_source_that_is_too_long(seq2seq):
    """More room is advised where the table of positions has more."""
    for n_source, advice in ((40, "shorten it or split it$"), (20, "or load the model with a larger n_source")):
        with slimrt.Model(seq2seq("m2m_100"), n_source=n_source, progress=False) as model:
            assert len(model.text2text([5] * n_source, max_tokens=3).tokens) == 3
            with pytest.raises(ContextOverflowError, match=advice):
                model.text2text([5] * (n_source + 1))


@pytest.mark.parametrize("name", ["bart", "m2m_100"])
def test_a_bias_of_another_name(name, seq2seq, tmp_path):
    """transformers does not read one, so a file that has it means another model."""
    tensors = load_file(seq2seq(name) / "model.safetensors") | {"lm_head.bias": np.ones(109, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((seq2seq(name) / "config.json").read_text())
    with pytest.raises(UnsupportedError, match=r"tensor 'lm_head.bias' (is not such a model's|has no place in)"):
        read_hf(tmp_path)
