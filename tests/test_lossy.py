# SPDX-License-Identifier: Apache-2.0
"""A cache mode whose error of V is over 5 % in a layer does not run, convert or verify unasked (docs/precision.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import slimrt
from slimrt import CacheUnsupportedError
from slimrt.folding.gate import percent
from slimrt.modelfile.gguf import ModelData, Tensor, read_gguf, write_gguf

SHIPPED = Path(__file__).parent.parent / "models"
TALE, T5 = SHIPPED / "tale-llama.gguf", SHIPPED / "tale-t5.gguf"
# the figure, the layer, and the nearest that is fine
REFUSED = (
    r"predicted error of V is \d+\.\d% in layer 0 \(the limit is 5%\): use k\+r \(--cache k\+r:q8\).*--allow-lossy"
)
PROMPT = ("generate", TALE, "-p", "Anna was a baker", "-n", 3, "--temp", 0)

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]


def without(source: Path, target: Path, *parts: str) -> Path:
    """A file without the metadata whose keys begin with one of these."""
    model = read_gguf(source)
    kept = {key: value for key, value in model.metadata.items() if not key.startswith(parts)}
    write_gguf(target, ModelData(kept, model.tensors), show_progress=False)
    return target


def test_loading_refuses_it_and_names_what_is_fine():
    with pytest.raises(CacheUnsupportedError, match=REFUSED):
        slimrt.Model(TALE, cache="k:q8", n_ctx=32)
    with pytest.raises(CacheUnsupportedError, match=REFUSED):
        slimrt.Model(TALE, cache=["k:q8", "kv", "kv", "kv"], n_ctx=32)
    with slimrt.Model(TALE, cache="k+r:q8", n_ctx=32) as model:  # what it advises
        assert model.generate("Anna", max_tokens=1).tokens


def nearly_singular(source: Path, target: Path) -> Path:
    """With a W_K in layer 1 whose singular values fall to what float32 can just tell from nothing."""
    model = read_gguf(source)
    u, s, v = np.linalg.svd(model.tensor("blk.1.attn_k.weight").values().astype(np.float64))
    doubtful = Tensor.of("blk.1.attn_k.weight", u * (s[0] * np.geomspace(1, 1e-7, len(s))) @ v)
    write_gguf(target, model.with_tensors(doubtful), show_progress=False)
    return target


def test_float32_rows_are_gated_too(tiny, tmp_path):
    path = nearly_singular(tiny, tmp_path / "doubtful.gguf")
    slimrt.Model(tiny, cache="k:f32", n_ctx=32).close()
    with pytest.raises(CacheUnsupportedError, match=r"too imprecise in f32: .*in layer 1 .*use k\+r") as refused:
        slimrt.Model(path, cache="k:f32", n_ctx=32)
    assert "or type f32" not in str(refused.value)
    with pytest.raises(CacheUnsupportedError, match="in layer 1") as refused:
        slimrt.Model(path, cache="k:f16", n_ctx=32)
    assert "or type f32" not in str(refused.value)  # it would be refused, too
    assert not slimrt.plan(path, cache="k:f32").fits
    slimrt.Model(path, cache="k:f32", n_ctx=32, allow_lossy=True).close()


@pytest.mark.parametrize("cache", ["k:f16", "k:f32", "kv:q4", "k+r:q8"])
def test_what_loses_less_runs_as_ever(cache):
    slimrt.Model(TALE, cache=cache, n_ctx=32, progress=False).close()


def test_who_insists_gets_it_and_is_told_once(capfd):
    with slimrt.Model(TALE, cache="k:q8", n_ctx=32, allow_lossy=True, verbose=True) as model:
        assert model.info()["layers"][0]["mode"] == "k"
        said = model.generate("Anna", max_tokens=1).cache.lossy
    err = capfd.readouterr().err
    assert err.count("in layer 0") == 1 and "mode k in q8 loses more than 1 % of V in layers 0, 1" in err
    assert said.startswith("self-attention cache mode k in q8 loses") and said in err
    with slimrt.Model(TALE, cache="k+r:q8", n_ctx=32, allow_lossy=True, progress=False) as model:
        assert model.generate("Anna", max_tokens=1).cache.lossy == ""  # nothing to insist on


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (0.0503, "5.03%"),
        (0.05004, "5.004%"),
        (0.0512, "5.1%"),
        (0.2, "20.0%"),
        (0.0496, "4.96%"),
        (0.01004, "1.004%"),
        (0.0104, "1.04%"),
        (0.0112, "1.1%"),
    ],
)
def test_a_figure_beside_the_limit_is_told_from_it(error, said):
    assert percent(error) == said


def test_verbs_refuse_it(run):
    code, out, err = run(*PROMPT, "--cache", "k:q8")
    assert code == 1 and "baker" not in out and "k+r:q8" in err
    assert run(*PROMPT, "--cache", "k:q8", "--allow-lossy")[0] == 0
    assert run("bench", TALE, "--compare", "kv:f16,k:q8", "-n", 1, "-p", 1, "-r", 1)[0] == 1


def test_quality_tools_measure_it_since_that_is_asked_of_them():
    found = slimrt.compare_caches(TALE, SHIPPED / "heldout.txt", ["k:q8"], max_tokens=64, progress=False)
    assert found.rows[1].kl_mean > 0.1


@pytest.mark.parametrize("options", [(), ("--verify",), ("--exact",)])
def test_conversion_refuses_it(run, tmp_path, options):
    out = tmp_path / "k.gguf"
    code, _, err = run("convert", TALE, "-o", out, "--cache", "k", "--cache-type", "q8", *options)
    assert code == (3 if "--verify" in options else 1) and "k+r:q8" in err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def insisted(tmp_path_factory):
    """A file that was converted for k in q8, by someone who insisted."""
    path = tmp_path_factory.mktemp("lossy") / "k.gguf"
    report = slimrt.convert(TALE, path, cache="k", cache_type="q8", allow_lossy=True, verify=True, progress=False)
    assert any("in q8: predicted error of V" in text for text in report.warnings) and report.verify is not None
    return path


def test_a_file_made_for_it_is_refused_at_load(insisted, tmp_path):
    for path in (insisted, without(insisted, tmp_path / "older.gguf", "slimrt.fold.")):  # or predicted anew
        with pytest.raises(CacheUnsupportedError, match=REFUSED):
            slimrt.Model(path, n_ctx=32)
        slimrt.Model(path, n_ctx=32, allow_lossy=True).close()


def test_what_a_conversion_measured_counts(insisted, tmp_path):
    """More than what is predicted: of two figures in a file the larger one is believed."""
    made, doctored = tmp_path / "kr.gguf", tmp_path / "worse.gguf"
    slimrt.convert(TALE, made, cache="k+r", cache_type="q8", progress=False)
    slimrt.Model(made, n_ctx=32).close()
    model = read_gguf(made)
    measured = model.metadata["slimrt.fold.measured_value"]
    worse = replace(measured, value=[*measured.value[:2], 0.123, measured.value[3]])
    write_gguf(doctored, model.with_metadata({"slimrt.fold.measured_value": worse}), show_progress=False)
    with pytest.raises(CacheUnsupportedError, match=r"12\.3% in layer 2 .*use kv"):
        slimrt.Model(doctored, n_ctx=32)


CHOICES = ["kv:q4", "k:f16", "k:bf16", "k:q8", "k+r:q8", "k+r:q4"]


@pytest.mark.parametrize("choice", CHOICES)
def test_plan_and_loading_agree(choice):
    planned = slimrt.plan(TALE, cache=choice, n_ctx=64)
    try:
        slimrt.Model(TALE, cache=choice, n_ctx=64, progress=False).close()
        assert planned.fits and planned.asked.too_imprecise == ""
    except CacheUnsupportedError as error:
        assert not planned.fits and planned.asked.too_imprecise
        assert str(error).split("error of V")[0] == planned.asked.too_imprecise.split("error of V")[0]
    assert slimrt.plan(TALE, cache=choice, n_ctx=64, allow_lossy=True).fits


def test_plan_and_loading_agree_beside_an_encoder():
    for mode in ("k", "v", "x"):
        planned = slimrt.plan(T5, cache=f"{mode}:q8", cross="e")
        try:
            slimrt.Model(T5, cache=f"{mode}:q8", cross="e", progress=False).close()
            assert planned.fits
        except CacheUnsupportedError:
            assert not planned.fits and "too imprecise in q8" in planned.asked.too_imprecise


def test_plan_and_inspect_say_it(run):
    code, out, _ = run("plan", TALE, "--cache", "k:q8")
    assert code == 1 and "too imprecise" in out and "is refused" in out
    row = {row.cache: row for row in slimrt.plan(TALE, cache="kv:q8").rows}["k"]
    assert row.fits and "layer 0" in row.too_imprecise
    out = run("inspect", TALE)[1]
    assert "not in every type" in out and "q8" in out


def test_no_way_out_that_would_be_refused_is_offered():
    with pytest.raises(slimrt.WontFitError, match="15.0 MiB allowed") as refused:
        slimrt.Model(TALE, cache="kv:q8", n_ctx=2048, memory_limit="15MiB")
    assert "--cache k" not in refused.value.options


# ---------------------------------------------------------------- converting again
@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    path = tmp_path_factory.mktemp("folded") / "kr.gguf"
    slimrt.convert(TALE, path, cache="k+r", cache_type="q8", progress=False)
    return path


def test_converting_again_keeps_the_fold(folded, tmp_path):
    report = slimrt.convert(folded, tmp_path / "again.gguf", progress=False)
    assert not report.warnings
    before, after = read_gguf(folded), read_gguf(tmp_path / "again.gguf")
    assert before.tensors.keys() == after.tensors.keys()
    same = [key for key in before.metadata if key.startswith(("slimrt.cache.", "slimrt.fold."))]
    assert same and all(before.value(key) == after.value(key) for key in same)
    with slimrt.Model(tmp_path / "again.gguf", n_ctx=32) as model:
        assert model.info()["layers"][0]["mode"] == "k+r"


def test_converting_again_for_the_same_cache_folds_again(folded, tmp_path):
    report = slimrt.convert(folded, tmp_path / "again.gguf", cache="k+r", progress=False)
    assert not any("left out" in text for text in report.warnings)
    assert any("attn_kr" in name for name in read_gguf(tmp_path / "again.gguf").tensors)


@pytest.mark.parametrize("options", [{"outtype": "q8_0"}, {"cache": "kv"}])
def test_converting_again_for_other_weights_or_caches_says_that_the_fold_is_gone(folded, tmp_path, options):
    report = slimrt.convert(folded, tmp_path / "again.gguf", progress=False, **options)
    assert any("kr.gguf was converted with --cache k+r; that is left out" in text for text in report.warnings)
    assert not any("attn_kr" in name for name in read_gguf(tmp_path / "again.gguf").tensors)
