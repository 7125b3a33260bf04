# SPDX-License-Identifier: Apache-2.0
"""Layers that read another layer's rows (slimrt.cache.owners): what they compute, store and cost; which are refused.

The reference in float64 knows owners: queries are of a layer itself, rows of its owner. Tolerances are made as in
test_cache_modes.py.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from conftest import decode, derived, ids_of, open_engine, rms
from gguf_shapes import Shape, write_random
from reference import Reference
from remembered import remembered
from slimrt import _core, convert
from slimrt.errors import ModelFormatError
from test_regions import same_rounding

KEY = "slimrt.cache.owners"
OWNERS = [0, 0, 2, 0, 4, 4]  # two layers apart, with a layer of its own between, and neighbours
IDS = np.random.default_rng(11).integers(3, 60, 60)
N_PREFILL = 44
FLOAT32, FLOAT32_STEPS, SAME_ROUNDING = 2e-6, 8, 0.5
ABSORBED = 0.83  # of rounding: with weights as integers it may be 1.3 times as much in all (sqrt(1 + 0.83^2))
SHAPES = {
    "llama": Shape(d=32, n_layers=6, n_heads=4, n_ctx=512),
    "llama_gqa": Shape(d=32, n_layers=6, n_heads=4, n_kv_heads=2, n_ctx=512),
    "olmo2": Shape(d=32, n_layers=6, n_heads=4, n_ctx=512, arch="olmo2"),  # QK-norm, norms of outputs
    "gpt2": Shape(d=32, n_layers=6, n_heads=4, n_ctx=512, arch="gpt2"),  # biases, one tensor for q, k and v
}
CASES = [
    ("llama", "kv"),
    ("llama", "k"),
    ("llama_gqa", "kv"),
    ("llama_gqa", "k+r"),
    ("llama", "lowrank"),
    ("llama_gqa", "lowrank"),
    ("olmo2", "kv"),
    ("olmo2", "k"),
    ("gpt2", "kv"),
    ("gpt2", "k"),
    ("gpt2", "v"),
    ("gpt2", "x"),
]
each_case = pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """files(name) -> (a file whose layers all have rows, the same with owners and without the weights they spare)."""
    folder = tmp_path_factory.mktemp("shared")

    @cache
    def written(name: str) -> tuple[Path, Path]:
        shape = SHAPES[name]
        plain = write_random(folder / f"{name}.gguf", shape)
        shared = write_random(folder / f"{name}_shared.gguf", shape, {KEY: OWNERS}, spared(shape))
        return plain, shared

    return written


def spared(shape: Shape) -> dict[str, None]:
    """Weights of K and V that no layer needs."""
    parts = [f"attn_{x}.weight" for x in "kv"]
    names = [f"blk.{i}.{part}" for i, owner in enumerate(OWNERS) if owner != i for part in parts]
    return {name: None for name in names if name in shape.tensors()}


def open_shared(files, name: str, mode: str, dtype: str = "f32", **options):
    plain, shared = files(name)
    rank = {"rank": 8} if mode == "k+r" else {}
    made = derived(plain, mode, dtype, 8)
    own = {key: tensor for key, tensor in made.items() if OWNERS[int(key.split(".")[1])] == int(key.split(".")[1])}
    return open_engine(shared, mode, dtype, **({"n_ctx": 64, "derived": own} | rank | options))


@remembered
def predict(plain: Path, mode: str, dtype: str | None, n_prefill: int) -> np.ndarray:
    model = Reference(plain, wkv_dtype="f32", folds=derived(plain, mode, dtype or "f32", 8), owners=OWNERS)
    return model.logits_cached(IDS, n_prefill, mode, dtype)


@remembered
def exact_logits(plain: Path) -> np.ndarray:
    return Reference(plain, owners=OWNERS).logits(IDS)


def noise(plain: Path, mode: str, n_prefill: int) -> float:
    """Of an engine that computes in float32. What k+r does not say of V at its rank is none."""
    exact = predict(plain, mode, None, n_prefill) if mode == "k+r" else exact_logits(plain)
    return FLOAT32 * rms(exact) + FLOAT32_STEPS * rms(predict(plain, mode, "f32", n_prefill) - exact)


def check(files, name: str, mode: str, dtype: str, got: np.ndarray, n_prefill: int) -> None:
    plain = files(name)[0]
    wanted = predict(plain, mode, dtype, n_prefill)
    predicted = 0.0 if dtype == "f32" else rms(wanted - predict(plain, mode, None, n_prefill))
    absorbed = mode not in ("kv", "v")
    assert rms(got - wanted) <= noise(plain, mode, n_prefill) + (ABSORBED if absorbed else SAME_ROUNDING) * predicted


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8"])
@each_case
def test_prompt_then_steps(name, mode, dtype, files):
    got = decode(open_shared(files, name, mode, dtype), IDS, N_PREFILL)
    check(files, name, mode, dtype, got, N_PREFILL)


@pytest.mark.parametrize(
    ("name", "mode", "levels"),
    [
        ("llama", "kivi", "q4+q8*0.3+recent=0"),
        ("llama", "lowrank", "f32@0.5+f32*0.3"),
        ("llama_gqa", "lowrank", "q4@0.5+q8*0.3"),
        ("olmo2", "lowrank", "q4@0.5+q8*0.3+predict"),
    ],
)
def test_rows_that_age_are_the_owners(name, mode, levels, files):
    ids = ids_of(3, 230) % 60
    model = Reference(files(name)[0], folds=derived(files(name)[0], mode), owners=OWNERS)
    wanted, unrounded = (model.logits_cached(ids, 100, mode, text) for text in (levels, re.sub(r"q\d", "f32", levels)))
    got = decode(open_shared(files, name, mode, levels, n_ctx=256), ids, 100)
    assert same_rounding(got, wanted, unrounded, "f32" if "q" not in levels else levels)


def test_owners_matter(files):
    """The model is another one without them: what the checks above would let pass is far away."""
    plain, _ = files("llama")
    alone, together = Reference(plain).logits(IDS), exact_logits(plain)
    assert rms(alone - together) > 0.1 * rms(alone)


@pytest.mark.parametrize("n_batch", [1, 7, 33])
@each_case
def test_long_prompt_in_chunks(name, mode, n_batch, files):
    """Layers that share rows go together, chunk by chunk; in float32 the chunks leave no trace."""
    got = decode(open_shared(files, name, mode, n_batch=n_batch), IDS, len(IDS))
    whole = decode(open_shared(files, name, mode), IDS, len(IDS))
    assert rms(got - whole) <= 1e-5 * rms(whole)
    if mode != "k+r":  # it is no more exact than its rank
        exact = exact_logits(files(name)[0])
        assert rms(got - exact) <= 1e-5 * rms(exact)


@each_case
def test_forks_and_sequences_side_by_side(name, mode, files):
    """Sequences of one step, of different lengths, say what each says alone; a fork goes on as its twin."""
    prompt, other = IDS[:40].astype(np.int32), IDS[40:53].astype(np.int32)

    def alone(*parts: np.ndarray) -> np.ndarray:
        engine = open_shared(files, name, mode)
        sequence = engine.new_sequence()
        return [engine.append([(sequence, part)], all_logits=True) for part in parts][-1]

    engine = open_shared(files, name, mode, n_seqs=4)
    first, second = engine.new_sequence(), engine.new_sequence()
    engine.append([(first, prompt), (second, other)])
    twin = engine.fork(first)
    together = engine.append([(second, prompt[:20]), (first, other[:3]), (twin, other[3:5])], all_logits=True)
    wanted = np.concatenate([alone(other, prompt[:20]), alone(prompt, other[:3]), alone(prompt, other[3:5])])
    allowed = 2 * noise(files(name)[0], mode, N_PREFILL)
    assert rms(together - wanted) <= allowed < 1e-3 * rms(wanted)
    engine.truncate(twin, 33)
    again = engine.append([(twin, prompt[33:])], all_logits=True)
    assert rms(again - alone(prompt[:33], prompt[33:])) <= allowed


@pytest.mark.parametrize("name", SHAPES)
def test_weights_that_are_spared_may_stand_in_the_file(name, files, tmp_path):
    every = write_random(tmp_path / "every.gguf", SHAPES[name], {KEY: OWNERS})
    outputs = [decode(open_engine(path, n_ctx=64), IDS, N_PREFILL) for path in (every, files(name)[1])]
    assert np.array_equal(*outputs)


@pytest.mark.parametrize(("name", "mode"), [("llama", "kv"), ("llama", "k"), ("gpt2", "x")])
def test_a_layer_without_rows_costs_none(name, mode, files):
    plain, shared = files(name)
    options = {"cache": mode, "n_ctx": 128, "cache_type_k": "f16", "cache_type_v": "f16"}
    alone, together = (_core.plan(str(path), **options) for path in (plain, shared))
    sizes = [layer["bytes_per_token"] for layer in together["layers"]]
    owned = [i for i, owner in enumerate(OWNERS) if i == owner]
    assert [i for i, size in enumerate(sizes) if size] == owned
    assert [sizes[i] for i in owned] == [alone["layers"][i]["bytes_per_token"] for i in owned]
    assert together["cache"] * len(OWNERS) == alone["cache"] * len(owned)
    engine = open_shared(files, name, mode, "f16", n_ctx=128)
    memory = engine.memory()
    assert {key: memory[key] for key in ("cache", "scratch", "derived", "total")} == {
        key: together[key] for key in ("cache", "scratch", "derived", "total")
    }


def test_sessions_know_whose_rows_they_hold(files):
    plain, shared = files("llama")
    engine, other = (open_engine(path, n_ctx=64, n_seqs=2) for path in (shared, plain))
    sequence = engine.new_sequence()
    ids = IDS.astype(np.int32)
    engine.append([(sequence, ids[:40])])
    saved = engine.save_sequence(sequence)
    restored = engine.load_sequence(saved)
    assert np.array_equal(engine.append([(sequence, ids[40:41])]), engine.append([(restored, ids[40:41])]))
    with pytest.raises(ModelFormatError, match="another model or cache"):
        other.load_sequence(saved)


@pytest.mark.parametrize(
    ("owners", "reason"),
    [
        ([0, 0, 2, 0, 4], "is not an array of 6 layers"),
        ("0 0 2 0 4 4", "is not an array of 6 layers"),
        ([0, 0, 2, 4, 4, 4], "layer 3 reads the rows of layer 4, but an owner is the layer itself or one before it"),
        ([0, -1, 2, 3, 4, 5], "layer 1 reads the rows of layer -1, but an owner"),
        ([0, 0, 1, 3, 4, 5], "layer 2 reads the rows of layer 1, which reads those of layer 0: an owner reads its own"),
        ([0.0, 0.0, 2.0, 3.0, 4.0, 5.0], "but an owner is the layer itself"),
    ],
)
def test_nonsense_owners_are_refused(owners, reason, tmp_path):
    path = write_random(tmp_path / "nonsense.gguf", SHAPES["llama"], {KEY: owners})
    for opened in (lambda: open_engine(path, n_ctx=64), lambda: _core.plan(str(path), n_ctx=64)):
        with pytest.raises(ModelFormatError, match=f"key '{KEY}'.*{reason}"):
            opened()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"cache": ["kv", "k", "kv", "kv", "kv", "kv"]}, "cache"),
        ({"cache_type_k": ["f16"] * 5 + ["f32"]}, "cache_type_k"),
        ({"cache_type_v": ["f16"] * 5 + ["q8"]}, "cache_type_v"),
    ],
)
def test_a_layer_without_rows_has_no_options_of_its_own(options, what, files):
    with pytest.raises(ValueError, match=f"^{what} of layer [15] is not that of layer [04], whose rows it reads"):
        _core.plan(str(files("llama")[1]), n_ctx=64, **options)


def test_a_layer_without_rows_takes_its_owners_options(files):
    modes, types = ["kv", "auto", "kv", "auto", "kv", "auto"], ["f32", "auto", "q8", "f32", "f16", "auto"]
    layers = _core.plan(str(files("llama")[1]), n_ctx=64, cache=modes, cache_type_k=types)["layers"]
    assert [layer["type"] for layer in layers] == ["f32+f16"] * 2 + ["q8+f16", "f32+f16"] + ["f16"] * 2


@pytest.mark.parametrize("mode", ["x", "k", "v"])
def test_folding_moves_an_owners_v_bias_into_every_readers_output(mode, files, tmp_path):
    """V's bias is the owner's, W_O a reader's: of a model with biases, converted, the text says what it said."""
    plain, shared = files("gpt2")
    convert(shared, tmp_path / "folded.gguf", cache=mode, cache_type="f32", calibration="none", progress=False)
    got = decode(_core.Engine(str(tmp_path / "folded.gguf"), n_ctx=64), IDS, N_PREFILL)
    exact = exact_logits(plain)
    assert rms(got - exact) <= noise(plain, mode, N_PREFILL) < 1e-3 * rms(exact)
