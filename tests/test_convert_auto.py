# SPDX-License-Identifier: Apache-2.0
"""convert with cache "auto", "k+r" and "xr": what is chosen, what is said of it, and that the runtime does so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, relative, rms, third_party
from slimrt.converter.convert import convert
from slimrt.folding.calibrate import calibrated
from slimrt.folding.choose import AUTO_TYPES, choose
from slimrt.folding.planes import bytes_per_token
from slimrt.folding.precision import measured, predicted
from slimrt.folding.readback import KvReader
from slimrt.folding.report import ConvertReport
from slimrt.modelfile.gguf import read_gguf
from slimrt.modes import CACHE_TYPES

pytestmark = pytest.mark.unsanitized  # NumPy most of the time; the core is tested by others

SHIPPED = Path(__file__).parent.parent / "models"


def runs_as_said(report: ConvertReport) -> None:
    """The file holds, and the runtime allocates and uses, what the report says of each layer."""
    model = read_gguf(report.path)
    for key, name in (("modes", "mode"), ("types", "type"), ("residual_types", "residual_type"), ("ranks", "rank")):
        values = model.value(f"slimrt.cache.{key}")
        said = [getattr(layer, name) for layer in report.layers]
        if values is None:
            assert not any(said)
        else:
            assert [v.decode() if isinstance(v, bytes) else v for v in values] == said
    for key, part in (("predicted", "value"), ("measured", "output")):
        found = [getattr(layer, key) for layer in report.layers]
        values = [getattr(errors, part) if errors else 0.0 for errors in found]
        assert model.value(f"slimrt.fold.{key}_{part}") == pytest.approx(values)
    with slimrt.Model(report.path, n_ctx=64, allow_lossy=True) as loaded:
        info = loaded.info()["layers"]
        names = ("mode", "type", "rank", "residual_type", "bytes_per_token")
        assert [[row[n] for n in names] for row in info] == [[getattr(x, n) for n in names] for x in report.layers]
        assert loaded.memory()["cache_bytes_per_token"] == sum(layer.bytes_per_token for layer in report.layers)


# ---------------------------------------------------------------- the shipped models
@pytest.mark.parametrize(
    ("name", "share"),
    [("tale-llama", 0.30), pytest.param("tale-gpt2", 0.30, marks=pytest.mark.nightly), ("tale-hard", 0.42)],
)
def test_auto_meets_its_target_on_trained_models(name, share, calibration, tmp_path):
    out = tmp_path / "auto.gguf"
    source, heldout = SHIPPED / f"{name}.gguf", SHIPPED / "heldout.txt"
    report = convert(source, out, cache="auto", calibration=calibration, verify=heldout)
    print("\n" + report.table())
    runs_as_said(report)
    for layer in report.layers:
        assert max(layer.predicted.size, layer.measured.size) <= 0.01 and layer.share <= share
    assert report.warnings == [] and report.target_error == 0.01
    assert report.verify.kl < 2e-4 and report.verify.same_top > 0.97
    table = report.table()
    assert "cond(W_K)" in table and f"of {sum(layer.kv_bytes for layer in report.layers)}" not in table
    assert any(line.startswith("total: ") and "% of kv f16" in line for line in table.splitlines())
    data = json.loads(json.dumps(report.to_dict()))
    assert data["layers"][0]["measured"]["value"] == report.layers[0].measured.value


def test_a_smaller_target_takes_more_bytes(calibration, tmp_path):
    shares, plain = [], SHIPPED / "tale-gpt2.gguf"
    for target in (0.2, 0.02, 0.001):
        report = convert(plain, tmp_path / "a.gguf", cache="auto", target_error=target, calibration=calibration)
        assert all(layer.measured.size <= target for layer in report.layers)
        shares.append(sum(layer.bytes_per_token for layer in report.layers))
    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_only_types_that_are_allowed(calibration, tmp_path):
    report = convert(
        SHIPPED / "tale-gpt2.gguf",
        tmp_path / "a.gguf",
        cache="auto",
        cache_type=("f16", "bf16"),
        calibration=calibration,
    )
    assert {layer.type for layer in report.layers} <= {"f16", "bf16"}
    runs_as_said(report)


def test_a_target_out_of_reach_is_said(tmp_path):
    report = convert(SHIPPED / "tale-gpt2.gguf", tmp_path / "a.gguf", cache="auto", cache_type="q4", calibration="none")
    assert len(report.warnings) == 1
    assert "no allowed type meets the target error of 0.01 in 4 of 4 layers (the first is 0)" in report.warnings[0]


# ---------------------------------------------------------------- grouped-query attention
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param("stories260K", (0.0025, 0.01, 0.05), marks=pytest.mark.nightly),
        ("tale-gqa", (0.001, 0.01, 0.05)),
    ],
)
def test_k_knows_a_part_of_v_and_earns_its_place(name, targets, calibration, tmp_path):
    """Another mode is taken exactly where it costs fewer bytes than every kv within the target, looked for here one by
    one; k+r is, at some target."""
    source, text = SHIPPED / f"{name}.gguf", calibration
    if name == "stories260K":
        source, text = third_party("models/stories260K") / "stories260K.gguf", None
    report = convert(source, tmp_path / "a.gguf", cache="auto", calibration=text)
    print("\n" + report.table())
    runs_as_said(report)
    low, high = (f(layer.share_of_v for layer in report.layers) for f in (min, max))
    assert 0.3 < low < high < 0.95 and f"it predicts {low:.0%} to {high:.0%} of V's variance" in report.table()
    model, seen = read_gguf(source), set()
    with calibrated(source, model, text, show_progress=False) as known:
        for layer in (0, len(report.layers) - 1):
            sample, held_out = known.layer(layer)
            every_kv = [KvReader(sample, type_name) for type_name in AUTO_TYPES]
            kv = [(bytes_per_token(r.planes), predicted(r).size, measured(r, held_out).size) for r in every_kv]
            for target in targets:
                option, front = choose(sample, held_out, target, half=True)
                cheapest = min((size for size, *errors in kv if max(errors) <= target), default=float("inf"))
                assert option.error <= target and option.bytes <= cheapest
                assert (option.mode != "kv") == (option.bytes < cheapest)
                for other in front:  # what is offered beside it: nothing that a kv of as many bytes does better
                    assert not any(size <= other.bytes and error < other.predicted.size for size, error, _ in kv)
                seen.add(option.mode)
    assert {"kv", "k+r"} <= seen <= {"kv", "k+r", "lowrank"}


def test_nothing_gained_is_one_sentence(grouped, tmp_path):
    """An error that only 16 bits for all of V keep: whatever K knows, kv has as few bytes and no weights to fold."""
    report = convert(grouped, tmp_path / "a.gguf", cache="auto", target_error=5e-4, calibration="none")
    assert {(layer.mode, layer.type) for layer in report.layers} == {("kv", "f16")}
    assert "no mode beats kv here at this target: use cache='kv', cache_type='f16'" in report.table()


# ---------------------------------------------------------------- from a directory to logits
def decoded_logits(path: Path, cache: str) -> np.ndarray:
    """Of 64 tokens, each decoded over stored rows."""
    ids = [int(one) for one in np.random.default_rng(5).integers(3, 100, 80)]
    with slimrt.Model(path, cache=cache, n_ctx=96) as model:
        session = model.session()
        session.append(ids[:16])
        return np.concatenate([session.append([one]) for one in ids[16:]])


@pytest.mark.parametrize("target", [0.05, 0.01, 0.001])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gptneox", "xr"), ("gptneox_sequential", "xr"), ("olmo2", "k+r"), ("qwen3", "k+r"), ("stablelm", "xr")],
)
def test_a_directory_converted_for_auto_speaks_as_it_did(name, mode, target, tmp_path):
    """Attention's output may be off by sqrt(2) of the target in a layer. Added up over the layers as if all pointed the
    same way, and carried to the logits undiminished (beside them stands what attention had no part in)."""
    report = convert(GOLDEN / name, tmp_path / "a.gguf", cache="auto", target_error=target)
    runs_as_said(report)
    assert {layer.mode for layer in report.layers} == {mode}
    exact, got = decoded_logits(GOLDEN / name, "kv:f32"), decoded_logits(tmp_path / "a.gguf", "auto")
    assert 0 < rms(got - exact) <= len(report.layers) * np.sqrt(2) * target * rms(exact)


@pytest.mark.parametrize(
    ("name", "mode"), [("gptneox", "xr"), ("gptneox", "k+r"), ("olmo2", "k+r"), ("qwen3", "k+r"), ("bloom", "k+r")]
)
def test_a_directory_in_float32_is_exact(name, mode, tmp_path):
    """xr as it is, k+r with all of V in its residual."""
    whole = {"rank": 48, "residual_type": "f32"} if mode == "k+r" else {}
    convert(GOLDEN / name, tmp_path / "a.gguf", cache=mode, cache_type="f32", **whole)
    exact, got = decoded_logits(GOLDEN / name, "kv:f32"), decoded_logits(tmp_path / "a.gguf", "auto")
    assert relative(got, exact) < 1e-5


# ---------------------------------------------------------------- one mode for all layers
@pytest.mark.parametrize("type_name", CACHE_TYPES)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama_bias", "k+r"),
        ("qwen2_tied", "k+r"),
        ("olmo2", "k+r"),
        ("gptneox", "xr"),
        ("phi2", "xr"),
        ("qwen3", "k+r"),
        ("granite", "k+r"),
        ("bloom", "k+r"),
        ("bitnet_online", "k+r"),
    ],  # fmt: skip
)
def test_one_mode_for_all(name, mode, type_name, tmp_path):
    report = convert(
        GOLDEN / name, tmp_path / "a.gguf", cache=mode, cache_type=type_name, verify=True, allow_lossy=True
    )
    runs_as_said(report)
    most = {"f32": 1e-3, "f16": 0.02, "bf16": 0.1}.get(type_name, 10.0)
    assert report.verify.max_rel < (10.0 if name == "qwen2_tied" else most)  # K knows little of a random model's V


def test_rank_and_residual_are_what_was_asked_for(tmp_path):
    report = convert(
        GOLDEN / "llama_mha", tmp_path / "a.gguf", cache="k+r", cache_type="q8", rank=12, residual_type="f16"
    )
    runs_as_said(report)
    assert {(layer.rank, layer.residual_type) for layer in report.layers} == {(12, "f16")}
    none = convert(GOLDEN / "llama_mha", tmp_path / "b.gguf", cache="k+r", cache_type="q8", rank=0, allow_lossy=True)
    runs_as_said(none)
    assert none.layers[0].predicted.value > report.layers[0].predicted.value


def test_converting_again_for_another_cache_drops_every_fold(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    convert(GOLDEN / "gptneox", first, cache="xr", cache_type="q8")
    convert(first, second, cache="kv")
    assert not any("attn_xr" in name for name in read_gguf(second).tensors)
    convert(first, second, cache="k+r")
    convert(second, first, cache="kv")
    assert not any("attn_kr" in name or "attn_xr" in name for name in read_gguf(first).tensors)


def test_the_command(run, tmp_path):
    out = tmp_path / "a.gguf"
    code, said, _ = run("convert", GOLDEN / "llama_mha", "-o", out, "--target-error", "0.05", "--cache-type", "f16,q8")
    assert code == 0 and "of kv f16" in said and "total: " in said
    code, said, _ = run(
        "convert", GOLDEN / "llama_mha", "-o", out, "--force", "--cache", "k+r", "--rank", "8", "--json"
    )
    assert code == 0 and json.loads(said)["layers"][0]["rank"] == 8
    assert run("convert", GOLDEN / "llama_mha", "-o", out, "--force", "--cache", "k", "--exact")[0] == 0
    for wrong in (
        ["--target-error", "2"],
        ["--cache", "kv", "--rank", "8"],
        ["--cache", "k", "--cache-type", "f16,q8"],
    ):
        code, _, error = run("convert", GOLDEN / "llama_mha", "-o", out, "--force", *wrong)
        assert code != 0 and error
