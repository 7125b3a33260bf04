# SPDX-License-Identifier: Apache-2.0
"""The reference models this project trains and ships: their goldens, retrieval from the context, k against kv."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import rms
from reference import Reference

SHIPPED = Path(__file__).parent.parent / "models"
NAMES = sorted(path.stem for path in SHIPPED.glob("*.gguf"))
LONG = 1024  # models with this context answer the prompts of retrieval.json
N_RETRIEVAL = 6

pytestmark = pytest.mark.skipif(not NAMES, reason=f"no models in {SHIPPED}")
each_model = pytest.mark.parametrize("name", NAMES)


def golden(name: str) -> dict:
    return json.loads((SHIPPED / f"{name}.golden.json").read_text(encoding="utf-8"))


def load(name: str, mode: str = "kv", cache_type: str = "f32", **options) -> slimrt.Model:
    return slimrt.Model(SHIPPED / f"{name}.gguf", cache=mode, cache_type=cache_type, **options)


def continued(model: slimrt.Model, ids: list[int], n: int) -> list[int]:
    """The n likeliest tokens after ids, one at a time, past the end of a text."""
    with model.session() as session:
        fresh, out = ids, []
        while len(out) < n:
            fresh = [int(session.append(fresh, last_only=True)[-1].argmax())]
            out += fresh
        return out


@each_model
def test_prompts(name):
    """Ids, the likeliest tokens and their logits, and the text that follows."""
    with load(name) as model:
        for row in golden(name)["prompts"]:
            assert model.tokenize(row["prompt"]) == row["ids"]
            last = model.logits(row["ids"])[-1].astype(np.float64)
            size = np.abs(last).max()
            assert np.abs(last[row["top5_ids"]] - row["top5_logits"]).max() < 1e-4 * size
            assert abs(last.max() + np.log(np.exp(last - last.max()).sum()) - row["log_sum_exp"]) < 1e-4 * size
            if "last_logits" in row:
                assert np.abs(last - row["last_logits"]).max() < 1e-4 * size
            if "greedy_ids" in row:
                assert continued(model, row["ids"], len(row["greedy_ids"])) == row["greedy_ids"]


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@each_model
def test_200_greedy_tokens_in_kv(name, cache_type):
    wanted = golden(name)["greedy_200"]
    with load(name, "kv", cache_type) as model:
        n = min(200, model.n_ctx - len(wanted["ids"]))  # the golden window slides at the end of a short context
        assert continued(model, wanted["ids"], n) == wanted["greedy_ids"][:n]


@each_model
def test_200_greedy_tokens_in_k_are_those_in_kv(name):
    """K-only in float32 writes the same text: a trained model, an exact identity."""
    wanted = golden(name)["greedy_200"]
    with load(name, "k") as k, load(name, "kv") as kv:
        assert k.memory()["cache_bytes_per_token"] * 2 == kv.memory()["cache_bytes_per_token"]
        n = min(200, k.n_ctx - len(wanted["ids"]))
        assert continued(k, wanted["ids"], n) == wanted["greedy_ids"][:n]


@each_model
def test_k_errs_as_much_as_the_reference_predicts(name):
    """Float16 rows, on text, against rounding in the reference (see test_cache_modes.py)."""
    path = SHIPPED / f"{name}.gguf"
    with load(name, "k", "f16", n_ctx=128) as model, model.session() as session:
        ids = np.array(golden(name)["greedy_200"]["greedy_ids"][:72])
        got = np.concatenate([session.append(ids[:48])] + [session.append(ids[i : i + 1]) for i in range(48, 72)])
    reference = Reference(path, wkv_dtype="f32")
    exact, predicted = reference.logits(ids), reference.logits_cached(ids, 48, "k", "f16")
    assert rms(got - exact) < 1.5 * rms(predicted - exact) + 1e-5 * rms(exact)


@pytest.mark.parametrize(("mode", "cache_type"), [("kv", "f32"), ("kv", "f16"), ("k", "f32")])
@each_model
def test_retrieval(name, mode, cache_type):
    """A fact stated up to 1000 tokens before its question is found through the cache."""
    with load(name, mode, cache_type, n_ctx=0) as model:
        if model.n_ctx < LONG:
            pytest.skip(f"{name} has a context of {model.n_ctx}")
        prompts = json.loads((SHIPPED / "retrieval.json").read_text(encoding="utf-8"))["prompts"]
        share = golden(name)["retrieval"][0]["accuracy"]
        chosen = prompts[:: len(prompts) // N_RETRIEVAL][:N_RETRIEVAL]
        right = 0
        for row in chosen:
            assert model.tokenize(row["prompt"]) == row["prompt_ids"]
            right += continued(model, row["prompt_ids"], len(row["answer_ids"])) == row["answer_ids"]
    assert share > 0.9 and right >= len(chosen) - 1


@each_model
def test_files_are_small_and_complete(name):
    """What ships with the project stays small, and carries its licence and tokenizer."""
    path = SHIPPED / f"{name}.gguf"
    file = slimrt._core.GgufFile(str(path))
    assert path.stat().st_size < 16 << 20
    assert file.value("general.license") == "Apache-2.0"
    assert len(file.value("tokenizer.ggml.tokens")) == file.tensors()["token_embd.weight"][1][0]
