# SPDX-License-Identifier: Apache-2.0
"""Advice that can be followed: what a full context, a plan, a figure or a wrong name is answered with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import slimrt
from conftest import CUDA_MISSING, GOLDEN
from gguf_shapes import Shape, write_random
from slimrt import core
from slimrt.cli import doctor
from tiny_model import write_tiny

SHIPPED = Path(__file__).parent.parent / "models"
TALE = SHIPPED / "tale-llama.gguf"

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """GPT-2's layout, of which there are 64 positions."""
    return write_tiny(tmp_path_factory.mktemp("model") / "learned.gguf", arch="gpt2", n_ctx=64)


# ---------------------------------------------------------------- contexts
FILL = ("-n", -1, "--ignore-eos", "--temp", 0)


def test_what_a_full_context_is_answered_with_is_possible(run, tiny, learned):
    assert (
        "is full; a larger context (n_ctx, --ctx) makes room, up to the trained 256"
        in (run("generate", tiny, "-p", "cat", "-c", 32, *FILL)[2])
    )
    err = run("generate", tiny, "-p", "cat", *FILL)[2]
    assert "is full; the model was trained on 256, and makes little sense of more" in err and "--ctx" not in err
    err = run("generate", learned, "-p", "cat", *FILL)[2]
    assert "is full; the model has positions for no more" in err and "--ctx" not in err


def test_a_prompt_that_does_not_fit_is_answered_alike(tiny, learned):
    for path, n_ctx, advice in ((tiny, 32, "up to the trained 256"), (learned, 64, "positions for no more")):
        with (
            slimrt.Model(path, n_ctx=n_ctx) as model,
            pytest.raises(slimrt.ContextOverflowError, match=rf"100 tokens, the context holds {n_ctx}: .*{advice}"),
        ):
            model.generate([3] * 100)


def test_a_bench_beyond_the_positions_is_not_advised_a_larger_context(run, learned):
    for depth, advice in ((8, "raise it, or lower -d, -p or -n"), (100, "lower -d, -p or -n")):
        err = run("bench", learned, "-p", 8, "-n", 4, "-d", depth, "-c", 8)[2]
        assert f"need a context of {depth + 8}, --ctx is 8: {advice}\n" in err


def test_a_context_beyond_the_trained_one_is_told(run, tiny, caplog):
    said = "512 tokens is longer than the 256 that tiny.gguf was trained on"
    with caplog.at_level("INFO", "slimrt"):
        slimrt.Model(tiny, n_ctx=256).close()
        assert said not in caplog.text
        slimrt.Model(tiny, n_ctx=512).close()
    assert said in caplog.text
    assert run("generate", tiny, "-p", "the cat", "-n", 1, "-c", 512)[2].count(said) == 1


def test_a_context_that_takes_longrope_s_long_factors_is_told(caplog):
    said = "128 tokens is above the 48 of phi3 before longrope"
    with caplog.at_level("INFO", "slimrt"):
        slimrt.Model(GOLDEN / "phi3", n_ctx=48).close()
        assert "longrope" not in caplog.text
        slimrt.Model(GOLDEN / "phi3", n_ctx=128).close()
    assert said in caplog.text


def test_a_plan_for_more_than_the_trained_context(run, tiny):
    planned = slimrt.plan(tiny, n_ctx=1024, memory_limit="1GiB")
    assert planned.fits and {row.max_n_ctx for row in planned.rows} == {1024}  # it fits, so nothing smaller is largest
    assert "context 1024 of 256 trained, more than makes sense" in run("plan", tiny, "-c", 1024)[1]
    assert {row.max_n_ctx for row in slimrt.plan(tiny, n_ctx=64).rows} == {256}


LIMITED = """
import re, resource, sys, slimrt
taken = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) << 10
resource.setrlimit(resource.RLIMIT_AS, (taken + (600 << 20), taken + (600 << 20)))
try:
    slimrt.Model(sys.argv[1], n_ctx=1 << 18, n_threads=1, progress=False)
except slimrt.WontFitError as error:
    print(error)
"""


def test_a_limit_of_the_process_is_not_called_free_memory():
    said = subprocess.run([sys.executable, "-c", LIMITED, TALE], capture_output=True, text=True).stdout
    assert "which the system does not give this process (a limit such as ulimit -v)" in said and "are free" not in said
    assert re.search(r"needs \d+\.\d+ (MiB|GiB) of memory, which", said)


PLANNED = LIMITED.split("try:")[0] + "print(slimrt.plan(sys.argv[1], n_ctx=1 << 20, cache='kv').asked.cache_bytes)"


def test_a_plan_takes_no_addresses():
    """Else a limit of the process made plans fail, and conversions at their end, which say from where on they pay."""
    said = subprocess.run([sys.executable, "-c", PLANNED, TALE], capture_output=True, text=True)
    assert said.returncode == 0 and int(said.stdout) == 4 << 30, said.stderr


