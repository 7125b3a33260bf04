# SPDX-License-Identifier: Apache-2.0
"""Conversion for mode lowrank: its levels from TALE's parameters, and the file that runs with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, ids_of, relative
from slimrt import CacheUnsupportedError, core
from slimrt.converter import convert as tool
from slimrt.folding.lowrank import ChannelPlane, levels_text
from slimrt.modelfile.gguf import read_gguf
from slimrt.modelfile.reading import read_model

TALE = Path(__file__).parent.parent / "models" / "tale-llama.gguf"
USUAL = "q2@0.5+q4*0.1"

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]


# ---------------------------------------------------------------- the text
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, USUAL),
        ({"rank": 0.5, "bits": (2, 4), "share": 0.1, "sinks": 4}, USUAL),
        ({"rank": 0.25}, "q2@0.25+q4*0.1"),
        ({"rank": (0.25, 0.5), "bits": [2, 3, 8], "share": (0.2,)}, "q2@0.25+q3@0.5*0.2+q8*0.1"),
        ({"bits": 16, "rank": 1, "sinks": 0}, "f16+sinks=0"),
        ({"bits": (8, 16), "share": 1, "sinks": 64}, "q8@0.5+f16*1+sinks=64"),
        ({"rank": 0.25, "predict": True}, "q2@0.25+q4*0.1+predict"),
        ({"rank": np.float32(0.5), "bits": np.int64(4)}, "q4@0.5"),
    ],
)
def test_levels_from_parameters(given, text):
    assert levels_text(**given) == text


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"bits": (2, 5)}, ValueError, "bits must be of 2, 3, 4, 8, 16, got 2, 5"),
        ({"bits": ()}, ValueError, "bits must be of 2, 3, 4, 8, 16, got none"),
        ({"bits": 2.5}, TypeError, "bits must be a whole number, got 2.5"),
        ({"bits": 2, "share": 0.1}, ValueError, "1 ranks and 1 shares were given for 1 levels (bits)"),
        ({"rank": (0.1, 0.2, 0.3)}, ValueError, "3 ranks and 0 shares were given for 2 levels (bits)"),
        ({"rank": (0.5, 0.4)}, ValueError, "newer rows keep fewer columns of V than older ones"),
        ({"bits": (4, 2)}, ValueError, "newer rows have fewer bits than older ones"),
        ({"rank": 0}, ValueError, "'q2@0': V keeps no column"),
        ({"rank": "0.5"}, TypeError, "rank must be a number, got '0'"),
        ({"share": 1.5}, ValueError, "'1.5' is not a number from 0 to 1"),
        ({"bits": (2, 3, 4), "share": (0.6, 0.5)}, ValueError, "the shares add up to more than 1"),
        ({"sinks": -1}, ValueError, "'-1' is not a number from 0"),
        ({"sinks": 0.5}, TypeError, "sinks must be a whole number, got 0.5"),
    ],
)
def test_parameters_that_do_not_go_together(given, error, said):
    with pytest.raises(error, match=re.escape(said)):
        levels_text(**given)


# ---------------------------------------------------------------- the file
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_mha", {}),
        ("llama_gqa_tied", {"rank": (0.25, 0.5), "bits": (2, 3, 8), "share": (0.2, 0.1), "sinks": 7, "heads": 1}),
        ("qwen2_mha", {"cache_type": "q3/q4@0.5+f16*0.2", "heads": 2}),
        ("gpt2_tanh", {"bits": 8, "group": 32}),
        ("llama_mha", {"predict": True}),
    ],
)
def test_a_converted_file_runs_as_it_says(name, options, convert, tmp_path):
    plain, out = convert(GOLDEN / name), tmp_path / "out.gguf"
    report = tool.convert(plain, out, cache="lowrank", progress=False, **options)
    given = {key: value for key, value in options.items() if key in ("rank", "bits", "share", "sinks", "predict")}
    text = options.get("cache_type") or levels_text(**given)
    model = read_gguf(out)
    n_layers = len(report.layers)
    assert model.value("slimrt.cache.modes") == [b"lowrank"] * n_layers
    assert model.value("slimrt.cache.types") == [text.encode()] * n_layers
    engine = core.Engine(str(out), n_ctx=128)
    for layer, said in zip(report.layers, engine.info()["layers"], strict=True):
        assert (layer.mode, layer.type, layer.bytes_per_token) == (said["mode"], said["type"], said["bytes_per_token"])
        assert said["type"] == text and layer.errors == {} and 0 < layer.predicted.value < 1
    heads, dim = options.get("heads"), engine.info()["head_dim"]
    if heads:
        assert model.tensor("blk.0.attn_v_latent.weight").shape[1] == heads * dim
    ids = ids_of(0, 100) % 64
    with slimrt.Model(plain, cache=f"lowrank:{text}", n_ctx=128, calibration="none", progress=False) as loaded:
        assert loaded.info()["layers"][0]["type"] == text
    got = engine.append([(engine.new_sequence(), ids)], all_logits=True)
    kv = core.Engine(str(plain), cache="kv", n_ctx=128)
    assert relative(got, kv.append([(kv.new_sequence(), ids)], all_logits=True)) < 1e-4  # nothing has aged in a prompt


def test_what_predicts_v_is_not_in_the_way_of_other_caches(convert, tmp_path):
    """The file runs with kv, with the same bits, and another conversion leaves the fold out."""
    plain, out = convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf"
    tool.convert(plain, out, cache="lowrank", predict=True, progress=False)
    assert "blk.0.attn_v_predict.weight" in read_gguf(out).tensors
    ours, theirs = (core.Engine(str(path), cache="kv", n_ctx=32) for path in (out, plain))
    got, wanted = (one.append([(one.new_sequence(), ids_of(0, 20) % 64)]) for one in (ours, theirs))
    assert np.array_equal(got, wanted)
    assert read_model(out)[0].tensors.keys() == read_gguf(plain).tensors.keys()


def test_report(tmp_path, run):
    """Errors of the oldest rows, as measured on text held out; said to be lossy in one sentence, and not refused."""
    out = tmp_path / "low.gguf"
    code, said, err = run("convert", TALE, "-o", out, "--cache", "lowrank", "--rank", "0.5", "--bits", "2,4", "--share",
                          "0.1", "--sinks", 4, "--group", 32, "--heads", 2, "--verify")  # fmt: skip
    assert (code, err) == (0, "") and f"  lowrank  {USUAL}  " in said and "cond(W_K)" in said
    assert said.count("lossy by choice") == 1 and "warning" not in said and "verified on 129 tokens" in said
    data = json.loads(
        run("convert", TALE, "-o", out, "--force", "--cache", "lowrank", "--rank", "1", "--bits", "16", "--json")[1]
    )
    assert data["cache_type"] == "f16" and data["warnings"] == []
    assert all(layer["measured"]["value"] < 1e-3 and layer["measured"]["output"] < 1e-3 for layer in data["layers"])
    for half, whole in zip(
        tool.convert(TALE, out, cache="lowrank", rank=0.5, bits=16, progress=False).layers,
        tool.convert(TALE, out, cache="lowrank", rank=0.9, bits=16, progress=False).layers,
        strict=True,
    ):
        assert 0.05 < half.measured.value < 0.5 and whole.measured.value < half.measured.value
        assert half.predicted.value == pytest.approx(half.measured.value, rel=0.15)


def test_columns_that_all_are_kept_lose_nothing_but_codes():
    """K's share of an error: scales for each channel of a block, the rows of none as they were written."""
    x = np.random.default_rng(0).normal(size=(70, 8)).astype(np.float32)
    x[:, 3] *= 100
    plane = ChannelPlane(8, 2, "q4")
    read = plane.round(x)
    assert plane.bytes == 8 * (16 + 4) // 32
    assert np.array_equal(read[64:], x[64:]) and not np.array_equal(read[:64], x[:64])
    steps = np.ptp(x[:32], axis=0) / 15
    assert (np.abs(read[:32] - x[:32]) <= steps / 2 * 1.01 + 1e-2 * np.abs(x[:32]).max(axis=0) / 15).all()
    assert np.array_equal(ChannelPlane(8, 2, "f16").round(x), x.astype(np.float16).astype(np.float32))
    assert ChannelPlane(8, 2, "f16").bytes == 16


