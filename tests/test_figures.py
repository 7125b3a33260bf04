# SPDX-License-Identifier: Apache-2.0
"""Figures that are printed, against arithmetic of the test's own, and how they are printed."""

from __future__ import annotations

import json
import re

import pytest

import slimrt
from conftest import GOLDEN, TESTS
from gguf_shapes import Shape, write_random
from slimrt import core
from slimrt.cache.config import CacheChoice
from slimrt.cli.cache import _age
from slimrt.folding import gate
from slimrt.runtime.fold_at_load import refusal

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time

MODELS = TESTS.parent / "models"
TALE = MODELS / "tale-llama.gguf"
ROW, AGED = 4 * 2 * 256 * 2, 4 * 2 * 256 * 5 // 8  # bytes of a token of TALE, K and V: f16; q4 with its scales


@pytest.mark.parametrize("cache", ["kv", "k"])  # refused by the core, and before folding
def test_where_a_byte_is_lacking_sizes_are_told_in_bytes(cache):
    """At the limit it loads; a byte below, "20.1 MiB does not fit in 20.1 MiB" would say nothing."""
    asked = slimrt.plan(TALE, n_ctx=64, cache=cache).asked
    total, while_folded = max(asked.total, asked.folding), " while it is folded" * bool(asked.folding)
    slimrt.Model(TALE, n_ctx=64, cache=cache, memory_limit=total).close()
    short = slimrt.plan(TALE, n_ctx=64, cache=cache, memory_limit=total - 1)
    assert short.conclusion() == f"{cache} f16: {total} bytes{while_folded} does not fit in {total - 1} bytes"
    with pytest.raises(slimrt.WontFitError, match=f"^needs {total} bytes{while_folded}, {total - 1} bytes a"):
        slimrt.Model(TALE, n_ctx=64, cache=cache, memory_limit=total - 1)


def test_sizes_around_a_gibibyte_are_told_in_one_unit(tmp_path):
    """ "needs 1.00 GiB, 1024.0 MiB allowed" reads as if it fitted."""
    path = str(write_random(tmp_path / "model.gguf", Shape(64, 2, 4, 96, d_ff=64)))

    def needed(n_ctx: int) -> int:
        return core.plan(path, n_ctx=n_ctx)["parts"][0]["bytes"]

    some, more = needed(2**20), needed(2**20 + 32)
    n_ctx = 2**20 - (some - 2**30) // (more - some) * 32
    assert 2**30 <= needed(n_ctx) < 2**30 + 2**20
    with pytest.raises(slimrt.WontFitError, match=f"^needs {needed(n_ctx)} bytes, {2**30 - 1} bytes a"):
        core.Engine(path, n_ctx=n_ctx, memory_limit=2**30 - 1)


def test_one_sequence_is_not_several():
    for n_seqs, many in ((1, "1 sequence"), (2, "2 sequences")):
        with pytest.raises(slimrt.WontFitError, match=rf"64 tokens x {ROW} bytes x {many}\)"):
            slimrt.Model(TALE, n_ctx=64, n_seqs=n_seqs, memory_limit="8MiB")


@pytest.mark.parametrize("name", ["tale-llama", "tale-t5"])
def test_inspect_names_every_type_that_loading_refuses(name, run):
    """Of all types whose bytes it tells: few bits are not fine because nobody looked."""
    path = MODELS / f"{name}.gguf"
    source = slimrt.ModelSource(path)
    refused = {}
    for mode in json.loads(run("inspect", path, "--json")[1])["cache_modes"]:
        for type in mode["bytes_per_token_by_type"] if mode["mode"] in ("k", "v", "x") else ():
            said = refusal(source, CacheChoice.of(f"{mode['mode']}:{type}"), only_cheap=False)
            assert bool(said) == (type in mode["imprecise"]), (mode["mode"], type)
            refused[mode["mode"], type] = bool(said)
    assert refused["k", "q4"] and not refused["k", "f32"]


def test_inspect_folds_a_layer_once_for_each_mode_and_type(run, monkeypatch):
    """Each refusal and its advice asked for errors that others had asked for."""
    folded, reader = [], gate.reader

    def counted(sample, *rows, half):
        folded.append((sample.weights.layer, *rows))
        return reader(sample, *rows, half=half)

    monkeypatch.setattr(gate, "reader", counted)
    run("inspect", TALE)
    assert len(folded) == len(set(folded)) > 20


def test_inspect_keeps_its_columns(run):
    """A mode with a long name is as far from its verdict as the longest."""
    lines = run("inspect", TALE)[1].partition("\ncache modes\n")[2].splitlines()
    verdicts = [re.match(r"  (\S+ +)(yes|no|not in every type)\b", line) for line in lines if line.startswith("  ")]
    assert len(verdicts) == 9 and {len(one[1]) for one in verdicts if one} == {len("lowrank ")}


def test_rows_that_age_are_counted_as_they_are():
    """Mode kivi keeps the newest 128 tokens and up to a block more in 16 bits: not all in bits of the oldest."""
    with slimrt.Model(TALE, cache="kivi:q4", n_ctx=512, progress=False) as model:
        short, long = (model.generate([7] * n, max_tokens=4, temperature=0, ignore_eos=True) for n in (60, 400))
    assert short.cache.bytes == 63 * ROW and short.cache.bytes_per_token == AGED
    newest, rest = divmod(long.cache.bytes - 403 * AGED, ROW - AGED)
    assert rest == 0 and 128 <= newest < 160 and (403 - newest) % 32 == 0


@pytest.fixture
def step_bytes(run, monkeypatch):
    """step_bytes(model, cache, depth): bytes that bench says a step reads behind so many tokens."""
    monkeypatch.setattr(core, "read_bandwidth", lambda n_threads, megabytes: 1e4)

    def measured(model, cache: str, depth: int) -> float:
        out = run("bench", model, "-p", 0, "-n", 1, "-r", 1, "-d", depth, "--compare", cache, "--json", "-q")[1]
        (row,) = json.loads(out)["results"]
        return row["gb_s"] * 1e9 / row["tok_s"]

    return measured


def test_bench_counts_rows_that_age_as_they_are(step_bytes):
    assert step_bytes(TALE, "kivi:q4", 63) == pytest.approx(step_bytes(TALE, "kv:f16", 63))
    newest = (step_bytes(TALE, "kivi:q4", 399) - step_bytes(TALE, "kivi:q4", 0) + ROW - 400 * AGED) / (ROW - AGED)
    assert 128 <= round(newest, 3) < 160


def test_bench_counts_the_window_of_layers_that_have_one(step_bytes, convert):
    """Six of seven layers see 9 tokens, the other one all."""
    model, row = convert(GOLDEN / "gemma3"), 2 * 2 * 20 * 2
    grown = step_bytes(model, "kv:f16", 63) - step_bytes(model, "kv:f16", 0)
    assert grown == pytest.approx((1 * 63 + 6 * 8) * row)


def test_perplexity_tells_of_windows_only_where_there_are_some(run):
    assert "slimrt: 1 token, cache kv f16; " in run("perplexity", TALE, "-p", ".")[2]
    assert ", windows of 32 that score their last 16 (" in run("perplexity", TALE, "-p", "the mill " * 20, "-c", 32)[2]


def test_ages_in_words():
    ages = [-1, 0.5, 1.5, 59, 119, 120, 7199, 7200, 2 * 86400]
    assert [_age(one) for one in ages] == ["0 seconds", "0 seconds", "1 second", "59 seconds", "119 seconds",
                                           "2 minutes", "119 minutes", "2 hours", "2 days"]  # fmt: skip
