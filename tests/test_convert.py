# SPDX-License-Identifier: Apache-2.0
"""The converter's files: types of the weights, folds, the report, and what is refused (directories: see
test_convert_directories.py; cache "auto", "k+r", "xr": test_convert_auto.py)."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from conftest import GOLDEN, relative, values_of
from slimrt import core
from slimrt.converter import convert as tool
from slimrt.converter.quantize import OUT_TYPES, requantise
from slimrt.errors import CacheUnsupportedError, ModelFormatError, UnsupportedError
from slimrt.folding.attention import Attention
from slimrt.modelfile import gguf as gguf_file
from slimrt.modelfile.gguf import read_gguf
from slimrt.modelfile.hf.directory import read_hf
from slimrt.modes import MODES
from tiny_model import write_tiny

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def test_the_report_says_the_trained_context(run, tiny, tmp_path):
    """With a fold and without."""
    for flags in ((), ("--outtype", "q8_0"), ("--cache", "kv"), ("--cache", "k", "--calibration", "none")):
        code, out, _ = run("convert", tiny, "-o", tmp_path / "out.gguf", "--force", *flags, "--json")
        report = json.loads(out)
        assert code == 0 and report["n_ctx_train"] == 256 and bool(report["smaller_from"]) == ("k" in flags)


@pytest.mark.parametrize(
    "name, options, mode, size, kv",
    [
        ("gpt2_erf", {"cache": "kv", "cache_type": "q8"}, "kv", 2 * (48 + 4 * 4), 192),
        ("gpt2_erf", {"cache": "x"}, "x", 96, 192),
        ("gpt2_erf", {"cache": "kivi", "cache_type": "f32"}, "kivi", 384, 192),
        ("gpt2_erf", {"outtype": "f32"}, "kv", 192, 192),
        ("deepseek2", {"cache": "latent"}, "latent", 2 * (20 + 8), 0),
    ],
)
def test_the_report_has_sizes_where_nothing_is_folded(name, options, mode, size, kv, tmp_path):
    report = tool.convert(GOLDEN / name, tmp_path / "out.gguf", progress=False, **options)
    assert [(one.mode, one.bytes_per_token, one.long_bytes, one.kv_bytes) for one in report.layers] == [
        (mode, size, size, kv)
    ] * len(report.layers)


# ---------------------------------------------------------------- types of the weights
@pytest.mark.parametrize("outtype", OUT_TYPES)
def test_outtype(outtype):
    original, _ = read_hf(GOLDEN / "gpt2_erf")
    model, warnings = requantise(original, outtype)
    # No row of this model divides into blocks of 256.
    kind = "q8_0" if outtype.startswith(("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")) else outtype
    step = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254, "q4_0": 1 / 8}[kind]
    n_other = 0
    for name, tensor in model.tensors.items():
        old, new = original.tensor(name).values(), tensor.values()
        assert tensor.load().nbytes == tensor.nbytes
        if len(tensor.shape) == 1 or name == "position_embd.weight":
            assert tensor.type.name == "F32" and np.array_equal(old, new)
        else:
            narrow = tensor.shape[-1] % 32 and kind in ("q8_0", "q4_0")
            assert tensor.type.name == ("F16" if narrow else kind.upper())
            assert np.abs(new - old).max() <= step * np.abs(old).max()
            n_other += tensor.type.name != outtype.upper()
    # One for all of a kind: a small model has a hundred whose rows fill no blocks of 256.
    assert sum(1 + int((re.findall(r" and (\d+) more become ", text) or [0])[0]) for text in warnings) == n_other
    assert len(warnings) <= 4 and all("are no multiple of" in text for text in warnings)


def test_what_is_rounded_twice_is_said(run, tmp_path):
    source = write_tiny(tmp_path / "tiny.gguf", stored="Q4_0")
    tensors = read_gguf(source).tensors
    n = sum(tensor.type.name == "Q4_0" for tensor in tensors.values())
    ends = len(tensors.keys() & {"token_embd.weight", "output.weight"})
    said = "what is q4_0 in the source is rounded a second time (matrices: {}): the unquantised model"
    report = tool.convert(source, tmp_path / "out.gguf", outtype="q8_0", progress=False)
    assert len(report.warnings) == 1 and said.format(n) in report.warnings[0]
    assert said.format(n) in "".join(run("convert", source, "-o", tmp_path / "q8.gguf", "--outtype", "q8_0")[1:])
    for outtype in ("q4_0", "f16"):  # the ends become q8_0; what is unpacked is not rounded to blocks
        report = tool.convert(source, tmp_path / "out.gguf", outtype=outtype, progress=False)
        assert [said.format(ends) in text for text in report.warnings] == [True] * (outtype == "q4_0")


def test_q4_keeps_the_ends_at_eight_bits():
    model, _ = read_hf(GOLDEN / "gpt2_erf")
    wide = {
        name: gguf_file.Tensor.of(name, np.zeros((64, 64)))
        for name in ("token_embd.weight", "output.weight", "blk.0.ffn_up.weight")
    }
    model, _ = requantise(replace(model, tensors=wide), "q4_0")
    assert [t.type.name for t in model.tensors.values()] == ["Q8_0", "Q8_0", "Q4_0"]


def test_values_that_do_not_fit_are_refused_by_name():
    model, _ = read_hf(GOLDEN / "llama_mha")
    for value, error, match in (
        (1e6, UnsupportedError, "reaches 1e\\+06, f16 only"),
        (np.nan, ModelFormatError, "fin"),
    ):
        bad = model.with_tensors(gguf_file.Tensor.of("blk.0.attn_q.weight", np.full((48, 48), value)))
        with pytest.raises(error, match=f"blk.0.attn_q.weight.*{match}"):
            requantise(bad, "f16")[0].tensor("blk.0.attn_q.weight").load()


# ---------------------------------------------------------------- folded files
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["llama_bias", "llama_wide", "llama_gqa_wide", "qwen2_mha", "gpt2_erf", "llama_gqa_tied"]
)
def test_converted_from_either_source_is_the_same_file(name, mode, convert, tmp_path):
    plain = convert(GOLDEN / name)
    attention = Attention.of(read_gguf(plain))
    outs = [tmp_path / "from_hf.gguf", tmp_path / "from_gguf.gguf"]
    for source, out in zip((GOLDEN / name, plain), outs, strict=True):
        if reason := attention.refusal(mode):
            with pytest.raises(CacheUnsupportedError, match=f"layer 0.*{re.escape(reason)}"):
                tool.convert(source, out, cache=mode, progress=False)
            assert not out.exists() and list(tmp_path.iterdir()) == []
            continue
        residual = {"rank": attention.kv_width, "residual_type": "f32"} if mode == "k+r" else {}  # a full one is exact
        report = tool.convert(source, out, cache=mode, cache_type="f32", progress=False, verify=True, **residual)
        assert report.verify.same_top == 1 and report.verify.max_rel < 1e-4
        assert [layer.mode for layer in report.layers] == [mode] * attention.n_layers
    if not attention.refusal(mode):
        one, two = (values_of(out) for out in outs)
        assert one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)


def test_folded_file_says_what_it_is(convert, tmp_path):
    plain, out = convert(GOLDEN / "gpt2_tanh"), tmp_path / "k.gguf"
    report = tool.convert(plain, out, cache="k", progress=False)
    model = read_gguf(out)
    assert model.value("slimrt.format_version") == 1
    assert model.value("slimrt.source_hash") == tool.source_hash(plain)
    assert model.value("slimrt.cache.modes") == [b"k"] * 3
    assert model.value("slimrt.activation") == "gelu_tanh"
    for key in ("cond", "error_f32", "error_f16", "error_bf16"):
        said = model.value(f"slimrt.fold.{key}")
        kept = [layer.cond if key == "cond" else layer.errors[key.removeprefix("error_")] for layer in report.layers]
        assert said == pytest.approx(kept)
    tensor = model.tensor("blk.0.attn_kv.weight")
    assert tensor.type.name == "F32" and tensor.shape == (48, 48)
    assert not model.tensor("blk.0.attn_qkv.bias").values()[-48:].any()
    reader = gguf.GGUFReader(out)  # the file is GGUF to others too
    assert len(reader.tensors) == len(model.tensors)


def test_metadata_arrives_unchanged(tmp_path):
    """Every type, also text that is not UTF-8."""
    of = GGUFValueType
    said = {
        "x.text": GGUFValue(b"a\xffb", of.STRING),
        "x.texts": GGUFValue([b"\xff", b"b"], of.ARRAY, of.STRING),
        "x.flags": GGUFValue([True, False], of.ARRAY, of.BOOL),
        "x.small": GGUFValue([-1, 2], of.ARRAY, of.INT8),
        "x.large": GGUFValue(2**63 + 5, of.UINT64),
        "x.third": GGUFValue(1 / 3, of.FLOAT64),
        "x.infinite": GGUFValue([float("inf"), 0.5], of.ARRAY, of.FLOAT32),
    }
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    model = read_gguf(write_tiny(tmp_path / "tiny.gguf")).with_metadata(said)
    gguf_file.write_gguf(source, model, show_progress=False)
    tool.convert(source, out, progress=False)
    before, after = (core.GgufFile(str(path)).fields() for path in (source, out))
    assert before["x.text"][2] == b"a\xffb" and {key: repr(value) for key, value in before.items()} == {
        key: repr(value) for key, value in after.items() if not key.startswith("slimrt.")
    }


def test_converting_again_starts_from_the_plain_model(convert, tmp_path):
    first, second = tmp_path / "k.gguf", tmp_path / "x.gguf"
    tool.convert(GOLDEN / "gpt2_erf", first, cache="k", progress=False)
    tool.convert(first, second, cache="x", outtype="f16", progress=False)
    model = read_gguf(second)
    assert not any("attn_kv" in name for name in model.tensors)
    assert model.value("slimrt.cache.modes") == [b"x"] * 3 and "slimrt.fold.cond" not in model.metadata
    assert model.value("slimrt.activation") == "gelu_erf"


def test_the_fold_is_of_the_weights_that_will_run(tmp_path):
    out = tmp_path / "k.gguf"
    tool.convert(GOLDEN / "llama_wide", out, cache="k", outtype="bf16", progress=False)
    values = values_of(out)
    w_k, w_v, w_kv = (values[f"blk.0.attn_{part}.weight"].astype(np.float64) for part in ("k", "v", "kv"))
    assert relative(w_k.T @ w_kv.T, w_v.T) < 1e-5


def test_report_reads_well(tmp_path):
    report = tool.convert(GOLDEN / "gpt2_erf", tmp_path / "k.gguf", cache="k", cache_type="bf16", progress=False)
    table = report.table()
    assert "predicted relative error of V" in table and "cond(W_K)" in table and "bf16: caution" in table
    assert any("in bf16: predicted error of V 2." in text and text.endswith("caution") for text in report.warnings)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["cache"] == "k" and len(data["layers"]) == 3 and data["layers"][0]["errors"]["f16"] < 0.01
    plain = tool.convert(GOLDEN / "gpt2_erf", tmp_path / "plain.gguf", progress=False)
    assert plain.table().splitlines()[0].endswith("plain.gguf")


def test_too_large_an_error_is_said_plainly(tmp_path):
    model, _ = read_hf(GOLDEN / "llama_mha")
    w_k = model.tensor("blk.0.attn_k.weight").values().astype(np.float64)
    u, s, vt = np.linalg.svd(w_k)
    bad = gguf_file.Tensor.of("blk.0.attn_k.weight", (u * np.geomspace(s[0], s[0] / 1e5, len(s))) @ vt)
    gguf_file.write_gguf(tmp_path / "plain.gguf", model.with_tensors(bad), show_progress=False)
    with pytest.raises(CacheUnsupportedError, match=r"error of V is [\d.]+% in layer 0 \(the limit is 5%\)"):
        tool.convert(tmp_path / "plain.gguf", tmp_path / "k.gguf", cache="k", progress=False)
    assert not (tmp_path / "k.gguf").exists()
    report = tool.convert(tmp_path / "plain.gguf", tmp_path / "k.gguf", cache="k", allow_lossy=True, progress=False)
    assert report.layers[0].cond == pytest.approx(1e5, rel=0.2) and report.layers[0].errors["f16"] > 0.05
    assert any("layer 0 (over 5% in 1 of 2 layers): do not use: use kv" in text for text in report.warnings)
    assert "do not use: use kv" in report.table()


def test_arguments_are_checked(tmp_path, convert):
    source, out = convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf"
    with pytest.raises(ValueError, match=r"unknown cache mode 'kk'; the modes are: kv, k, k\+r, v, x, xr"):
        tool.convert(source, out, cache="kk")
    with pytest.raises(ValueError, match="unknown outtype 'q5'"):
        tool.convert(source, out, outtype="q5")
    with pytest.raises(ValueError, match="unknown cache type 'f8'"):
        tool.convert(source, out, cache_type="f8")
    with pytest.raises(ValueError, match=r"cache_type is of the rows of a cache.*for none: name it too \(--cache\)"):
        tool.convert(source, out, outtype="q8_0", cache_type="q8")
    with pytest.raises(ValueError, match=r"'k\+r:q8' says cache_type, which was given too"):
        tool.convert(source, out, cache="k+r:q8", cache_type="f16")
    with pytest.raises(ValueError, match="2 cache types were given; several.*'auto'"):
        tool.convert(source, out, cache="k", cache_type=("f16", "q8"))
    with pytest.raises(ValueError, match="target_error is for cache 'auto' and 'lowrank', not for 'k'"):
        tool.convert(source, out, cache="k", target_error=0.1)
    with pytest.raises(ValueError, match="target_error must be above 0 and below 1"):
        tool.convert(source, out, cache="auto", target_error=1.0)
    with pytest.raises(ValueError, match=r"rank and residual_type are for cache 'k\+r', not for 'xr'"):
        tool.convert(source, out, cache="xr", rank=4)
    with pytest.raises(ValueError, match="rank must be from 0 to 48, the width of V, got 52"):
        tool.convert(source, out, cache="k+r", rank=52)
    with pytest.raises(ValueError, match=r"exact folds are those of cache 'k' and 'v', not of 'k\+r'"):
        tool.convert(source, out, cache="k+r", exact=True)
    with pytest.raises(ValueError, match="is the source itself"):
        tool.convert(source, source.parent / "." / source.name)
    with pytest.raises(FileNotFoundError, match="no_such"):
        tool.convert(tmp_path / "no_such.gguf", out)
    with pytest.raises(FileNotFoundError, match="missing: no such directory"):
        tool.convert(source, tmp_path / "missing" / "out.gguf")
    with pytest.raises(IsADirectoryError, match="is a directory; name the file to write"):
        tool.convert(source, tmp_path)
    out.write_text("old")
    with pytest.raises(FileExistsError, match="out.gguf exists"):
        tool.convert(source, out, overwrite=False)
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_a_cache_may_be_said_as_a_model_takes_it(tmp_path, convert):
    source, apart = convert(GOLDEN / "llama_mha"), {"cache_type": "q8", "rank": 8, "residual_type": "q4"}
    for out, options in (("1.gguf", {"cache": "k+r:q8:8:q4"}), ("2.gguf", {"cache": "k+r"} | apart)):
        tool.convert(source, tmp_path / out, progress=False, **options)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "2.gguf").read_bytes()


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("slimrt.format_version", gguf_file.uint32(7), "format_version is 7; this slimrt reads 1"),
        ("split.count", gguf_file.uint32(3), "shard 1 of 3, whose names end with -00001-of-00003.gguf"),
        (
            "general.architecture",
            gguf_file.string("mamba"),
            "architecture 'mamba' is not supported.*llama, gpt2, gptneox, olmo2",
        ),
    ],
)
def test_files_that_are_refused(key, value, match, tmp_path):
    model, _ = read_hf(GOLDEN / "llama_mha")
    gguf_file.write_gguf(tmp_path / "in.gguf", model.with_metadata({key: value}), show_progress=False)
    with pytest.raises(UnsupportedError, match=match):
        tool.convert(tmp_path / "in.gguf", tmp_path / "out.gguf", progress=False)
