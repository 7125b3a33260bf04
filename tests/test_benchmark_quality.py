# SPDX-License-Identifier: Apache-2.0
"""The quality suite: tasks, the report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import slimrt
from conftest import TESTS
from reference import Reference

sys.path.insert(0, str(TESTS.parent / "benchmarks"))
import quality
import tasks

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time

MODELS = TESTS.parent / "models"
TALE = MODELS / "tale-llama.gguf"


def test_tasks_in_other_tokens_are_left_out(tmp_path):
    files = [MODELS / "retrieval.json"]
    (one,) = tasks.tasks_for(slimrt.ModelSource(TALE), files)
    assert one.name == "retrieval" and len(one.prompts) == 44
    assert tasks.tasks_for(slimrt.ModelSource(MODELS / "tale-gpt2.gguf"), files) == []  # too long for it
    entry = {"depth": 0.0, "prompt": "Anna was", "prompt_ids": [1, 2], "answer": " a", "answer_ids": [3]}
    (tmp_path / "other.json").write_text(json.dumps({"prompts": [entry]}))
    assert tasks.tasks_for(slimrt.ModelSource(TALE), [tmp_path / "other.json"]) == []


def test_answers_are_read_from_stored_rows():
    """A prompt is fed in chunks of 128, the last 32 ids of it and the answer in steps of their own."""
    seen = []

    def predict(ids: list[int], begins: list[int], n: int) -> list[int]:
        seen.append((ids, begins, n))
        return [7, 8, 0]

    task = tasks.Task("t", ((0.5, tuple(range(200)), (7, 8, 9)), (1.0, (1, 2), (7, 8, 0))))
    found = tasks.answers(predict, task)
    assert found == [[True, True, False], [True, True, True]]
    assert tasks.summary(found) == {"answered": 0.5, "tokens": pytest.approx(5 / 6)}
    assert seen[0] == ([*range(200), 7, 8], [0] * 128 + [128] * 40 + list(range(168, 202)), 3)
    assert seen[1] == ([1, 2, 7, 8], [0, 1, 2, 3], 3)
    assert tasks.some(task, 1).prompts == task.prompts[:1] and tasks.some(task, None) == task == tasks.some(task, 9)


def test_engine_and_reference_agree_where_nothing_is_rounded(tiny):
    """The likeliest tokens of kv f32 are those of the float64 model: the steps of both are the same."""
    ids = [int(id) for id in np.random.default_rng(3).integers(6, 289, 40)]
    begins = [0] * 16 + [16] * 16 + [32] * 4 + [36, 37, 38, 39]
    with slimrt.Model(tiny, cache="kv:f32", n_ctx=64) as model:
        predict = tasks.predict_with(model)
        wanted = [int(one) for one in Reference(tiny).logits(ids)[-5:].argmax(-1)]
        assert predict(ids, begins, 5) == wanted == predict(ids, begins, 5)


def test_the_suite_writes_table_and_picture(tmp_path, monkeypatch, capsys):
    """A short run on the shipped model: rounding of K-only in q8 is seen by text and task alike."""
    pytest.importorskip("matplotlib")
    caches = ["kv:f16", "kv:q4", "k:q8", "x:f16", "kivi:none+recent=64+sinks=4", "auto:0.02"]
    arguments = ["--models", TALE, "--caches", *caches, "--tokens", 80, "--window", 128, "--prompts", 1,
                 "--tasks", MODELS / "retrieval.json", "--out", tmp_path / "q"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, arguments)])
    quality.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q-tale-llama.png", "q.json", "q.md"]
    model = json.loads((tmp_path / "q.json").read_text())["models"][TALE.name]
    rows = {row["cache"]: row for row in model["rows"]}
    assert list(rows) == ["kv f32", "kv f16", "kv q4", "k q8", "kivi none+sinks=4+recent=64", "auto, 0.02"]
    assert rows["auto, 0.02"]["kl_mean"] < rows["kv q4"]["kl_mean"] and set(rows["auto, 0.02"]["modes"]) == {"k+r"}
    assert rows["k q8"]["kl_mean"] > 1 > rows["kv q4"]["kl_mean"] > rows["kv f16"]["kl_mean"]
    assert rows["kv q4"]["bytes_per_token"] == 4 * 2 * 256 * 5 // 8
    held = rows["kivi none+sinks=4+recent=64"]["bytes_per_token"]
    assert held == round(4096 * (113 - 32) / 113)  # 32 + 81 tokens in the window, of which a block is forgotten
    assert model["tasks"]["kv f32"]["retrieval"]["answered"] == 1 > model["tasks"]["k q8"]["retrieval"]["tokens"]
    table = (tmp_path / "q.md").read_text()
    assert "| **kv f16** | 32.00 | 4096 | 100.0 % |" in table and table in capsys.readouterr().out


def test_ranks_follow_the_width_of_v():
    assert quality.with_rank("k+r:q8:e/8:q8", 256) == "k+r:q8:32:q8"
    assert quality.with_rank("k+r:f16:e/32", 200) == quality.with_rank("k+r:f16:e/32", 40) == "k+r:f16:4"
    assert quality.with_rank("kv:fp8_e4m3", 256) == "kv:fp8_e4m3"


def test_findings():
    def row(cache, size, kl):
        return slimrt.CacheQuality(cache=cache, modes=(), types=(), ranks=(), residual_types=(), perplexity=1.0,
                                    kl_mean=kl, kl_p99=kl, kl_max=kl, same_top=1.0, bytes_per_token=size,
                                    cache_bytes=0, extra_weights=0)  # fmt: skip

    rows = (row("kv f32", 200, 0.0), row("kv f16", 100, 1e-7), row("kv q8", 50, 1e-5), row("kv q4", 30, 1e-2),
            row("kv q4, K per channel", 31, 8e-3), row("k+r f16 + 8 q8", 52, 1e-6),
            row("k+r q8 + 8 q4", 30, 2e-4))  # fmt: skip
    found = {one.cache: {"retrieval": {"answered": 0.5}, "copy": {"answered": 0.0}} for one in rows}
    said = quality.findings(slimrt.CacheComparison("m", 1, 1, 8, 1, 1, rows), found)
    assert said == [
        "k+r f16 + 8 q8: 52.0 % of the bytes of kv f16, KL 1e-06, 10 times that of kv f16, "
        "retrieval 100.0 % of kv f32's",
        "k+r q8 + 8 q4: 60.0 % of the bytes of kv q8, KL 0.0002, 20 times that of kv q8, retrieval 100.0 % of kv f32's",
        "best own kv q4: kv q4, K per channel, 31 bytes, KL 0.008; best k+r in no more bytes: k+r q8 + 8 q4, 30 bytes, "
        "KL 0.0002: 40 times less",
    ]
    worse = [replace(one, kl_mean=0.1) if one.cache == "k+r q8 + 8 q4" else one for one in rows]
    last = quality.findings(slimrt.CacheComparison("m", 1, 1, 8, 1, 1, tuple(worse)), found)[-1]
    assert last.endswith("KL 0.1: 12.5 times more")


def test_what_auto_chose_is_said_layer_by_layer():
    row = slimrt.CacheQuality(cache="auto, 0.01", modes=("k+r", "kv"), types=("q8", "f16"), ranks=(48, 0),
                              residual_types=("q4", ""), perplexity=1.0, kl_mean=0.0, kl_p99=0.0, kl_max=0.0,
                              same_top=1.0, bytes_per_token=1, cache_bytes=0, extra_weights=0)  # fmt: skip
    said = quality.findings(slimrt.CacheComparison("m", 1, 1, 8, 1, 1, (row,)), {})
    assert said == ["auto, 0.01: k+r q8 + 48 q4 / kv f16"]