# ---------------------------------------------------------------- what a smaller cache pays
def test_conversion_and_plan_have_one_break_even(run, tmp_path):
    path, made = write_random(tmp_path / "model.gguf", Shape(64, 2, 4, 96, d_ff=64)), tmp_path / "k.gguf"
    options = {"cache": "k", "calibration": "none", "allow_lossy": True, "progress": False}
    report = slimrt.convert(path, made, **options)
    planned = slimrt.plan(made, n_ctx=96, allow_lossy=True).asked
    assert planned.cache == "k" and report.smaller_from == {"kv f16": planned.smaller_from}
    assert f"less in all than with kv f16 from {planned.smaller_from} tokens on (beyond the 96" in report.table()
    assert f"from {planned.smaller_from}, untrained" in run("plan", made)[1]
    for n_ctx, smaller in ((planned.smaller_from, True), (planned.smaller_from - 32, False)):
        k, kv = (slimrt.plan(made, n_ctx=n_ctx, cache=cache, allow_lossy=True).asked.total for cache in ("auto", "kv"))
        assert (k < kv) == smaller
    in_q8 = slimrt.convert(path, made, cache_type="q8", **options)
    assert in_q8.smaller_from.keys() == {"kv f16", "kv q8"}
    assert in_q8.smaller_from["kv q8"] > in_q8.smaller_from["kv f16"]  # there is less to gain


def test_a_decode_faster_than_memory_is_explained_and_one_turn_has_no_deviation(run, tiny, monkeypatch):
    monkeypatch.setattr(core, "read_bandwidth", lambda n_threads, megabytes: 1e-6)
    out = run("bench", tiny, "-p", 4, "-n", 4, "-r", 1, "-q")[1]
    assert "±" not in out and "over 100 %: some of what a step reads lies in the CPU's caches" in out
    monkeypatch.setattr(core, "read_bandwidth", lambda n_threads, megabytes: 1e6)
    assert "over 100 %" not in run("bench", tiny, "-p", 4, "-n", 4, "-r", 1, "-q")[1]


# ---------------------------------------------------------------- names
def test_a_directory_that_only_holds_a_file_names_it(run, tiny, tmp_path):
    (tmp_path / "model.gguf").write_bytes(tiny.read_bytes())
    code, _, err = run("generate", tmp_path, "-p", "cat")
    assert code == 1 and "it has no config.json, but model.gguf: name the file itself" in err


def test_a_model_for_another_task_is_answered_with_a_verb(run):
    for name, verb in (("t5", "slimrt text2text"), ("whisper", "slimrt transcribe"), ("chronos", "slimrt forecast")):
        assert f"use {verb}" in run("generate", SHIPPED / f"tale-{name}.gguf", "-p", "hi")[2]


def test_of_a_model_and_a_sound_that_are_not_there_the_model_is_told(run, tmp_path):
    code, _, err = run("transcribe", tmp_path / "no.gguf", tmp_path / "no.wav")
    assert code == 1 and "no.gguf: no such file" in err and "no.wav" not in err
    code, _, err = run("transcribe", SHIPPED / "tale-whisper.gguf", "https://example.org/a.wav")
    assert code == 1 and "sounds are files here: download it first" in err


def test_one_window_is_not_several(run):
    err = run("perplexity", TALE, SHIPPED / "heldout.txt", "--tokens", 8, "-c", 32, "--compare", "kv:f16")[2]
    assert "8 tokens in 1 window of 32 at most" in err


@pytest.mark.parametrize("device", ["gpu", "nvidia"])
def test_a_gpu_by_another_name(device, tiny):
    with pytest.raises(slimrt.UnsupportedError, match="is called cuda, or cuda:N of several"):
        slimrt.plan(tiny, device=device)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is an NVIDIA driver")
def test_no_driver_is_no_old_driver():
    assert "insufficient" not in CUDA_MISSING


# ---------------------------------------------------------------- doctor
def test_doctor_shows_extras_and_how_to_get_them(run, monkeypatch):
    wanted = [
        "numpy>=1.26",
        "pytest>=8; extra == 'test'",
        "numpy; extra == 'here'",
        'no-such-thing>=1; extra == "gone"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda _: wanted)
    out = run("doctor", "-t", 1)[1]
    assert "gone no-such-thing missing (pip install 'slimrt[gone]')" in out
    assert "here numpy " in out and "slimrt[here]" not in out and "slimrt[test]" not in out


def test_doctor_has_advice_for_code_without_vector_instructions(monkeypatch):
    assert doctor._advice("avx2", ["avx2", "portable"]) == []
    assert "none of AVX-512, AVX2" in doctor._advice("portable", ["portable"])[0]
    monkeypatch.setenv("SLIMRT_ISA", "portable")
    assert "without it: avx2" in doctor._advice("portable", ["avx2", "portable"])[0]


# ---------------------------------------------------------------- a context that nobody asked for
def test_a_context_that_was_not_asked_for_becomes_what_fits(run, tmp_path):
    path = write_random(tmp_path / "model.gguf", Shape(64, 2, 4, 2048, d_ff=64))
    needed = slimrt.plan(path).asked.total
    with pytest.warns(UserWarning, match=r"the context is (\d+) tokens, the most that fits in .*, not 2048") as warned:
        model = slimrt.Model(path, memory_limit=needed * 2 // 3)
    with model:
        largest = slimrt.plan(path, memory_limit=needed * 2 // 3).asked.max_n_ctx
        assert 256 <= model.n_ctx == largest < 2048 and warned[0].filename == __file__
    with pytest.raises(slimrt.WontFitError, match=f"--ctx {largest}"):
        slimrt.Model(path, n_ctx=2048, memory_limit=needed * 2 // 3)
    least = slimrt.plan(path, n_ctx=224).asked.total  # so few tokens are not worth it unless they are asked for
    with pytest.raises(slimrt.WontFitError, match="--ctx 224"):
        slimrt.Model(path, memory_limit=least)
    path = SHIPPED / "tale-chat.gguf"
    asked = slimrt.plan(path).asked
    code, _, err = run("chat", path, "-p", "hi", "-n", 1, "--memory-limit", asked.total - asked.cache_bytes // 2)
    assert code == 0 and err.count("tokens, the most that fits in") == 1
