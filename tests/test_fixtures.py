# SPDX-License-Identifier: Apache-2.0
"""Third-party trained models under ../shared/fixtures (skipped, by name, where they are absent)."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import slimrt
from conftest import relative, third_party
from reference import Reference

STORIES = "models/stories260K/stories260K.gguf"
PARITY = 1e-4


def greedy(session: slimrt.Session, ids: list[int], n_total: int) -> list[int]:
    """ids continued by the likeliest token up to n_total ids."""
    ids, fresh = list(ids), list(ids)
    while len(ids) < n_total:
        fresh = [int(session.append(fresh)[-1].argmax())]
        ids += fresh
    return ids


# ---------------------------------------------------------------- stories260K: llama, GQA, SPM vocabulary
@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_stories_greedy_text(cache_type):
    """The 200 greedy steps that llama2.c publishes."""
    wanted = third_party("models/stories260K/expected_greedy_200.txt").read_text().strip()
    with slimrt.Model(third_party(STORIES), cache="kv", cache_type=cache_type) as model:
        result = model.generate([model.tokenizer.bos_id], max_tokens=200, temperature=0)
        text = result.text.strip()
        assert len(text) > 300
        assert text[: len(wanted)] == wanted[: len(text)] and len(text) >= len(wanted) - 8, (text, wanted)
        assert "".join(model.stream([model.tokenizer.bos_id], max_tokens=200, temperature=0)).strip() == text


def test_stories_from_a_text_prompt():
    """The tokenizer, its BOS and its leading space: continuing the beginning of the text gives the same text."""
    wanted = third_party("models/stories260K/expected_greedy_200.txt").read_text().strip()
    with slimrt.Model(third_party(STORIES), cache_type="f32") as model:
        prompt = "Once upon a time, there was a little girl named Lily."
        assert wanted.startswith(prompt)
        result = model.generate(prompt, max_tokens=60, temperature=0)
        assert len(result.tokens) == 60 and wanted.startswith((prompt + result.text)[: len(wanted)])


def test_stories_logits_equal_the_reference():
    path, ids = third_party(STORIES), np.random.default_rng(0).integers(3, 512, 100)
    with slimrt.Model(path, cache_type="f32", n_ctx=128) as model:
        assert relative(model.logits(ids), Reference(path).logits(ids)) < 2e-5


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slimrt", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_stories_k_is_refused_in_one_clear_sentence():
    """Grouped heads: V is not a function of K, and the command says so and fails."""
    done = command("generate", str(third_party(STORIES)), "-p", "Once", "-n", "4", "--cache", "k")
    assert done.returncode not in (0, None) and done.returncode > 0
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "layer 0" in lines[0] and "head" in lines[0] and "kv" in lines[0], lines[0]


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize("isa", slimrt._core.cpu_info()["isas"])
def test_stories_on_every_instruction_set(isa, cache_type, monkeypatch):
    """The published text, to its last byte, on each kernel path of this machine."""
    wanted = third_party("models/stories260K/expected_greedy_200.txt").read_text()
    monkeypatch.setenv("SLIMRT_ISA", isa)
    done = command(
        "generate", str(third_party(STORIES)), "-p", "", "-n", "200", "--temp", "0", "--cache-type", cache_type, "-v"
    )
    assert f"cpu {isa}" in done.stderr
    assert done.stdout == wanted


def test_stories_on_the_command_line():
    wanted = third_party("models/stories260K/expected_greedy_200.txt").read_text().strip()
    path = str(third_party(STORIES))
    done = command("generate", path, "-p", "Once upon a time", "-n", "40", "--temp", "0", "--cache-type", "f32")
    assert done.returncode == 0, done.stderr
    text = done.stdout.strip()
    assert wanted.startswith(text) or wanted.startswith(("Once upon a time" + done.stdout.rstrip("\n")).strip()), text
    again = command("generate", path, "-p", "Once upon a time", "-n", "40", "--temp", "0", "--cache-type", "f32", "-q")
    assert again.stdout == done.stdout


# ---------------------------------------------------------------- trained GPT-2 layouts
def golden(name: str):
    directory = third_party(f"models/{name}")
    return directory, json.loads((directory / "golden.json").read_text())


def test_slm4096_logits_and_greedy_ids():
    directory, wanted = golden("slm4096")
    with slimrt.Model(directory, cache="kv", cache_type="f32") as model:
        logits = model.logits(wanted["greedy"])[-1]
        assert relative(logits, np.array(wanted["logits_last"])) < PARITY
        with model.session() as session:
            assert greedy(session, wanted["prompt"], len(wanted["greedy"])) == wanted["greedy"]


@pytest.mark.parametrize("mode", ["k", "v", "x"])
def test_slm4096_repeats_its_corpus_in_every_mode(mode):
    """A trained model with float16 rows: the text is the same although the rows are half as wide."""
    directory, wanted = golden("slm4096")
    corpus = (directory / "corpus.txt").read_text()
    with slimrt.Model(directory, cache=mode, cache_type="f16") as model, model.session() as session:
        ids = greedy(session, wanted["prompt"], len(wanted["greedy"]))
        assert model.memory()["cache_bytes_per_token"] == 64 * 2 * 4
    assert "".join(wanted["vocab"][i] for i in ids) == corpus[: len(ids)]


def test_makemore_logits_and_greedy_ids():
    """Untied head, tanh GELU."""
    directory, wanted = golden("makemore_lmj9_model")
    with slimrt.Model(directory, cache="kv", cache_type="f32") as model:
        got = model.logits(wanted["logits_tokens"])
        assert relative(got, np.array(wanted["logits"])) < PARITY
        with model.session() as session:
            ids = wanted["greedy_from_bos"]
            assert greedy(session, ids[:1], len(ids)) == ids


def test_makemore_context_overflow():
    directory, _ = golden("makemore_lmj9_model")
    with slimrt.Model(directory) as model:
        assert model.n_ctx == 16 and model.logits([1] * 16).shape == (16, 27)
        with pytest.raises(slimrt.ContextOverflowError, match="16"):
            model.logits([1] * 17)
    with pytest.raises((ValueError, slimrt.SlimrtError), match="16"):
        slimrt.Model(directory, n_ctx=17)  # learned positions: there are no more
