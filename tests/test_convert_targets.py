# SPDX-License-Identifier: Apache-2.0
"""Levels and modes that convert chooses: for an error (--target-error) or for bytes (--target-bytes)."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN
from slimrt import core
from slimrt.folding.budget import Budget, Offer, allocate
from slimrt.folding.lowrank import LEVEL_TYPES, aged_levels
from slimrt.folding.report import TOO_LARGE, ConvertReport
from slimrt.measure.quality import compare_caches
from test_convert_auto import runs_as_said

MODELS = Path(__file__).parent.parent / "models"
TALE, HARD, GQA = (MODELS / f"tale-{name}.gguf" for name in ("llama", "hard", "gqa"))

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]


@pytest.fixture
def converted(calibration):
    """converted(path, cache, ...) -> what is reported of that conversion, which runs so."""

    def make(out: Path, cache: str, source: Path = GQA, **options) -> ConvertReport:
        options = {"calibration": calibration} | options
        report = slimrt.convert(source, out, cache=cache, progress=False, **options)
        runs_as_said(report)
        return report

    return make


def long_bytes(report: ConvertReport) -> float:
    return sum(layer.long_bytes for layer in report.layers)


# ---------------------------------------------------------------- spending bytes
def random_layers(seed: int) -> list[list[Offer]]:
    random = np.random.default_rng(seed)
    return [
        [Offer(float(size), float(random.uniform(0, 1) / size), "kv", str(size)) for size in random.integers(1, 50, 6)]
        for _ in range(4)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_spent_nearly_as_well_as_possible(seed):
    """Against every combination: never more bytes, and no more loss than the best of those a step smaller."""
    layers = random_layers(seed)
    every = [(sum(one.bytes for one in some), sum(one.loss for one in some)) for some in itertools.product(*layers)]
    least, most = min(size for size, _ in every), max(size for size, _ in every)
    for budget in np.linspace(least, most, 9):
        chosen = allocate(layers, budget)
        assert all(one in offers for one, offers in zip(chosen, layers, strict=True))
        size, loss = (sum(getattr(one, name) for one in chosen) for name in ("bytes", "loss"))
        assert size <= budget
        step = max(one.bytes for offers in layers for one in offers)
        smaller = [other for other_size, other in every if other_size <= budget - step]
        assert loss >= min(other for other_size, other in every if other_size <= budget) - 1e-12
        assert not smaller or loss <= min(smaller) + 1e-12
    with pytest.raises(ValueError, match=re.escape(f"the least that these layers can have is {least:.6g}")):
        allocate(layers, least - 0.5)


def test_a_budget_as_people_write_it():
    assert Budget.of(600).bytes(4096) == Budget.of("600").bytes(0) == 600
    assert Budget.of("8x").bytes(4096) == 512 and Budget.of(" 2.5 x").bytes(1000) == 400
    assert Budget.of("1KiB").bytes(0) == 1024
    for wrong in ("", "x", "-8x", "0x", "0", 0, -1, "many", "8 times"):
        with pytest.raises(ValueError, match="target_bytes must be"):
            Budget.of(wrong)


def test_newer_rows_keep_no_less():
    for type_k, type_v in itertools.product(LEVEL_TYPES, repeat=2):
        oldest, newer = aged_levels(type_k, type_v, 0.375).of
        assert (oldest.type_k, oldest.type_v, oldest.part) == (type_k, type_v, 0.375)
        assert newer.part == 1 and newer.rows == 64 and newer.type_k == newer.type_v == "q8"
    assert aged_levels("q4", "q2", 1, ["q2", "q4"]).text == "q4/q2+q4*64"


# ---------------------------------------------------------------- an error
def test_levels_for_an_error(converted, tmp_path):
    """Within it, predicted and measured; smaller ones cost more; and none could be had for less, by hand."""
    sizes, most = [], 0
    for target in (0.05, 0.1, 0.3):
        report = converted(tmp_path / "a.gguf", "lowrank", target_error=target)
        assert report.warnings == [] and report.target_error == target
        assert all(max(layer.predicted.size, layer.measured.size) <= target for layer in report.layers)
        assert {layer.mode for layer in report.layers} == {"lowrank"} and "lossy by choice" in report.table()
        sizes.append(long_bytes(report))
        most = max(most, len({layer.type for layer in report.layers}))
    assert sizes[0] > sizes[1] > sizes[2] and most > 1
    coarser = {"q3": "q2", "q4": "q3", "q8": "q4"}
    for layer in report.layers[:1]:
        oldest = core.levels("lowrank", layer.type).of[0]
        less = f"{coarser.get(oldest.type_k, 'q2')}/{coarser.get(oldest.type_v, 'q2')}@{oldest.part}+q8*64"
        other = converted(tmp_path / "b.gguf", "lowrank", cache_type=less).layers[layer.layer]
        assert other.long_bytes < layer.long_bytes
        assert max(other.predicted.size, other.measured.size) > target


def test_an_error_that_no_level_keeps_is_said(converted, tmp_path):
    report = converted(tmp_path / "a.gguf", "lowrank", target_error=1e-4)
    assert len(report.warnings) == 1 and "the smallest error: allow a larger error" in report.warnings[0]
    assert {core.levels("lowrank", layer.type).of[0].type_v for layer in report.layers} == {"q8"}


def test_a_small_error_says_the_same(converted, tmp_path):
    converted(tmp_path / "a.gguf", "lowrank", target_error=0.02)
    texts = []
    for path, cache in ((GQA, "kv"), (tmp_path / "a.gguf", "auto")):
        with slimrt.Model(path, cache=cache, n_ctx=512, progress=False) as model:
            prompt = model.detokenize(model.tokenize((MODELS / "heldout.txt").read_text())[:300])
            texts.append(model.generate(prompt, max_tokens=24, temperature=0).text)
    assert texts[0] == texts[1]


def test_auto_takes_what_would_load(converted, tmp_path):
    """k+r in q4 is the cheapest within 10 % in every layer of this model, and loses more of V than is let through."""
    whole = MODELS / "calibration.txt"  # after less of it k+r is not the cheapest
    report = converted(tmp_path / "a.gguf", "auto", TALE, target_error=0.1, cache_type=("q4",), calibration=whole)
    assert all(layer.predicted.value <= TOO_LARGE for layer in report.layers if layer.mode == "k+r")
    assert {"lowrank"} <= {layer.mode for layer in report.layers} and "rows age in " in report.table()
    with slimrt.Model(report.path, n_ctx=64, progress=False) as model:
        assert [one["mode"] for one in model.info()["layers"]] == [layer.mode for layer in report.layers]


# ---------------------------------------------------------------- bytes
def divergence(path: Path, cache: str) -> float:
    found = compare_caches(path, MODELS / "heldout.txt", [cache], window=512, max_tokens=1000, progress=False)
    return found.rows[1].kl_mean


def test_levels_for_bytes_beat_one_level_for_all(converted, tmp_path):
    """At no more bytes, of a long context and of the oldest rows; in a model whose layers differ, and beside the level
    that is the best of ten at its size there (benchmarks/targets.py)."""
    same = converted(tmp_path / "same.gguf", "lowrank", HARD, cache_type="q3@0.5+q8*64")
    budget = int(long_bytes(same))
    mixed = converted(tmp_path / "mixed.gguf", "lowrank", HARD, target_bytes=budget)
    assert long_bytes(mixed) <= budget and mixed.target_bytes == budget
    assert sum(layer.bytes_per_token for layer in mixed.layers) <= budget
    assert len({layer.type for layer in mixed.layers}) > 1
    assert divergence(mixed.path, "auto") < 0.8 * divergence(same.path, "auto")
    plan = slimrt.plan(mixed.path, n_ctx=2048).asked
    newest = (32 + 4) * 4096 + 64 * 2176  # rows as they were written: of a block that is open, and the sinks; in q8
    assert plan.bytes_per_token <= budget and plan.held_bytes <= 2048 * budget + newest


def test_more_bytes_lose_less(converted, tmp_path):
    kls = [
        divergence(converted(tmp_path / "a.gguf", "lowrank", target_bytes=times).path, "auto")
        for times in ("7x", "5x", "3x")
    ]
    assert kls[0] > kls[1] > kls[2]


def test_auto_mixes_modes_for_bytes(converted, tmp_path, run):
    """Both modes in one file, which plan, inspect and generate take as it is."""
    report = converted(tmp_path / "a.gguf", "auto", target_bytes="2.5x", cache_type=("q8", "q4"))
    assert long_bytes(report) <= 768 / 2.5 < 1.05 * long_bytes(report)
    assert {layer.mode for layer in report.layers} == {"lowrank", "k+r"}
    asked = json.loads(run("plan", report.path, "--json")[1])["asked"]
    assert asked["cache"] == "mixed" and asked["modes"] == [layer.mode for layer in report.layers]
    assert run("inspect", report.path)[0] == 0
    code, said, _ = run("generate", report.path, "-p", "Anna was a baker", "-n", 8, "--temp", 0)
    assert code == 0 and said


def test_the_command_says_the_least(run, calibration, tmp_path):
    out = tmp_path / "a.gguf"
    given = ["convert", GQA, "-o", out, "--cache", "lowrank", "--calibration", calibration]
    code, _, said = run(*given, "--target-bytes", 50)
    assert code == 1 and not out.exists()
    least = float(re.search(r"allows 50 bytes a token, and the least that these layers can have is ([\d.]+)", said)[1])
    code, said, _ = run(*given, "--target-bytes", f"{least + 1:.0f}", "--json")
    report = json.loads(said)
    oldest = [core.levels("lowrank", layer["type"]).of[0] for layer in report["layers"]]
    assert code == 0 and {(level.type_k, level.part) for level in oldest} == {("q2", 0.125)}
    assert sum(layer["long_bytes"] for layer in report["layers"]) <= least + 1


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "auto", "target_error": 0.1, "target_bytes": 600}, "target_bytes were given: give one of them"),
        ({"cache": "kv", "target_error": 0.1}, "target_error is for cache 'auto' and 'lowrank', not for 'kv'"),
        ({"cache": "kivi", "target_bytes": 600}, "target_bytes is for cache 'auto' and 'lowrank', not for 'kivi'"),
        ({"target_bytes": 600}, "not for a conversion that names none"),
        ({"cache": "lowrank", "target_error": 1}, "target_error must be above 0 and below 1, got 1"),
        ({"cache": "lowrank", "target_bytes": "few"}, "such as 8x; got 'few'"),
        ({"cache": "lowrank", "target_error": 0.1, "bits": 2}, "make the levels that a target chooses"),
        ({"cache": "lowrank", "target_bytes": 600, "rank": 0.5}, "make the levels that a target chooses"),
        ({"cache": "lowrank", "target_bytes": 600, "group": 64}, "group must be 32, got 64"),
        ({"cache": "lowrank", "target_error": 0.1, "group": 128}, "group must be 32, got 128"),
        ({"cache": "lowrank", "target_error": 0.1, "cache_type": "q2@0.5"}, "unknown cache type 'q2@0.5'"),
        ({"cache": "lowrank", "target_error": 0.1, "cache_type": "f16"}, "are chosen of q2, q3, q4, q8"),
    ],
)
def test_targets_are_checked(options, said, convert, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        slimrt.convert(convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf", progress=False, **options)
    assert not list(tmp_path.iterdir())
