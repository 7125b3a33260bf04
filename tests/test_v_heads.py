# SPDX-License-Identifier: Apache-2.0
"""Heads that keep V beside K in modes k and k+r: what the engine computes, keeps and refuses (see v_heads.py)."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from gguf import GGUFValueType

import slimrt
import v_heads
from conftest import GOLDEN, decode, open_engine, relative, rms
from reference import Reference
from reference_modes import CACHE_MODES
from remembered import remembered
from slimrt import _core
from slimrt.modelfile.gguf import array, read_gguf, write_gguf
from test_cache_modes import IDS, N_PREFILL, exact_logits
from test_cache_modes_residual import check

RANK, RESIDUAL = 4, "q8"
CASES = [
    ("llama_mha", "k"),
    ("qwen2_mha", "k"),  # K bias and RoPE
    ("llama_wide", "k"),  # right inverse
    ("llama_gqa_wide", "k"),  # grouped heads
    ("mistral_mha", "k"),  # a window
    ("gptneox", "k"),  # fused projections, a part of each head rotates
    ("gpt2_tanh", "k"),  # no RoPE
    ("llama_mha", "k+r"),
    ("llama_gqa_tied", "k+r"),
    ("llama_bias", "k+r"),
    ("gpt2_tanh", "k+r"),
    ("olmo2_gqa", "k+r"),  # QK-norm
]
each_case = pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])


@pytest.fixture(scope="session")
def keeping(convert, tmp_path_factory):
    """keeping(name, mode) -> a file whose layers keep V of half of their heads."""
    made = {}

    def written(name: str, mode: str):
        if (name, mode) not in made:
            out = tmp_path_factory.mktemp("v_heads") / f"{name}.gguf"
            made[name, mode] = v_heads.write(convert(GOLDEN / name), out, mode)
        return made[name, mode]

    return written


@remembered
def folds(path, mode: str, dtype: str | None) -> dict[str, np.ndarray]:
    return v_heads.folds(path, mode, dtype, RANK)


def engine_of(path, mode: str, dtype: str, **options):
    given = {"residual_type": RESIDUAL} if mode == "k+r" else {}
    return _core.Engine(
        str(path), cache=mode, cache_type_k=dtype, cache_type_v=dtype, derived=folds(path, mode, dtype),
        **({"n_ctx": 64} | given | options),
    )  # fmt: skip


@remembered
def predict(path, mode: str, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits with rows rounded, rounded to float32, and not rounded."""
    model = Reference(path, folds=folds(path, mode, dtype))
    with patch.dict(CACHE_MODES, v_heads.MODES):
        types = ((dtype, RESIDUAL if mode == "k+r" else dtype), "f32", None)
        return tuple(model.logits_cached(IDS, N_PREFILL, mode, one) for one in types)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8", "q4"])
@each_case
def test_it_computes_what_the_reference_does(name, mode, dtype, keeping):
    path = keeping(name, mode)
    got = decode(engine_of(path, mode, dtype), IDS, N_PREFILL)
    check(got, predict(path, mode, dtype), dtype, RESIDUAL if mode == "k+r" else dtype)


@pytest.mark.parametrize("isa", _core.ops.backends())
@pytest.mark.parametrize(("name", "mode"), [("llama_mha", "k"), ("llama_gqa_tied", "k+r")])
def test_every_instruction_set(name, mode, isa, keeping, monkeypatch):
    monkeypatch.setenv("SLIMRT_ISA", isa)
    path = keeping(name, mode)
    engine = engine_of(path, mode, "q8")
    assert isa in engine.info()["device"]
    check(decode(engine, IDS, N_PREFILL), predict(path, mode, "q8"), "q8", RESIDUAL)


@pytest.mark.parametrize("n_batch", [1, 5, 33])
@pytest.mark.parametrize("name", ["llama_mha", "mistral_mha", "gptneox"])
def test_it_is_kv(name, n_batch, keeping):
    """In float32, whatever the steps; and a prompt alone reads nothing that was stored, whatever the type."""
    path = keeping(name, "k")
    wanted = decode(open_engine(path, "kv", "f32", n_ctx=64), IDS, N_PREFILL)
    assert rms(decode(engine_of(path, "k", "f32", n_batch=n_batch), IDS, N_PREFILL) - wanted) < 1e-4 * rms(wanted)
    alone = decode(engine_of(path, "k", "q8"), IDS, len(IDS))
    assert rms(alone - exact_logits(path)) < 2e-5 * rms(wanted)


