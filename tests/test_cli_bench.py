# SPDX-License-Identifier: Apache-2.0
"""slimrt bench: what is measured, in which form it is told, what is refused, what an interrupt leaves."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, TESTS
from gguf_shapes import Shape, write_random
from slimrt import core
from slimrt.cli import bench

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time

MODELS = TESTS.parent / "models"
TALE = MODELS / "tale-llama.gguf"
QUICK = ("-p", 8, "-n", 4, "-r", 2, "-q")


@pytest.fixture
def known_bandwidth(monkeypatch):
    """The control of 256 MiB takes longer than these tests; its own test uses the real one. Beyond any decode: that
    would be explained."""
    monkeypatch.setattr(core, "read_bandwidth", lambda n_threads, megabytes: 1e4)


def results(out: str) -> list[dict]:
    return json.loads(out)["results"]


def test_the_control_is_measured_for_every_figure(run, tiny, monkeypatch):
    measured, real = [], core.read_bandwidth

    def bandwidth(n_threads, megabytes):
        measured.append(real(n_threads, megabytes))
        return measured[-1]

    monkeypatch.setattr(core, "read_bandwidth", bandwidth)
    rows = results(run("bench", tiny, *QUICK, "-r", 1, "--json")[1])
    assert [row["read_gb_s"] for row in rows] == measured and min(measured) > 0.01


@pytest.mark.usefixtures("known_bandwidth")
def test_tests_caches_and_depths(run):
    code, out, err = run("bench", TALE, *QUICK, "-d", "40,0,600", "--compare", "kv:f32,k", "-t", 2, "--json")
    assert (code, err) == (0, "")
    got = [(r["depth"], r["cache"], r["type"], r["test"], r["tokens"], r["repetitions"]) for r in results(out)]
    assert got == [
        (depth, cache, type, test, tokens, 2)
        for depth in (0, 40, 600)
        for cache, type in (("kv", "f32"), ("k", "f16"))
        for test, tokens in (("prefill", 8), ("decode", 4))
    ]
    assert json.loads(out)["n_ctx"] == 608 and json.loads(out)["n_threads"] == 2


@pytest.mark.usefixtures("known_bandwidth")
def test_figures_follow_from_time_and_bytes(run, monkeypatch):
    seconds = iter(np.cumsum([0, 2.0, 1, 4.0]))  # a repetition of 2 s, a pause, one of 4 s
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(seconds))
    code, out, _ = run("bench", TALE, "-p", 0, "-n", 8, "-r", 2, "-d", 32, "--json")
    (row,) = results(out)
    assert code == 0 and row["tok_s"] == pytest.approx(3.0) and row["deviation"] == pytest.approx(2**0.5)
    file, plan = core.GgufFile(str(TALE)), core.plan(str(TALE), n_ctx=1)
    assert "output.weight" in file.tensors()  # so the embedding is not multiplied with
    size = plan["mapped"] + plan["weights"] + plan["derived"] - file.tensor_bytes("token_embd.weight")
    size += (32 + 4.5) * plan["cache_bytes_per_token"]
    assert row["gb_s"] == pytest.approx(size * 3 / 1e9) and row["read_share"] == pytest.approx(row["gb_s"] / 1e4)


@pytest.mark.usefixtures("known_bandwidth")
def test_a_tied_embedding_is_counted(run, tiny):
    assert "output.weight" not in core.GgufFile(str(tiny)).tensors()
    (row,) = results(run("bench", tiny, "-p", 0, "-n", 1, "-r", 1, "--json")[1])
    plan = core.plan(str(tiny), n_ctx=1)
    size = plan["mapped"] + plan["weights"] + plan["derived"] + plan["cache_bytes_per_token"]
    assert row["gb_s"] == pytest.approx(size * row["tok_s"] / 1e9)
    assert row["deviation"] is None  # of one repetition


@pytest.mark.usefixtures("known_bandwidth")
def test_experts_that_a_token_does_not_take_are_not_counted(run, tmp_path):
    """The same model whose tokens take all three experts reads one more of each layer's."""
    d, ff, layers = 32, 48, 2
    shape = Shape(d, layers, 4, 64, d_ff=ff, arch="olmoe")

    def counted(used: int) -> float:
        path = write_random(tmp_path / f"{used}.gguf", shape, {"expert_used_count": used})
        (row,) = results(run("bench", path, "-p", 0, "-n", 1, "-r", 1, "--json")[1])
        return row["gb_s"] * 1e9 / row["tok_s"]

    assert counted(3) - counted(2) == pytest.approx(layers * 3 * d * ff * 2)  # gate, up and down in float16


