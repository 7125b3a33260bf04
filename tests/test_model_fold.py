# SPDX-License-Identifier: Apache-2.0
"""Modes k+r and xr through slimrt.Model: what is folded while loading, what a folded file says, sessions."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, relative
from slimrt import CacheConfig
from slimrt.folding import fold

IDS = [int(id) for id in np.random.default_rng(2).integers(6, 60, 40)]
KR = "k+r:f32:32:f32"  # as wide as V: all of V's error is corrected


def decoded(path, cache, **options) -> np.ndarray:
    """Logits of IDS: ten at once, then one at a time."""
    with slimrt.Model(path, cache=cache, n_ctx=64, **options) as model, model.session() as session:
        return np.concatenate([session.append(IDS[:10]), *(session.append([id]) for id in IDS[10:])])


@pytest.fixture
def folded(monkeypatch):
    """What fold_layers was asked for: (mode, arguments)."""
    asked, real = [], fold.fold_layers

    def spy(path, mode, **options):
        asked.append((mode, {key: value for key, value in options.items() if key not in ("progress", "judge")}))
        return real(path, mode, **options)

    monkeypatch.setattr(fold, "fold_layers", spy)
    return asked


@pytest.mark.parametrize("cache", [KR, CacheConfig("k+r", "f32", 32, "f32"), [KR, "kv:f32"]])
def test_a_full_residual_is_kv(tiny, cache):
    """Rows in float32 and a residual as wide as V: sums of 32 terms in float32 in two layers, in another order."""
    assert relative(decoded(tiny, cache), decoded(tiny, "kv:f32")) < 1e-5


@pytest.mark.parametrize("name", ["gptneox", "phi2"])
def test_partial_rotary_models_keep_their_input(convert, name):
    """xr in float32 multiplies by an inverse and its condition, which is below 1e3 for these random weights."""
    path = convert(GOLDEN / name)
    assert relative(decoded(path, "xr:f32"), decoded(path, "kv:f32")) < 1e-4


def test_only_what_is_missing_is_folded(tiny, folded, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 40)
    decoded(tiny, ["k+r:q8:8", "kv:f16"], calibration=text)
    decoded(tiny, "k+r:bf16:4", calibration="none")
    decoded(tiny, ["k+r:q8", "k"], calibration="none")
    assert folded == [
        ("k+r", {"cache_type": "q8", "rank": 8, "residual_type": "q4", "calibration": text, "layers": [0]}),
        ("k+r", {"cache_type": "bf16", "rank": 4, "residual_type": "q8", "calibration": "none", "layers": [0, 1]}),
        ("k+r", {"cache_type": "q8", "rank": 8, "residual_type": "q4", "calibration": "none", "layers": [0]}),
        ("k", {"cache_type": "f16", "rank": None, "residual_type": None, "calibration": "none", "layers": [1]}),
    ]


def test_a_folded_file_says_what_it_is(tiny, folded, tmp_path):
    out = tmp_path / "kr.gguf"
    slimrt.convert(tiny, out, cache="k+r", cache_type="q8", rank=12, residual_type="q8", calibration="none")
    with slimrt.Model(out, n_ctx=64) as model:
        layers = model.info()["layers"]
        used = model.generate(IDS, max_tokens=2, ignore_eos=True).cache
    got = [(one["mode"], one["type"], one["rank"], one["residual_type"]) for one in layers]
    assert got == [("k+r", "q8", 12, "q8")] * 2 and folded == []
    assert used.ranks == (12, 12) and used.residual_types == ("q8", "q8")
    with pytest.raises(ValueError, match="rank 12 in layer 0, not 4"):
        slimrt.Model(out, cache="k+r", rank=4)
    plan = slimrt.plan(out, n_ctx=64)
    assert plan.asked == next(row for row in plan.rows if row.cache == "k+r")
    kv = next(row for row in plan.rows if row.cache == "kv")
    assert kv.types == ("f16", "f16") and kv.mapped < plan.asked.mapped  # folded weights are not mapped for kv


def test_sessions_belong_to_a_residual(tiny, tmp_path):
    with (
        slimrt.Model(tiny, cache="k+r:q8:8:q8", n_ctx=64, n_seqs=2, calibration="none", allow_lossy=True) as model,
        model.session() as session,
    ):
        session.append(IDS)
        session.save(tmp_path / "s")
        wanted = session.append([7])
        with model.load_session(tmp_path / "s") as again:
            np.testing.assert_array_equal(again.append([7]), wanted)
    for cache in ("k+r:q8:4:q8", "k+r:q8:8:q4", "k+r:q8:0", "kv:q8"):
        with slimrt.Model(tiny, cache=cache, n_ctx=64, calibration="none", allow_lossy=True) as model:
            with pytest.raises(slimrt.ModelFormatError, match="another cache"):
                model.load_session(tmp_path / "s")


def test_the_command_line_takes_a_residual(run, tiny, clean_environment):
    arguments = ("generate", tiny, "-p", "the cat", "-n", 3, "--json", "--calibration", "none", "--cache")
    code, out, _ = run(*arguments, "k+r:q8:12:q8")
    assert code == 0 and json.loads(out)["cache"]["ranks"] == [12, 12]
    flags = ("k+r", "--cache-type", "q8", "--rank", 12, "--residual-type", "q8")
    assert json.loads(run(*arguments, *flags)[1])["cache"] == json.loads(out)["cache"]
    code, out, _ = run("plan", tiny, "--cache", "k+r:q8:12:q8,kv:f16")
    assert code == 0 and out.splitlines()[-1].startswith("k+r q8 + 12 q8, kv f16: ")
    assert re.search(r"^k\+r +f16 \+ 4 q8 ", out, re.M)
    assert "in q8 + 8 q4" in run("inspect", tiny)[1]


def test_what_a_residual_is_worth(tiny):
    """Naive K-only loses V in 8 bits; at the same bytes, half of kv's, the residual brings it back."""
    caches = ["kv:q8", "k:q8", "k+r:q8:0", "k+r:q8:8:q8"]
    rows = slimrt.compare_caches(tiny, IDS * 4, caches, window=64, calibration="none").rows
    kl = {row.cache: row.kl_mean for row in rows}
    size = {row.cache: row.bytes_per_token for row in rows}
    assert min(kl["k q8"], kl["k+r q8"]) > 10 * kl["k+r q8 + 8 q8"]
    assert size["k+r q8 + 8 q8"] == size["k q8"] == size["kv q8"] / 2  # heads are 8 wide here: many scales
    with pytest.raises(slimrt.CacheUnsupportedError, match="all columns of K are rotated"):
        slimrt.Model(tiny, cache="xr")