@pytest.mark.parametrize(("name", "mode"), [("llama_mha", "k"), ("llama_gqa_tied", "k+r"), ("mistral_mha", "k")])
def test_sequences_stay_apart(name, mode, keeping):
    """Forked, truncated, in batches of unequal length, saved: each has the logits of its own text."""
    path = keeping(name, mode)
    options = {"n_ctx": 128, "n_seqs": 4, "n_batch": 48}
    engine, rng = engine_of(path, mode, "f32", **options), np.random.default_rng(3)
    ids = [rng.integers(3, 100, n).astype(np.int32) for n in (50, 9, 1, 40)]

    def alone(*texts: np.ndarray) -> np.ndarray:
        other = engine_of(path, mode, "f32", **options)
        sequence = other.new_sequence()
        return [other.append([(sequence, text)]) for text in texts][-1]

    first = engine.new_sequence()
    engine.append([(first, ids[0])])
    fork = engine.fork(first)
    both = engine.append([(first, ids[1]), (fork, ids[2])])
    assert relative(both[0], alone(ids[0], ids[1])[0]) < 2e-5
    assert relative(both[1], alone(ids[0], ids[2])[0]) < 2e-5
    if engine.can_truncate(first, 33):
        engine.truncate(first, 33)
        assert relative(engine.append([(first, ids[3])])[0], alone(ids[0][:33], ids[3])[0]) < 2e-5
    saved = engine.save_sequence(fork)
    other = engine_of(path, mode, "f32", **options)
    again = other.load_sequence(saved)
    assert np.array_equal(other.append([(again, ids[1])]), engine.append([(fork, ids[1])]))


@each_case
def test_what_is_planned_is_allocated(name, mode, keeping):
    path = keeping(name, mode)
    model = Reference(path)
    kept = v_heads.v_heads(model)
    slim, wide = v_heads.slim(model), v_heads.slim(model) + kept * model.dk
    normed = 4 * (model.w.layers[0].k_norm is not None)
    for dtype, size in (("f16", 2), ("q8", 1)):
        engine = engine_of(path, mode, dtype)
        scales = 4 * (dtype == "q8")
        of_k = slim * size + scales * (1 if mode == "k+r" else slim // model.dk)
        row = of_k + 2 * kept * (model.dk * size + scales) + (RANK + 4) * (mode == "k+r") + normed
        assert row - normed < 2 * wide * size + (2 * scales + 8) * model.w.n_kv_heads  # less than kv
        for layer in engine.info()["layers"]:
            assert (layer["bytes_per_token"], layer["v_heads"]) == (row, kept)
        given = {"residual_type": RESIDUAL, "rank": RANK} if mode == "k+r" else {}
        plan = _core.plan(str(path), cache=mode, cache_type_k=dtype, cache_type_v=dtype, n_ctx=64, **given)
        assert {key: plan[key] for key in engine.memory()} == engine.memory()


def test_it_belongs_to_the_mode_of_the_file(keeping):
    path = keeping("llama_mha", "k")
    assert {one["v_heads"] for one in _core.resolve_layers(str(path))} == {v_heads.v_heads(Reference(path))}
    for mode in ("kv", "k+r"):
        assert {one["v_heads"] for one in _core.resolve_layers(str(path), cache=mode)} == {0}


@pytest.mark.parametrize(
    ("heads", "error", "words"),
    [
        (lambda n, layers: [n] + [0] * (layers - 1), slimrt.ModelFormatError, "layer 0 keeps V of .* not all"),
        (lambda n, layers: [-1] + [0] * (layers - 1), slimrt.ModelFormatError, "layer 0 keeps V of -1"),
        (lambda n, layers: [1] * (layers + 1), slimrt.ModelFormatError, "not an array of"),
    ],
)
def test_nonsense_in_a_file_is_refused(heads, error, words, convert, tmp_path):
    path = convert(GOLDEN / "llama_mha")
    model = read_gguf(str(path))
    n, layers = Reference(path).w.n_kv_heads, model.size("block_count")
    values = array(heads(n, layers), GGUFValueType.INT32)
    write_gguf(tmp_path / "bad.gguf", model.with_metadata({"slimrt.cache.v_heads": values}), show_progress=False)
    with pytest.raises(error, match=words):
        _core.plan(str(tmp_path / "bad.gguf"), n_ctx=64)


def test_a_fold_without_such_heads_is_refused(keeping):
    path = keeping("llama_mha", "k")
    model = Reference(path)
    plain = {f"blk.{i}.attn_kv.weight": model.w_kv(i).T.astype(np.float32) for i in range(len(model.w.layers))}
    with pytest.raises(slimrt.ModelFormatError, match="attn_kv.weight.*expected"):
        _core.Engine(str(path), cache="k", n_ctx=64, derived={k: np.ascontiguousarray(v) for k, v in plain.items()})


def test_shared_rows_cannot_keep_v(keeping, tmp_path):
    model = read_gguf(str(keeping("llama_mha", "k")))
    owners = array([0] * model.size("block_count"), GGUFValueType.UINT32)
    path = tmp_path / "shared.gguf"
    write_gguf(path, model.with_metadata({"slimrt.cache.owners": owners}), show_progress=False)
    with pytest.raises(slimrt.CacheUnsupportedError, match="cannot be shared"):
        _core.plan(str(path), n_ctx=64)
