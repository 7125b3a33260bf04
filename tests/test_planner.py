# SPDX-License-Identifier: Apache-2.0
"""The planner: the papers' cache sizes, and what Engine allocates to the byte."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, derived
from folds import as_converted, fold_all
from gguf_shapes import Shape, write_random, write_sparse
from reference import Reference
from slimrt import _core, core
from slimrt.cache.config import CacheChoice
from slimrt.cache.planner import Planner
from slimrt.modelfile.source import ModelSource
from tiny_model import write_tiny

# Cache elements (K and V) at a context, docs/cache-math.md section 6, for the architectures of this release.
# name: shape, context, elements in the paper, half a unit of its last digit.
PAPER = {
    "CodeLlama-7B": (Shape(4096, 32, 32, 16384), 16384, 4.3e9, 0.05e9),
    "CodeLlama-13B": (Shape(5120, 40, 40, 16384), 16384, 6.7e9, 0.05e9),
    "CodeGemma-7B": (Shape(3072, 28, 16, 8192, head_dim=256), 8192, 1.9e9, 0.05e9),
    "SmolLM2-1.7B": (Shape(2048, 24, 32, 8192), 8192, 0.8e9, 0.05e9),
    "SmolVLM": (Shape(2048, 24, 32, 16384), 16384, 1.6e9, 0.05e9),
    "Evo-1-131k": (Shape(4096, 32, 32, 131072), 131072, 34.4e9, 0.05e9),
    "Phi-3-mini-128k": (Shape(3072, 32, 32, 131072), 131072, 25.8e9, 0.05e9),
    "OLMo-1B": (Shape(2048, 16, 16, 4096), 4096, 0.3e9, 0.05e9),
    "OLMo-2-13B": (Shape(5120, 40, 40, 4096), 4096, 1.7e9, 0.05e9),
    "Vicuna-7B-16k": (Shape(4096, 32, 32, 16384), 16384, 4.3e9, 0.05e9),
    "GPT-2 XL": (Shape(1600, 48, 25, 1024, arch="gpt2"), 1024, 157e6, 0.5e6),
}


@pytest.mark.unsanitized  # dry engines of large shapes
@pytest.mark.parametrize("name", PAPER)
def test_cache_elements_of_the_papers(name, tmp_path):
    shape, n_ctx, elements, half_digit = PAPER[name]
    path = write_sparse(tmp_path / "model.gguf", shape)
    for dtype, size in (("f32", 4), ("f16", 2), ("bf16", 2)):
        kv = _core.plan(str(path), n_ctx=n_ctx, cache="kv", cache_type_k=dtype, cache_type_v=dtype)
        assert abs(kv["cache"] / size - elements) <= half_digit * 1.01
        assert kv["cache"] == 2 * shape.kv_heads * shape.dk * shape.n_layers * n_ctx * size
    k = _core.plan(str(path), n_ctx=n_ctx, cache="k")
    assert 2 * k["cache"] == kv["cache"] and 2 * k["cache_bytes_per_token"] == kv["cache_bytes_per_token"]


def test_grouped_heads_and_the_aya_table(tmp_path):
    """aya-23-35B: 5.4 B elements at 8k with its 64 query heads (as many as the paper counts)."""
    shape = Shape(8192, 40, 64, 8192)
    path = write_sparse(tmp_path / "aya.gguf", shape)
    assert abs(_core.plan(str(path), n_ctx=8192)["cache"] / 2 - 5.4e9) < 0.05e9
    grouped = write_sparse(tmp_path / "grouped.gguf", Shape(8192, 40, 64, 8192, n_kv_heads=8))
    assert _core.plan(str(grouped), n_ctx=8192)["cache"] * 8 == _core.plan(str(path), n_ctx=8192)["cache"]


@pytest.mark.unsanitized  # it bounds time and resident memory
@pytest.mark.unemulated
def test_planning_a_7b_model_takes_no_disk_memory_or_time(tmp_path):
    """A sparse file of 13 GB: nothing is written, nothing of its weights is read."""
    path = write_sparse(tmp_path / "7b.gguf", Shape(4096, 32, 32, 16384, d_ff=11008, n_vocab=32000))
    assert path.stat().st_size > 12e9 and path.stat().st_blocks * 512 < 2e6
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    for cache in ("kv", "k"):
        plan = _core.plan(str(path), n_ctx=16384, cache=cache)
        assert plan["mapped"] > 12e9
        assert plan["total"] == plan["weights"] + plan["derived"] + plan["cache"] + plan["scratch"]
    assert plan["derived"] >= 32 * 4096 * 4096 * 4  # W_KV in float32
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.unsanitized  # which makes short work longer than long work
@pytest.mark.parametrize("mode", ["kivi", "lowrank"])
def test_the_longest_prompt_is_not_gone_through(mode, tmp_path):
    """Of rows that age a prompt of a whole context is counted, not chunk by chunk: 256 times as many took 8 times as
    long."""
    path, n_ctx = write_sparse(tmp_path / "model.gguf", Shape(256, 4, 4, 2048)), 1 << 23

    def seconds(n_batch):
        start = time.process_time()
        assert _core.plan(str(path), n_ctx=n_ctx, cache=mode, n_batch=n_batch)["scratch"] > n_ctx * 256 * 4
        return time.process_time() - start

    assert min(seconds(16) for _ in range(3)) < 2.5 * min(seconds(4096) for _ in range(3))


def test_wont_fit_is_said_with_numbers_before_anything_is_read(tmp_path):
    path = write_sparse(tmp_path / "7b.gguf", Shape(4096, 32, 32, 32768, d_ff=11008, n_vocab=32000))
    with pytest.raises(slimrt.WontFitError, match="1.00 GiB allowed.*weights alone do not fit") as caught:
        _core.Engine(str(path), n_ctx=16384, memory_limit=1 << 30)
    assert caught.value.needed > 8e9 and caught.value.available == 1 << 30
    with pytest.raises(slimrt.WontFitError, match="26.00 GiB allowed") as caught:
        slimrt.Model(path, n_ctx=32768, memory_limit="26GiB", cache="kv")
    options = caught.value.options
    assert options.index("--cache kv:q8") < options.index("--cache k")  # as many bytes, and faster
    assert any(option.startswith("--ctx ") and int(option.split()[1]) > 8192 for option in caught.value.options)
    assert all(option in str(caught.value) for option in caught.value.options)
    assert "GiB" in str(caught.value)


@pytest.mark.unsanitized  # dry engines, which others make too
def test_plan_finds_what_fits(tmp_path):
    """The largest context that fits is exact: it fits, and one block more does not."""
    path = write_sparse(tmp_path / "model.gguf", Shape(1024, 8, 8, 65536, d_ff=512))
    result = slimrt.plan(path, n_ctx=65536, memory_limit="1GiB", cache="kv")
    assert not result.fits
    rows = {row.cache: row for row in result.rows}
    assert set(rows) == {"kv", "k", "k+r", "lowrank"} and {mode for mode, _ in result.refused} >= {"v", "x"}
    for mode, row in rows.items():
        assert 0 < row.max_n_ctx < 65536
        choice, planner = CacheChoice.of(mode), Planner.of(ModelSource(path), "1GiB", 1, 512, None)
        sizes = [planner.sizes(choice, n_ctx) for n_ctx in (row.max_n_ctx, row.max_n_ctx + 64)]
        needed = [max(one.total, one.folding) for one in sizes]  # while it is folded, which only kv is not
        assert (mode != "kv") == (sizes[0].folding > sizes[0].total)
        assert needed[0] <= result.memory_limit < needed[1]
    assert rows["k"].max_n_ctx > 1.5 * rows["kv"].max_n_ctx


# ---------------------------------------------------------------- rows that age
@pytest.mark.parametrize("shape", [Shape(1024, 3, 16, 4096), Shape(1024, 2, 8, 4096, n_kv_heads=2)])  # heads of 64, 128
@pytest.mark.unsanitized  # dry engines
def test_compression_by_two_counts(shape, tmp_path):
    """TALE's figure, of types and shares alone; and what a full context really holds: scales, minima, four sinks and
    the open block in f16."""
    path = write_sparse(tmp_path / "model.gguf", shape)
    for n_ctx, least in ((4096, 6.0), (1000, 5.4)):
        row = slimrt.plan(path, n_ctx=n_ctx, cache="lowrank").asked
        assert row.times_by_types == pytest.approx(32 / 3.5, rel=1e-12) and f"{row.times_by_types:.2f}" == "9.14"
        assert least <= row.times_held < 6.4
        width, aged = shape.kv_heads * shape.dk, (n_ctx - 4) // 32 * 32
        old = aged // 32 * 9 // 10 * 32
        bits = old * (3 + 1.5) + (aged - old) * (5 + 5) + (n_ctx - aged) * 32
        assert row.held_bytes == shape.n_layers * width * bits / 8
        assert row.times_held == pytest.approx(n_ctx * 32 / bits) and row.held_bytes < row.cache_bytes
    kv = slimrt.plan(path, n_ctx=1000, cache="kv").asked
    assert kv.times_by_types is None and kv.times_held == 1 and kv.held_bytes == kv.bytes_per_token * 1000
    data = slimrt.plan(path, n_ctx=1000, cache="lowrank").to_dict()["asked"]
    assert (data["times_by_types"], data["held_bytes"]) == (32 / 3.5, pytest.approx(row.held_bytes))


@pytest.mark.parametrize(
    ("mode", "levels", "bits"),
    [
        ("lowrank", "", 3.5),
        ("lowrank", "q8@0.5", 12),
        ("lowrank", "q2/q3@0.25+q3@0.5*0.2+f16*0.3", 0.5 * (2 + 0.75) + 0.2 * 4.5 + 0.3 * 32),
        ("kivi", "q2", 4),
        ("kivi", "", 32),
    ],
)
def test_bits_by_types_and_shares(mode, levels, bits):
    assert core.levels(mode, levels).bits == pytest.approx(bits, rel=1e-12)


def test_other_levels_are_planned_as_they_were_asked_for(convert):
    path = convert(GOLDEN / "llama_mha")
    for cache in ("kivi:q2+q4*0.2", "lowrank:q3@0.25+q8*0.1", "lowrank:q4"):
        result = slimrt.plan(path, n_ctx=320, cache=cache)
        assert result.asked.types == (cache.split(":")[1],) * 2 and result.asked in result.rows
        assert [row.cache for row in result.rows if row.cache in ("kv", "lowrank")] == ["kv", "lowrank"]
    assert "kivi" not in {row.cache for row in slimrt.plan(path, n_ctx=320, cache="lowrank").rows}  # f16 stays f16
    assert "kivi" in {row.cache for row in slimrt.plan(path, n_ctx=320, cache_type="q4").rows}
    mixed = slimrt.plan(path, n_ctx=320, cache=["lowrank:q2", "kv"]).asked
    assert mixed.cache == "mixed" and mixed.times_by_types is None and mixed.times_held > 1


# ---------------------------------------------------------------- the plan is the allocation
CONFIGURATIONS = [
    ("llama_mha", "kv", {"n_ctx": 100}),
    ("llama_mha", "k", {"n_ctx": 100, "n_seqs": 5, "n_batch": 33}),
    ("llama_gqa_tied", "kv", {"n_ctx": 64, "cache_type_k": "f32", "cache_type_v": "bf16"}),
    ("mistral_window", "kv", {"n_ctx": 128, "n_batch": 1}),
    ("mistral_window", "kv", {"n_ctx": 300, "n_batch": 20, "n_seqs": 3}),
    ("mistral_mha", "k", {"n_ctx": 128, "n_batch": 3}),
    ("qwen2_mha", "k", {"n_ctx": 31, "n_threads": 1}),
    ("phi3", "kv", {"n_ctx": 128, "n_seqs": 3, "n_batch": 2}),
    ("gptneox", "k", {"n_ctx": 100, "n_batch": 21}),
    ("olmo2_gqa", "kv", {"n_ctx": 100, "n_seqs": 2}),
    ("llama_gqa_tied", "k+r", {"n_ctx": 100, "n_seqs": 5, "n_batch": 33, "rank": 6, "residual_type": "q4"}),
    ("olmo2", "k+r", {"n_ctx": 70, "cache_type_k": "q8", "rank": 8, "residual_type": "q8", "n_batch": 20}),
    ("gpt2_tanh", ["kv", "k+r", "x"], {"n_ctx": 128, "cache_type_k": "q4", "rank": [-1, 0, -1], "n_threads": 3}),
    ("gptneox", "xr", {"n_ctx": 100, "n_batch": 21, "n_seqs": 3, "cache_type_k": "q8"}),
    ("phi2_gqa", "xr", {"n_ctx": 128, "cache_type_k": "q4", "n_threads": 1}),
    ("gpt2_tanh", "x", {"n_ctx": 96, "n_seqs": 2}),
    ("gpt2_erf", "v", {"n_ctx": 40, "n_batch": 512}),
    ("gpt2_erf", ["kv", "k", "x"], {"n_ctx": 128, "n_seqs": 9, "n_batch": 4}),
    ("llama_mha", "lowrank", {"n_ctx": 300, "n_seqs": 3, "n_batch": 33, "cache_type_k": "q2@0.5+q4@0.75*0.3+q8*0.2"}),
    ("olmo2_gqa", ["lowrank", "kv"], {"n_ctx": 200, "cache_type_k": "q3", "cache_type_v": "q4", "n_batch": 5}),
    ("llama_gqa_tied", "kv", {"n_ctx": 100, "sparse_threshold": 0.01, "n_batch": 3}),
    ("qwen2moe", "k", {"n_ctx": 100, "n_seqs": 2, "n_threads": 3, "n_batch": 17}),  # experts
    ("mixtral", "kv", {"n_ctx": 64}),
    ("deepseek2", "latent", {"n_ctx": 100, "n_seqs": 2, "n_threads": 3, "n_batch": 17, "cache_type_k": "q8"}),
    ("llama_gqa_tied", "kv", {"n_ctx": 200, "cache_type_k": "q8", "cache_type_v": "q4", "n_threads": 3}),
    ("gpt2_erf", ["kv", "k", "x"], {"n_ctx": 128, "cache_type_k": "q4", "cache_type_v": "fp8_e4m3", "n_threads": 4}),
]


@pytest.mark.parametrize(("name", "mode", "options"), CONFIGURATIONS)
def test_plan_equals_allocation(name, mode, options, convert):
    path = convert(GOLDEN / name)
    plan = _core.plan(str(path), cache=mode, **options)
    rank = max([options.get("rank", 0)] if isinstance(options.get("rank", 0), int) else options["rank"])
    dtype, residual = options.get("cache_type_k", "f16"), options.get("residual_type", "f16")
    made = as_converted(derived(path, mode, dtype, rank), dtype, residual)
    engine = _core.Engine(str(path), cache=mode, derived=made, **options)
    memory = engine.memory()
    assert set(memory) == {"weights", "derived", "cache", "scratch", "total", "mapped", "cache_bytes_per_token"}
    assert {key: plan[key] for key in memory} == memory
    assert {key: plan[key] for key in engine.info()} == engine.info()
    assert memory["total"] == sum(memory[key] for key in ("weights", "derived", "cache", "scratch"))

    # Work at the limits of the plan allocates nothing more.
    n_ctx, n_seqs = engine.info()["n_ctx"], engine.info()["n_seqs"]
    sequences = [engine.new_sequence() for _ in range(n_seqs)]
    ids = [5] * n_ctx
    engine.append([(s, np.array(ids[:-3], np.int32)) for s in sequences], all_logits=True)
    for _ in range(3):
        engine.append([(s, np.array([7], np.int32)) for s in sequences])
    with pytest.raises(slimrt.ContextOverflowError, match=f"context is full: {n_ctx} tokens"):
        engine.append([(sequences[0], np.array([7], np.int32))])
    assert engine.memory() == memory


# What a step needs does not grow with its tokens alone: which branch a part takes, how much is stored, how many
# sequences share the step and how often a job is split all count.
# architecture, query heads, their width, KV heads; modes; options; a few appends: tokens of each sequence.
CORNERS = {
    "100 + 51 tokens": (("llama", 2, 32, 2), "kv", {"n_ctx": 100, "n_seqs": 2, "n_batch": 151}, [[100, 51]]),
    "absorbed after the first token": (("llama", 2, 32, 2), "k", {"n_ctx": 31}, [[1], [30]]),
    "one new, one old": (("llama", 1, 32, 1), "k", {"n_ctx": 100, "n_seqs": 2, "n_batch": 2}, [[1], [1, 1]]),
    "materialised only when new": (("gpt2", 8, 2, 8), "v", {"n_ctx": 300, "n_batch": 5, "n_threads": 1}, [[3]]),
    "few tokens, 512 stored": (("gpt2", 4, 16, 4), "x", {"n_ctx": 600, "n_seqs": 2}, [[512], [88, 424]]),
    "one token below the 14-bit products": (
        ("llama", 2, 512, 2),
        "kv",
        {"n_ctx": 200, "n_batch": 128, "n_threads": 1},
        [[127], [73]],
    ),
    "three jobs, six parts": (("llama", 8, 8, 1), "kv", {"n_ctx": 300, "n_threads": 2}, [[250], [24]]),
    "one residual column": (
        ("llama", 2, 32, 2),
        "k+r",
        {"n_ctx": 300, "n_batch": 70, "n_seqs": 2, "rank": 1, "residual_type": "q8", "cache_type_k": "q8"},
        [[1], [200, 1], [33, 40]],
    ),
    "grouped, all columns": (
        ("llama", 8, 8, 1),
        "k+r",
        {"n_ctx": 90, "n_batch": 16, "rank": 8, "residual_type": "f32", "cache_type_k": "f32", "n_threads": 3},
        [[30], [8]],
    ),
    "a part rotates": (("gptneox", 4, 16, 4), "xr", {"n_ctx": 300, "n_batch": 20, "n_seqs": 3}, [[200], [9, 17, 1]]),
    "latents": (
        ("llama", 4, 16, 4),
        "lowrank",
        {"n_ctx": 300, "n_batch": 20, "n_seqs": 3, "cache_type_k": "q2@0.5+q4*0.1"},
        [[200], [9, 17, 1], [31]],
    ),
    "few tokens of a sequence, more of all": (
        ("llama", 2, 128, 2),
        "k",
        {"n_ctx": 31, "n_seqs": 3},
        [[4, 4, 4], [27, 27, 27]],
    ),
    "nothing is old": (("qwen3", 3, 128, 1), "kivi", {"n_ctx": 64, "cache_type_k": "q4"}, [[32], [32]]),
    "modes": (("gpt2", 2, 64, 1), ["x", "kv"], {"n_ctx": 64, "n_seqs": 7, "n_batch": 33, "n_threads": 8}, []),
}


# Sanitized products are slow: of the others' sizes, and of wide heads in the tests of kernels, they see enough.
SLOW = "one token below the 14-bit products"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.unsanitized] * (case == SLOW)) for case in CORNERS]
)
def test_no_step_needs_more_than_was_planned(case, tmp_path):
    """These appends, then random ones: never out of scratch, and not a byte more than at the start."""
    (arch, n_heads, dim, kv_heads), mode, options, appends = CORNERS[case]
    shape = Shape(n_heads * dim, 2, n_heads, 2048, n_kv_heads=kv_heads, d_ff=8, n_vocab=32, arch=arch)
    path = write_random(tmp_path / "model.gguf", shape, {"rope.dimension_count": dim // 4} if mode == "xr" else None)
    made = {f"blk.{layer}.attn_{name}.weight": np.eye(kv_heads * dim, dtype=np.float32)
            for layer in (0, 1) for name in ("kv", "vk")}  # fmt: skip
    if mode in ("k+r", "xr", "lowrank"):
        made = fold_all(Reference(path), [mode] * 2, options.get("cache_type_k", "f16"), options.get("rank", 0))
    engine = _core.Engine(str(path), cache=mode, derived=made, **options)
    memory, random = engine.memory(), np.random.default_rng(0)
    n_ctx, n_batch = options["n_ctx"], options.get("n_batch", 512)
    sequences = [engine.new_sequence() for _ in range(options.get("n_seqs", 1))]

    def append(counts: list[int], *, all_logits: bool) -> None:
        items = [(s, np.full(n, 5, np.int32)) for s, n in zip(sequences, counts, strict=False) if n]
        if items:
            engine.append(items, all_logits=all_logits)
        assert engine.memory() == memory

    for counts in appends:
        append(counts, all_logits=True)
    lengths = [0, 1, 2, 3, dim, dim + 1, 3 * dim, n_batch // len(sequences), n_batch, n_ctx]
    for _ in range(40):
        for sequence in sequences:
            if engine.length(sequence) == n_ctx or random.random() < 0.2:
                engine.truncate(sequence, int(random.integers(engine.length(sequence) + 1)))
        counts = [min(int(random.choice(lengths)), n_ctx - engine.length(s)) for s in sequences]
        append(counts, all_logits=bool(random.random() < 0.3))


@pytest.mark.unsanitized  # dry engines
def test_the_context_from_which_a_mode_is_smaller_than_kv(tmp_path):
    """At that context it takes fewer bytes in all, a block before it does not."""
    path = write_random(tmp_path / "model.gguf", Shape(256, 8, 4, 4096, d_ff=64))
    rows = {row.cache: row for row in slimrt.plan(path).rows}
    assert rows["kv"].smaller_from is None
    n_ctx = rows["k"].smaller_from
    # W_KV in float32 over the half of kv's bytes that a token saves; scratch moves it a little
    assert n_ctx % 32 == 0 and 256 * 256 * 4 / (256 * 2) <= n_ctx < 4096
    for context, smaller in ((n_ctx, True), (n_ctx - 32, False)):
        kv, k = (slimrt.plan(path, n_ctx=context, cache=mode).asked.total for mode in ("kv", "k"))
        assert (k < kv) == smaller
    in_f32 = {row.cache: row for row in slimrt.plan(path, cache_type="f32").rows}
    assert in_f32["k"].smaller_from < n_ctx < rows["k+r"].smaller_from
    learned = write_random(tmp_path / "gpt2.gguf", Shape(256, 2, 4, 96, d_ff=64, arch="gpt2"))
    assert {row.smaller_from for row in slimrt.plan(learned).rows} == {None}  # it has no more than 96 positions


@pytest.mark.parametrize("folded", ["file", "caller"])
def test_w_kv_takes_half_beside_rows_of_few_bits(folded, convert, tmp_path):
    """In f16 with a scale for each column of V, whoever gave it in f32; the file's is not mapped beside it."""
    path, d, n_layers = convert(GOLDEN / "llama_mha"), 48, 2
    if folded == "file":
        slimrt.convert(path, tmp_path / "k.gguf", cache="k", allow_lossy=True)
        path = tmp_path / "k.gguf"
    made = {} if folded == "file" else derived(path, "k")

    def bytes_of(cache_type: str) -> int:
        engine = _core.Engine(str(path), cache="k", cache_type_k=cache_type, cache_type_v=cache_type, derived=made)
        memory = engine.memory()
        assert memory["weights"] == _core.plan(str(path), cache="k", cache_type_k=cache_type)["weights"]
        return memory["weights"] + memory["derived"] + memory["mapped"]

    scales = 2 * 4 * d  # for V's columns, and again for each query head's
    assert bytes_of("f16") - bytes_of("q8") == n_layers * (2 * d * d - scales)
    assert bytes_of("q4") == bytes_of("q8")


