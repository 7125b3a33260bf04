# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders through the converter: names, shapes, keys, refusals; and that the file says all of the model.

The last by a float64 reference that reads the file alone and agrees with Hugging Face: the engine takes no part here.
"""

from __future__ import annotations

import importlib.util
import json

import gguf
import numpy as np
import pytest
from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES
from safetensors.numpy import load_file, save_file

import seq2seq_models
import slimrt
from conftest import relative, third_party
from reference_seq2seq import Seq2Seq
from seq2seq_models import BOLT, MODELS, committed
from slimrt.converter.quantize import OUT_TYPES, requantise
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.gguf import ModelData, Tensor, read_gguf, uint32
from slimrt.modelfile.hf.directory import read_hf

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

REFERENCE = 1e-5  # of float64 against float32, relative to the largest value
SEEDED = [name for name, tiny in MODELS.items() if not tiny.fixture]
T5_LIKE = [name for name in SEEDED if MODELS[name].family in ("t5", "mt5", "umt5")]
each = pytest.mark.parametrize("name", MODELS)
each_seeded = pytest.mark.parametrize("name", SEEDED)
oracle = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")),
    reason="needs the extra `oracle`: torch and transformers",
)


def shapes(model: ModelData) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in model.tensors.items()}


# ---------------------------------------------------------------- what the file says
@each
def test_the_file_alone_computes_what_hugging_face_does(name, seq2seq, convert):
    model, wanted = Seq2Seq(convert(seq2seq(name))), committed(name)
    states = model.encode(seq2seq_models.source(name))
    assert relative(states, wanted["states"]) < REFERENCE
    assert relative(model.logits(seq2seq_models.tokens(name), states), wanted["logits"]) < REFERENCE


def test_chronos_bolt_alone(convert):
    model, wanted = Seq2Seq(convert(third_party(BOLT))), committed("chronos_bolt")
    states = model.encode(seq2seq_models.patches())
    assert relative(states, wanted["states"]) < REFERENCE
    assert relative(model.decode(np.array([0]), states), wanted["decoded"]) < REFERENCE


@pytest.mark.parametrize("name", T5_LIKE)
def test_t5_tensors_are_those_of_llama_cpp(name, seq2seq):
    known = {TENSOR_NAMES[kind] for kind in MODEL_TENSORS[MODEL_ARCH.T5]}
    model, _ = read_hf(seq2seq(name))
    for tensor in model.tensors:
        stem = ".".join("{bid}" if part.isdecimal() else part for part in tensor.split(".")[:-1])
        assert stem in known and tensor.endswith(".weight"), tensor


@pytest.mark.parametrize("name", T5_LIKE)
def test_t5_names_are_where_llama_cpp_s_converter_puts_them(name, seq2seq):
    """By content, against the name table of the gguf package."""
    source, _ = read_hf(seq2seq(name))
    names = gguf.get_tensor_name_map(MODEL_ARCH.T5, 3)
    for theirs, values in load_file(seq2seq(name) / "model.safetensors").items():
        ours = f"{names.get_name(theirs.removesuffix('.weight'))}.weight"
        assert np.array_equal(source.tensor(ours).values(), values), theirs


def test_t5_keys_are_those_of_llama_cpp(seq2seq):
    model, _ = read_hf(seq2seq("t5_v11"))
    keys = gguf.Keys
    wanted = {
        keys.LLM.CONTEXT_LENGTH: 512,
        keys.LLM.EMBEDDING_LENGTH: 32,
        keys.LLM.FEED_FORWARD_LENGTH: 96,
        keys.LLM.BLOCK_COUNT: 3,
        keys.LLM.DECODER_BLOCK_COUNT: 2,
        keys.LLM.DECODER_START_TOKEN_ID: 0,
        keys.Attention.HEAD_COUNT: 4,
        keys.Attention.KEY_LENGTH: 16,
        keys.Attention.VALUE_LENGTH: 16,
        keys.Attention.LAYERNORM_RMS_EPS: 1e-6,
        keys.Attention.REL_BUCKETS_COUNT: 8,
        "{arch}.attention.relative_max_distance": 20,
    }
    assert {key: model.value(key.format(arch="t5")) for key in wanted} == wanted
    assert model.value("slimrt.activation") == "gelu_tanh"


def test_position_bias_is_where_the_family_has_it(seq2seq):
    places = {name: [t for t in read_hf(seq2seq(name))[0].tensors if "rel_b" in t] for name in ("t5", "umt5")}
    assert places["t5"] == ["enc.blk.0.attn_rel_b.weight", "dec.blk.0.attn_rel_b.weight"]
    assert len(places["umt5"]) == 3 + 2


def test_heads_of_t5(seq2seq):
    """Without output.weight the head is the embedding, its input scaled; where it is not to be, the file has one."""
    models = {name: read_hf(seq2seq(name))[0] for name in ("t5", "t5_v11", "mt5", "umt5")}
    assert {name for name, model in models.items() if "output.weight" in model.tensors} == {"t5_v11", "mt5"}
    mt5 = models["mt5"]
    assert np.array_equal(mt5.tensor("output.weight").values(), mt5.tensor("token_embd.weight").values())


def test_whisper_tensors_and_keys(seq2seq):
    model, _ = read_hf(seq2seq("whisper_turbo"))
    found = shapes(model)
    assert found["enc.conv1.weight"] == (64, 3 * 128) and found["enc.conv2.weight"] == (64, 3 * 64)
    assert found["enc.position_embd.weight"] == (21, 64) and found["dec.position_embd.weight"] == (40, 64)
    assert not any(name.endswith("attn_k.bias") for name in found)
    biased = {name.split(".")[3] for name in found if name.startswith("dec.blk") and name.endswith("bias")}
    norms = {"attn_norm", "cross_attn_norm", "ffn_norm"}
    assert biased == norms | {"attn_q", "attn_v", "attn_o", "cross_attn_q", "cross_attn_v", "cross_attn_o"} | {
        "ffn_up", "ffn_down"
    }  # fmt: skip
    values = {
        "general.architecture": "whisper",
        "whisper.block_count": 2,
        "whisper.decoder_block_count": 1,
        "whisper.encoder.context_length": 21,
        "whisper.context_length": 40,
        "whisper.mel_bins": 128,
        "whisper.decoder_start_token_id": 3,
        "slimrt.activation": "gelu_erf",
    }
    assert {key: model.value(key) for key in values} == values
    assert model.value("whisper.attention.layer_norm_epsilon") == pytest.approx(1e-5)


def test_convolutions_are_tap_after_tap(seq2seq):
    model, _ = read_hf(seq2seq("whisper"))
    theirs = load_file(seq2seq("whisper") / "model.safetensors")["model.encoder.conv1.weight"]
    ours = model.tensor("enc.conv1.weight").values()
    for tap in range(3):
        assert np.array_equal(ours[:, tap * 80 : (tap + 1) * 80], theirs[:, :, tap])


def test_moonshine_s_halves_and_keys(seq2seq):
    model, _ = read_hf(seq2seq("moonshine"))
    theirs = load_file(seq2seq("moonshine") / "model.safetensors")["model.decoder.layers.2.mlp.fc1.weight"]
    assert np.array_equal(model.tensor("dec.blk.2.ffn_up.weight").values(), theirs[:80])
    assert np.array_equal(model.tensor("dec.blk.2.ffn_gate.weight").values(), theirs[80:])
    assert model.tensor("dec.blk.0.ffn_gate.bias").shape == (80,)
    assert "enc.blk.0.ffn_gate.weight" not in model.tensors and "enc.blk.0.attn_norm.bias" not in model.tensors
    assert shapes(model)["enc.conv3.weight"] == (48, 3 * 96) and "enc.conv1.bias" not in model.tensors
    keys = ("rope.dimension_count", "block_count", "decoder_block_count", "decoder_start_token_id", "context_length")
    assert [model.size(key) for key in keys] == [10, 2, 3, 1, 64]


def test_whisper_s_rules_come_from_generation_config(tmp_path):
    directory = seq2seq_models.write("whisper", tmp_path / "model")
    rules = {"suppress_tokens": [1, 2, 7], "begin_suppress_tokens": [5, 9], "alignment_heads": [[0, 3], [1, 2]]}
    (directory / "generation_config.json").write_text(json.dumps(rules))
    model, _ = read_hf(directory)
    assert model.value("slimrt.whisper.suppress_tokens") == [1, 2, 7]
    assert model.value("slimrt.whisper.begin_suppress_tokens") == [5, 9]
    assert model.value("slimrt.whisper.alignment_heads") == [0, 3, 1, 2]
    (directory / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, "a"]]}))
    with pytest.raises(ModelFormatError, match="alignment_heads is not a list of pairs of layer and head"):
        read_hf(directory)


def test_chronos_keys():
    model, warnings = read_hf(third_party("models/dummy-chronos-model"))
    found = {k.removeprefix("slimrt.chronos."): v.value for k, v in model.metadata.items() if "chronos." in k}
    assert found == {
        "kind": "t5", "context_length": 512, "prediction_length": 64, "n_tokens": 32, "n_special_tokens": 2,
        "num_samples": 20, "top_k": 50, "top_p": 1.0, "temperature": 1.0, "low_limit": -15.0, "high_limit": 15.0,
        "use_eos_token": True, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    assert warnings == []


def test_chronos_bolt_keys_and_tensors():
    model, warnings = read_hf(third_party(BOLT))
    keys = ("kind", "input_patch_size", "input_patch_stride", "prediction_length", "use_reg_token", "reg_token_id")
    assert [model.value(f"slimrt.chronos.{key}") for key in keys] == ["bolt", 16, 16, 64, True, 1]
    assert model.value("slimrt.chronos.quantiles") == pytest.approx(np.arange(1, 10) / 10)
    found = shapes(model)
    assert found["slimrt.bolt.input.hidden.weight"] == (8, 32) and found["slimrt.bolt.output.output.bias"] == (576,)
    assert len([name for name in found if name.startswith("slimrt.bolt.")]) == 12 and "output.weight" not in found
    assert warnings == []


# ---------------------------------------------------------------- types, and what the rest of the converter does
@each_seeded
@pytest.mark.parametrize("outtype", OUT_TYPES)
def test_outtypes(outtype, name, seq2seq, tmp_path):
    report = slimrt.convert(seq2seq(name), tmp_path / "out.gguf", outtype=outtype, progress=False)
    made, (plain, _) = read_gguf(report.path), read_hf(seq2seq(name))
    kept = {"conv1", "conv2", "conv3", "position_embd", "attn_rel_b"}
    for key, tensor in made.tensors.items():
        if len(tensor.shape) == 1 or key.split(".")[-2] in kept:
            assert tensor.type.name == "F32" and np.array_equal(tensor.values(), plain.tensor(key).values())
        else:
            assert (tensor.type.name == "F32") == (outtype == "f32"), key
            assert relative(tensor.values(), plain.tensor(key).values()) < 0.15  # q4_0: half of a step of 1/8
    assert [made.value("general.architecture"), made.value("slimrt.activation")] == [
        plain.arch,
        plain.value("slimrt.activation"),
    ]


@each_seeded
def test_half_precision_stays(name, seq2seq, tmp_path):
    """Matrices as they are stored, the rest in float32; the same numbers in either."""
    tensors = load_file(seq2seq(name) / "model.safetensors")
    save_file({key: tensor.astype(np.float16) for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((seq2seq(name) / "config.json").read_text())
    (half, _), (plain, _) = read_hf(tmp_path), read_hf(seq2seq(name))
    assert half.value("general.file_type") == 1 and half.tensor("token_embd.weight").type.name == "F16"
    for key, tensor in half.tensors.items():
        stored = not (key.endswith("position_embd.weight") and MODELS[name].family in ("m2m_100", "marian", "pegasus"))
        assert np.array_equal(tensor.values(), plain.tensor(key).values().astype(np.float16 if stored else np.float32))


def test_chronos_survives_another_conversion(tmp_path):
    first = slimrt.convert(third_party(BOLT), tmp_path / "one.gguf", progress=False).path
    second = slimrt.convert(first, tmp_path / "two.gguf", outtype="f16", progress=False).path
    one, two = read_gguf(first), read_gguf(second)
    assert one.tensors.keys() == two.tensors.keys()
    kept = [key for key in one.metadata if key.startswith("slimrt.chronos.")]
    assert len(kept) == 10 and all(one.value(key) == two.value(key) for key in kept)
    assert two.tensor("slimrt.bolt.output.output.weight").type.name == "F32"


def test_half_of_the_layers_get_more_bits(tmp_path, seq2seq):
    """q4_k_m counts the decoder's layers apart from the encoder's."""
    model, _ = read_hf(seq2seq("t5"))
    wide = {
        f"{side}.blk.{layer}.attn_v.weight": np.zeros((32, 256), np.float32)
        for side, count in {"enc": 8, "dec": 16}.items()
        for layer in range(count)
    }
    counts = {"t5.block_count": uint32(8), "t5.decoder_block_count": uint32(16)}
    tensors = {name: Tensor.of(name, values) for name, values in wide.items()}
    made, _ = requantise(ModelData({**model.metadata, **counts}, tensors), "q4_k_m")
    more = [name for name, tensor in made.tensors.items() if tensor.type.name == "Q6_K"]
    assert [name.split(".")[2] for name in more if name.startswith("enc")] == ["0", "3", "6", "7"]
    assert [name.split(".")[2] for name in more if name.startswith("dec")] == [
        "0",
        "1",
        "4",
        "7",
        "10",
        "13",
        "14",
        "15",
    ]


def test_what_reads_text_is_for_decoders_alone(seq2seq, tmp_path, convert):
    path = convert(seq2seq("whisper"))
    text = tmp_path / "text.txt"
    text.write_text("A text.")
    for options, why in (
        ({"cache": "auto"}, "choose the modes, such as --cache x --cross e"),
        ({"cache": "k", "cache_type": "f32", "calibration": text}, "leave out the calibration"),
    ):
        with pytest.raises(UnsupportedError, match=f"a decoder beside an encoder .*{why}"):
            slimrt.convert(path, tmp_path / "out.gguf", progress=False, **options)
    with pytest.raises(UnsupportedError, match="Chronos-Bolt has none"):
        slimrt.convert(third_party(BOLT), tmp_path / "out.gguf", progress=False, verify=True)
    assert list(tmp_path.iterdir()) == [text]


# What these modes keep is enough to compute K and V, so that float32 is what is left of the differences: some 1e-6,
# amplified where a mode inverts by the condition of what it inverts, which is printed.
@pytest.mark.parametrize("name, cache, cross", [
    ("whisper", "x", "e"), ("whisper", "kv", "k"), ("whisper", "k", "e1"), ("umt5", "k", "e1"), ("t5", "x", "e"),
    ("moonshine", "kv", "e"),
])  # fmt: skip
def test_verify(name, cache, cross, seq2seq, tmp_path):
    options = {"cache": cache, "cache_type": "f32", "cross": cross, "cross_type": "f32", "verify": True}
    report = slimrt.convert(seq2seq(name), tmp_path / "out.gguf", progress=False, **options)
    conditions = [one.cond for one in (*report.layers, *report.cross) if one.cond]
    print(report.verify, conditions)
    assert 0 < report.verify.max_rel < 1e-6 * max(conditions, default=1) and report.verify.same_top == 1


def test_verify_sees_what_a_type_costs(seq2seq, tmp_path):
    """Rows of 4 bits in cross-attention alone: one part in thirty of each."""
    reports = [
        slimrt.convert(seq2seq("whisper"), tmp_path / "out.gguf", cross="e", cross_type=kind, verify=True).verify
        for kind in ("f32", "q4")
    ]
    assert reports[1].max_rel > 10 * reports[0].max_rel and reports[1].max_rel > 1e-3


# ---------------------------------------------------------------- the goldens
@oracle
@pytest.mark.oracle
@each
def test_goldens_recomputed(name, seq2seq):
    fresh, kept = seq2seq_models.golden(name, seq2seq(name)), committed(name)
    assert fresh.keys() == kept.keys()
    for key in ("states", "logits"):
        assert relative(fresh[key], kept[key]) < REFERENCE
    for key in kept.keys() & {"greedy", "beams"}:
        assert np.array_equal(fresh[key], kept[key])


@oracle
@pytest.mark.oracle
def test_golden_of_bolt_recomputed():
    fresh, kept = seq2seq_models.golden_bolt(third_party(BOLT)), committed("chronos_bolt")
    assert all(relative(fresh[key], kept[key]) < REFERENCE for key in kept)