def decoding_reads(d: int, mode: str, rows: int) -> int:
    """Bytes of a layer that one query over stored float32 rows needs, beside W_Q, W_O and vectors: the mathematics of
    csrc/cache/modes, with folded weights in float32, the model's own in float16, and K, V and all heads d wide."""
    own, folded, row = 2 * d * d, 4 * d * d, 4 * d
    rank, residual = 32, 4 * 32
    return {
        "kv": 2 * own + rows * 2 * row,  # W_K, W_V
        "k": own + folded + rows * row,  # W_K; W_KV
        "k+r": own + folded + 3 * 4 * rank * d + rows * (row + residual),  # and the residual of x, of k, to V
        "v": own + folded + rows * row,  # W_V; W_VK in the query: for each head head_dim columns of it
        "x": 2 * own + rows * row,  # W_V; W_K in the query, transposed in its own type
        "xr": 3 * folded + rows * row,  # x to its row, W_K of the row in the query, the row to V
    }[mode]


@pytest.mark.usefixtures("known_bandwidth")
@pytest.mark.parametrize(
    ("name", "mode"),
    [("tale-llama", "k"), ("tale-llama", "k+r"), ("tale-gpt2", "k"), ("tale-gpt2", "v"), ("tale-gpt2", "x"),
     ("tale-neox", "xr"), ("tale-neox", "k+r")],
)  # fmt: skip
def test_weights_that_decoding_leaves_unread_are_not_counted(name, mode, run, tmp_path):
    """Folded at load and in the file alike."""
    source, file = MODELS / f"{name}.gguf", tmp_path / "folded.gguf"
    cache, options = f"{mode}:f32", {}
    if mode == "k+r":
        cache, options = "k+r:f32:32:f32", {"rank": 32, "residual_type": "f32"}
    slimrt.convert(source, file, cache=mode, cache_type="f32", calibration="none", progress=False, **options)

    def counted(path, cache: str) -> float:
        arguments = ("-p", 0, "-n", 1, "-r", 1, "-d", 32, "--compare", cache, "--calibration", "none", "--json", "-q")
        (row,) = results(run("bench", path, *arguments)[1])
        return row["gb_s"] * 1e9 / row["tok_s"]

    sizes = slimrt.ModelSource(source).defaults
    layers, d = sizes["n_layers"], sizes["d_model"]
    wanted = layers * (decoding_reads(d, mode, 33) - decoding_reads(d, "kv", 33))
    vectors = layers * 8 * 4 * d  # scales and biases; less than any matrix
    for path in (source, file):
        assert counted(path, cache) - counted(source, "kv:f32") == pytest.approx(wanted, abs=vectors)


