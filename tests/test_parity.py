# SPDX-License-Identifier: Apache-2.0
"""Logits agree with Hugging Face transformers in float32: the whole prompt, then 16 steps over the cache.

The goldens are committed. With the extra `oracle` (torch, transformers) they are recomputed and compared too.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, relative
from hf_models import MODELS
from reference import Reference
from reference_files import hf_tensors, reads_directory

PARITY = 1e-4  # of float32 engines, relative to the largest logit
REFERENCE = 1e-5  # of float64 against float32
CASES = [(name, suffix) for name, tiny in MODELS.items() for suffix in tiny.prompts]
IDS = [name + suffix for name, suffix in CASES]
each_golden = pytest.mark.parametrize(("name", "suffix"), CASES, ids=IDS)
oracle = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")),
    reason="needs the extra `oracle`: torch and transformers",
)


def golden(name: str, suffix: str) -> tuple[np.ndarray, int, np.ndarray, int]:
    """ids, length of the prompt, logits of all ids, n_ctx."""
    with np.load(GOLDEN / name / f"golden{suffix}.npz") as data:
        logits = np.concatenate([data["prefill"], data["decode"]])
        return data["ids"], len(data["prefill"]), logits, int(data["n_ctx"])


def run(path: Path, ids: np.ndarray, n_prompt: int, n_ctx: int, **options) -> np.ndarray:
    """A prompt, then one token at a time."""
    with slimrt.Model(path, cache="kv", cache_type="f32", n_ctx=n_ctx, **options) as model, model.session() as session:
        steps = [session.append(ids[:n_prompt])]
        steps += [session.append(ids[i : i + 1]) for i in range(n_prompt, len(ids))]
    return np.concatenate(steps)


@each_golden
def test_hf_directory_loaded_directly(name, suffix):
    ids, n_prompt, logits, n_ctx = golden(name, suffix)
    assert relative(run(GOLDEN / name, ids, n_prompt, n_ctx), logits) < PARITY


@each_golden
def test_hf_directory_converted(name, suffix, convert):
    ids, n_prompt, logits, n_ctx = golden(name, suffix)
    assert relative(run(convert(GOLDEN / name), ids, n_prompt, n_ctx), logits) < PARITY


@pytest.mark.parametrize("n_batch", [1, 3, 7])
@each_golden
def test_small_chunks_and_two_threads(name, suffix, n_batch, convert):
    ids, n_prompt, logits, n_ctx = golden(name, suffix)
    got = run(convert(GOLDEN / name), ids, n_prompt, n_ctx, n_batch=n_batch, n_threads=2)
    assert relative(got, logits) < PARITY


@pytest.mark.unsanitized  # the reference alone
@pytest.mark.parametrize(("name", "suffix"), [case for case in CASES if reads_directory(MODELS[case[0]].family)])
def test_reference_agrees(name, suffix):
    ids, _, logits, n_ctx = golden(name, suffix)
    assert relative(Reference(GOLDEN / name, n_ctx).logits(ids), logits) < REFERENCE


@pytest.mark.unsanitized  # the reference alone
@each_golden
def test_reference_reads_the_converted_file_alike(name, suffix, convert):
    """The converter alone, in float64: a wrong permutation, bias or key shows here."""
    ids, _, logits, n_ctx = golden(name, suffix)
    assert relative(Reference(convert(GOLDEN / name), n_ctx).logits(ids), logits) < REFERENCE


@pytest.mark.parametrize("name", MODELS)
def test_goldens_are_what_they_say(name):
    """The sharded one is sharded, the old spellings are old, the types are as stored."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    shards = list((GOLDEN / name).glob("*.safetensors"))
    assert (len(shards) > 1) == (name == "llama_gqa_tied")
    assert ("rope_scaling" in config) == (name in ("llama_llama3", "phi3", "gemma3_mha"))
    assert config["dtype"] == MODELS[name].dtype


@oracle
@pytest.mark.oracle
@each_golden
def test_goldens_recomputed(name, suffix):
    import hf_models

    ids, n_prompt, logits, n_ctx = golden(name, suffix)
    fresh = hf_models.golden(name, GOLDEN / name, suffix)
    assert np.array_equal(fresh["ids"], ids) and fresh["n_ctx"] == n_ctx
    assert relative(np.concatenate([fresh["prefill"], fresh["decode"]]), logits) < REFERENCE


@oracle
@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_models_rebuilt(name, tmp_path):
    import hf_models

    hf_models.save(name, tmp_path)
    fresh, committed = hf_tensors(tmp_path), hf_tensors(GOLDEN / name)
    assert fresh.keys() == committed.keys()
    assert all(np.array_equal(fresh[key], committed[key]) for key in fresh)
    made, kept = (json.loads((path / "config.json").read_text()) for path in (tmp_path, GOLDEN / name))
    assert {key for key in made.keys() & kept.keys() if made[key] != kept[key]} <= {"transformers_version"}


def test_the_twin_of_the_cache_flag_names_no_directory(tmp_path, monkeypatch):
    """SLIMRT_CACHE stands for --cache (a mode): a directory that is loaded must not be converted into ./k."""
    monkeypatch.setenv("SLIMRT_CACHE", "k")
    monkeypatch.chdir(tmp_path)
    with slimrt.Model(GOLDEN / "llama_mha", n_ctx=16) as model:
        assert model.n_ctx == 16
    assert list(tmp_path.iterdir()) == []
