# SPDX-License-Identifier: Apache-2.0
"""Broken Hugging Face directories: a typed error that names the culprit, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

import slimrt
from conftest import GOLDEN
from slimrt.modelfile.hf.sentencepiece_model import read_scores

WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "llama_mha", tmp_path / "model"))


def refused(directory: Path, error=slimrt.SlimrtError, match: str | None = None) -> None:
    """Neither loads nor converts; nothing is left where the result would be."""
    with pytest.raises(error, match=match):
        slimrt.Model(directory)
    out = directory.parent / "out.gguf"
    with pytest.raises(error, match=match):
        slimrt.convert(directory, out)
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def change_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "left out"}
    (directory / "config.json").write_text(json.dumps(config))


def change_header(directory: Path, change) -> None:
    """Rewrites the JSON header of the safetensors file; the data stays."""
    raw = (directory / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def test_the_directory_is_good(directory):
    with slimrt.Model(directory, n_ctx=16) as model:
        assert model.logits([3, 4]).shape == (2, 101)


def test_no_config(directory):
    (directory / "config.json").unlink()
    refused(directory, (slimrt.SlimrtError, FileNotFoundError), "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01", '{"model_type": 3}', "{}"])
def test_config_is_not_what_it_should_be(text, directory):
    (directory / "config.json").write_text(text)
    refused(directory)


CONFIGS = {
    "unknown family": ({"model_type": "mamba"}, "mamba"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers|layers"),
    "layers left out": ({"num_hidden_layers": "left out"}, "num_hidden_layers"),
    "text for layers": ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    "a layer too many": ({"num_hidden_layers": 3}, "layers.2|blk.2"),
    "a layer too few": ({"num_hidden_layers": 1}, "layers.1|blk.1"),
    "no heads": ({"num_attention_heads": 0}, "head"),
    "heads that do not divide": ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "head"),
    "other heads": ({"num_attention_heads": 8, "num_key_value_heads": 8}, "q_proj|attn_q"),
    "other vocabulary": ({"vocab_size": 102}, "embed|vocab"),
    "absurd width": ({"hidden_size": 2**40}, "embed|hidden_size|head"),
    "negative width": ({"hidden_size": -48}, "hidden_size"),
    "unknown activation": ({"hidden_act": "maxout"}, "maxout"),
    "unknown scaling": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}}, "spiral"),
    "scaling without factor": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised elsewhere": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization|gptq"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_does_not_fit(case, directory):
    changes, match = CONFIGS[case]
    change_config(directory, **changes)
    refused(directory, match=match)


def test_no_weights(directory):
    (directory / WEIGHTS).unlink()
    refused(directory, (slimrt.SlimrtError, FileNotFoundError), "safetensors")


def test_pickled_weights_are_not_opened(directory):
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    refused(directory, (slimrt.SlimrtError, FileNotFoundError), "safetensors")


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "tokenizer.model"])
def test_pointers_of_git_lfs_are_called_that(name, directory):
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    said = f"{name} is a pointer of Git LFS.*git lfs pull"
    if name != "tokenizer.model":
        return refused(directory, slimrt.ModelFormatError, said)
    with pytest.raises(slimrt.ModelFormatError, match=said):
        read_scores(directory / name)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_weights_cut_off(keep, directory):
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(raw[:keep])
    refused(directory, slimrt.ModelFormatError, WEIGHTS)


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_header_length_is_a_lie(size, directory):
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", size) + raw[8:])
    refused(directory, slimrt.ModelFormatError, WEIGHTS)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
HEADERS = {
    "tensor missing": lambda h: h.pop(K_PROJ),
    "tensor unknown": lambda h: h.update({"model.layers.1.self_attn.surprise": h[K_PROJ]}),
    "shape and bytes disagree": lambda h: h[K_PROJ].update(shape=[48, 49]),
    "shape of another model": lambda h: h[K_PROJ].update(shape=[24, 96]),
    "negative dimension": lambda h: h[K_PROJ].update(shape=[-48, -48]),
    "empty": lambda h: h[K_PROJ].update(shape=[0, 48], data_offsets=[0, 0]),
    "unknown type": lambda h: h[K_PROJ].update(dtype="Q7"),
    "integer type": lambda h: h[K_PROJ].update(dtype="I32"),
    "beyond the end": lambda h: h[K_PROJ].update(data_offsets=[2**40, 2**40 + 48 * 48 * 4]),
    "backwards": lambda h: h[K_PROJ].update(data_offsets=[9216, 0]),
    "no offsets": lambda h: h[K_PROJ].pop("data_offsets"),
    "text for a shape": lambda h: h[K_PROJ].update(shape="48x48"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_weights_that_do_not_fit(case, directory):
    change_header(directory, HEADERS[case])
    refused(directory, match="k_proj|attn_k|surprise|safetensors")


def test_index_points_to_nothing(tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "model"))
    sorted(directory.glob("*.safetensors"))[2].unlink()
    refused(directory, (slimrt.SlimrtError, FileNotFoundError), "model-00003-of")


@pytest.mark.parametrize("target", ["../../../etc/passwd", "/etc/passwd", "", None, 3])
def test_index_points_elsewhere(target, tmp_path):
    directory = Path(shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "model"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], target)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, (slimrt.SlimrtError, FileNotFoundError))