@pytest.mark.usefixtures("known_bandwidth")
@pytest.mark.parametrize("mode", ["kv", "k"])
def test_rows_that_layers_share_are_counted_for_each_that_reads_them(mode, run, tmp_path):
    shared = tmp_path / "shared.gguf"
    slimrt.convert(MODELS / "tale-neox.gguf", shared, kv_layers=2, progress=False)
    sizes = slimrt.ModelSource(shared).defaults
    assert slimrt.ModelSource(shared).owners == [0, 1, 1]

    def counted(depth: int) -> float:
        arguments = ("-p", 0, "-n", 1, "-r", 1, "-d", depth, "--cache", f"{mode}:f32", "--calibration", "none")
        (row,) = results(run("bench", shared, *arguments, "--json", "-q")[1])
        return row["gb_s"] * 1e9 / row["tok_s"]

    row = 4 * sizes["d_model"] * (1 + (mode == "kv"))
    assert counted(32) - counted(0) == pytest.approx(32 * row * sizes["n_layers"])


@pytest.mark.usefixtures("known_bandwidth")
def test_embeddings_of_layers_are_looked_up(run, tmp_path):
    """Gemma 4's, of which a token reads a row; near half of the weights of its E2B."""
    path = tmp_path / "gemma4.gguf"
    slimrt.convert(GOLDEN / "gemma4_small", path, progress=False)
    (row,) = results(run("bench", path, "-p", 0, "-n", 1, "-r", 1, "--json")[1])
    plan = core.plan(str(path), n_ctx=1)
    size = plan["mapped"] + plan["weights"] + plan["derived"] + 2 * plan["cache_bytes_per_token"]  # each read twice
    size -= core.GgufFile(str(path)).tensor_bytes("per_layer_token_embd.weight")
    assert row["gb_s"] == pytest.approx(size * row["tok_s"] / 1e9)


@pytest.mark.usefixtures("known_bandwidth")
def test_outputs(run, tiny, tmp_path):
    code, out, err = run("bench", tiny, *QUICK, "-d", "0,32")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].startswith("tiny.gguf: llama, cpu ")
    assert [len(line.split("|")) for line in lines[2:]] == [8] * 6
    assert lines[-1].startswith("| kv f16 | decode 4 | 32 | ") and " ± " in lines[-1] and "of 10000.0 GB/s" in lines[-1]
    rows = list(csv.DictReader(io.StringIO(run("bench", tiny, *QUICK, "-d", "0,32", "--format", "csv")[1])))
    assert [(row["test"], row["depth"]) for row in rows] == [
        ("prefill", "0"), ("decode", "0"), ("prefill", "32"), ("decode", "32"),
    ]  # fmt: skip
    assert rows[0]["gb_s"] == "" and float(rows[1]["gb_s"]) > 0
    assert run("bench", tiny, *QUICK, "--output-format", "json")[1].startswith("{")
    assert run("bench", tiny, *QUICK, "-o", tmp_path / "speed.csv") == (0, "", "")
    assert (tmp_path / "speed.csv").read_text().startswith("cache,type,test,")


@pytest.mark.usefixtures("known_bandwidth")
def test_depth_is_exact_and_kept(run, tiny, monkeypatch):
    """Not a whole block, and beyond what is computed for real."""
    monkeypatch.setattr(bench, "_BASE", 64)
    lengths = []
    timed = bench.Bench._time

    def time_and_look(self, runtime, sequence, result):
        with runtime.use() as engine:
            lengths.append(engine.length(sequence))
        return timed(self, runtime, sequence, result)

    monkeypatch.setattr(bench.Bench, "_time", time_and_look)
    assert run("bench", tiny, *QUICK, "-d", "7,64,100")[0] == 0
    assert lengths == [depth for depth in (7, 64, 100) for _ in range(4)]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("-d", 100, "-c", 64), 1, "a depth of 100 and 8 tokens after it need a context of 108, --ctx is 64"),
        (("-d", "1,x"), 2, "whole numbers separated by commas"),
        (("-d", "4,-1"), 2, "negative"),
        (("-n", -1), 2, "negative"),
        (("-r", 0), 2, "at least 1"),
        (("-p", 0, "-n", 0), 2, "nothing to measure"),
        (("--compare", "kv,kk"), 2, "did you mean 'k'?"),
        (("--compare", "kv", "kk"), 2, "did you mean 'k'?"),
        (("--compare", "kv,,k"), 2, "cache must be a mode"),
        (("--compare", "kv:f1"), 2, "cache type 'f1' is not supported"),
        (("--compare", "kv,x"), 1, "layer 0"),
        (("--device", "tpu"), 2, "supported: auto, cpu"),
        (("--memory-limit", "1KiB"), 1, "needs"),
        (("--compare", "kv,k", "--memory-limit", "1KiB"), 1, "2 caches at once need"),
        (("--format", "xml"), 2, "invalid choice"),
        (("-o", "csv"), 2, "a format is --format csv"),
        (("-o", "/none/speed.md"), 1, "/none: no such directory"),
    ],
)
def test_what_is_refused(run, tiny, arguments, code, said):
    got, out, err = run("bench", tiny, *QUICK, *arguments)
    assert (got, out) == (code, "") and said in err