def test_a_file_for_kivi_says_its_levels(convert, tmp_path):
    out = tmp_path / "kivi.gguf"
    tool.convert(convert(GOLDEN / "llama_mha"), out, cache="kivi", cache_type="q2+q4*0.1+sinks=4", progress=False)
    layer = core.Engine(str(out), n_ctx=64).info()["layers"][0]
    assert (layer["mode"], layer["type"]) == ("kivi", "q2+q4*0.1+sinks=4")


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"cache": "lowrank", "group": 64}, ValueError, "group must be 32, got 64: rows lie in blocks of 32 tokens"),
        (
            {"cache": "lowrank", "heads": 3},
            CacheUnsupportedError,
            "3 KV heads are to share a latent, and a layer has",
        ),
        ({"cache": "lowrank", "heads": 0}, CacheUnsupportedError, "give a number that divides it"),
        ({"cache": "lowrank", "cache_type": "q2", "rank": 0.5}, ValueError, "give one or the other"),
        ({"cache": "lowrank", "cache_type": "q2+q6"}, slimrt.UnsupportedError, "q6"),
        ({"cache": "lowrank", "residual_type": "q4"}, ValueError, "rank and residual_type are for cache 'k+r'"),
        (
            {"cache": "k", "bits": 2},
            ValueError,
            "bits, share, sinks, group and heads are for cache 'lowrank'",
        ),
        ({"cache": "lowrank", "cache_type": "q2", "predict": True}, ValueError, "sinks and predict make the levels"),
        ({"cache": "k", "predict": True}, ValueError, "predict is for cache 'lowrank' and 'auto', not for 'k'"),
        ({"cache": "kivi", "cache_type": "q2+predict"}, ValueError, "latents of V, and cache mode 'kivi' has none"),
        ({"cache": "lowrank", "cache_type": "q2+eager+predict"}, ValueError, "before there are stored keys"),
        ({"cache": "kv", "group": 32}, ValueError, "are for cache 'lowrank', not for 'kv'"),
        ({"heads": 2}, ValueError, "are for cache 'lowrank', not for a conversion that names none"),
        ({"cache": "k+r", "rank": 0.5}, ValueError, "must be a whole number, the width of its residual, got 0.5"),
        ({"cache": "k+r", "rank": [4, 8]}, ValueError, "must be a whole number"),
        ({"cache": "kivi", "rank": 4}, ValueError, "rank and residual_type are for cache 'k+r', not for 'kivi'"),
        ({"cache": "kv", "cache_type": "q2+q4"}, ValueError, "unknown cache type 'q2+q4'"),
    ],
)
def test_arguments_are_checked(options, error, said, convert, tmp_path):
    with pytest.raises(error, match=re.escape(said)):
        tool.convert(convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf", progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_flags_that_are_no_numbers(run, tmp_path):
    for flag, value in (("--bits", "2,x"), ("--rank", "half"), ("--sinks", "-1"), ("--heads", "0")):
        code, _, err = run("convert", TALE, "-o", tmp_path / "out.gguf", "--cache", "lowrank", flag, value)
        assert code == 2 and f"{flag}: must" in err