def test_cache_rounds_up_to_blocks_only(convert):
    path = str(convert(GOLDEN / "llama_mha"))
    per_token = _core.plan(path, n_ctx=32)["cache_bytes_per_token"]
    for n_ctx in (1, 31, 32, 33, 64, 100):
        plan = _core.plan(path, n_ctx=n_ctx, n_seqs=3)
        assert plan["n_ctx"] == n_ctx
        assert plan["cache"] == 3 * -(-n_ctx // 32) * 32 * per_token


@pytest.mark.unsanitized  # whose tables of what is mapped are resident memory of this process, too
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_resident_memory_is_what_was_said(tmp_path):
    """64 MiB of cache: the process grows by what memory() says, within a few MiB, and gives it back."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    path = write_random(tmp_path / "model.gguf", Shape(256, 4, 8, 65536, d_ff=256))
    before = resident()
    engine = _core.Engine(str(path), n_ctx=16384, n_batch=64)
    said = engine.memory()["total"]
    assert said >= engine.memory()["cache"] == 64 << 20
    sequence = engine.new_sequence()
    engine.append([(sequence, np.full(500, 5, np.int32))])
    assert resident() - before < said + (12 << 20)
    del engine
    assert resident() - before < 24 << 20


PLANS_ALL = """
import pathlib, sys
from slimrt import _core
try:
    _core.plan(sys.argv[1], n_ctx=1 << 30)
except ValueError as error:
    assert "can address" in str(error), error
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss counts what forked this process
print(status.partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.unsanitized  # which reserves memory
@pytest.mark.unemulated  # resident memory
def test_a_plan_makes_no_biases_of_alibi(convert):
    """Of any context: a row of them would be 4 GiB here."""
    path = str(convert(GOLDEN / "mpt"))
    ran = subprocess.run([sys.executable, "-c", PLANS_ALL, path], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 1 << 20  # KiB


LOADS = """
import pathlib, sys
from slimrt import _core
def peak():
    return int(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
before = peak()
said = _core.Engine(sys.argv[1], n_ctx=1 << 16, n_batch=16, n_threads=1, cache_type_k="q4", cache_type_v="q4").memory()
print(peak() - before, said["total"], said["derived"])
"""


@pytest.mark.unsanitized  # whose tables of what is mapped are resident memory, too
@pytest.mark.unemulated
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_loading_takes_no_more_than_was_said(tmp_path):
    """At no time: the angles of a long context, 64 MiB here, are not there twice."""
    path = write_tiny(tmp_path / "tiny.gguf", d=1024, n_layers=1, n_kv_heads=1)
    ran = subprocess.run([sys.executable, "-c", LOADS, path], capture_output=True, text=True, check=True)
    grown, total, derived = map(int, ran.stdout.split())
    assert derived >= 64 << 20
    assert grown < total + (8 << 20)