def test_a_mode_that_is_not_legal_says_why(run, grouped):
    code, out, err = run("bench", grouped, *QUICK, "--compare", "kv,k")
    assert (code, out) == (1, "") and "cache mode 'k' cannot be used with grouped.gguf: layer 0" in err


@pytest.mark.usefixtures("known_bandwidth")
def test_beyond_the_trained_context_is_told(run, tiny):
    code, out, err = run("bench", tiny, "-p", 8, "-n", 4, "-r", 1, "-d", 300)
    assert code == 0 and "beyond the 256 of training" in err


@pytest.mark.parametrize(("turns", "lines"), [(0, 0), (1, 5), (3, 6)])
def test_ctrl_c_shows_what_was_measured(run, tiny, monkeypatch, turns, lines):
    """One turn: decode and prefill at depth 0, one repetition. Three: the prefill of depth 32 too. No decode is beyond
    this memory's bandwidth, which would be explained."""
    calls = iter([1e6] * (turns * 2 if turns < 3 else 5))

    def bandwidth(n_threads, megabytes):
        try:
            return next(calls)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(core, "read_bandwidth", bandwidth)
    code, out, _ = run("bench", tiny, *QUICK, "-d", "0,32")
    assert code == 130 and len(out.splitlines()) == (lines + 1 if lines else 0)


@pytest.mark.parametrize("form", ["md", "csv", "json"])
def test_ctrl_c_before_the_first_figure(run, tiny, monkeypatch, tmp_path, form):
    """While a cache is loaded: there is nothing to write, and what an earlier run wrote stays."""
    (out_file := tmp_path / f"speed.{form}").write_text("earlier")

    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("slimrt.cli.bench.load", load)
    for output in ((), ("-o", out_file)):
        assert run("bench", tiny, *QUICK, "--format", form, *output) == (130, "", "")
    assert out_file.read_text() == "earlier"


def test_caches_are_named_once(run, tiny, monkeypatch):
    """A --cache beside --compare would be passed over."""
    for verb, *more in (("bench",), ("perplexity", "-p", "a text")):
        code, out, err = run(verb, tiny, *more, "--cache", "k", "--compare", "kv")
        assert (code, out) == (2, "") and "leave --cache out" in err
    monkeypatch.setenv("SLIMRT_CACHE", "K")  # a setting of all commands; what is typed wins
    assert run("bench", tiny, *QUICK, "--compare", "kv")[0] == 0


def test_help_and_twins(run, tiny, monkeypatch, known_bandwidth):
    assert "bench" in run("--help")[1] and "SLIMRT_" in run("bench", "--help")[1]
    for name, value in (("N_PROMPT", "0"), ("N_GEN", "2"), ("DEPTHS", "3,5"), ("REPETITIONS", "1"), ("JSON", "1")):
        monkeypatch.setenv(f"SLIMRT_{name}", value)
    assert [(row["test"], row["depth"]) for row in results(run("bench", tiny)[1])] == [("decode", 3), ("decode", 5)]
