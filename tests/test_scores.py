# SPDX-License-Identifier: Apache-2.0
"""Models whose scores and logits are capped, and whose heads have sinks, in every mode that may: against float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import slimrt
import test_cache_modes_residual as residual
from conftest import GOLDEN, ISAS, decode, derived, ids_of, open_engine, relative
from reference import Reference
from scored import capped, with_sinks
from slimrt import _core, core
from slimrt.folding.attention import Attention
from slimrt.folding.weights import LayerWeights
from slimrt.folding.window import KeyNoise, Window
from slimrt.modelfile.gguf import read_gguf
from test_cache_modes import IDS, N_PREFILL, check
from test_regions import N_CTX, same_rounding

CAPPED = [
    ("llama_mha", "kv"),
    ("llama_mha", "k"),
    ("llama_gqa_tied", "kv"),
    ("mistral_window", "kv"),
    ("qwen2_mha", "k"),  # K's bias
    ("gpt2_tanh", "kv"),  # no RoPE
    ("gpt2_tanh", "k"),  # where K's bias counts all the same
    ("bloom", "k"),  # ALiBi is added to what the cap makes
    ("qwen3", "k"),
]
SINKS = ["llama_mha", "llama_gqa_tied", "qwen2_tied", "mistral_window", "gpt2_tanh", "bloom"]  # Qwen2 has a bias of V


@pytest.fixture(scope="session")
def scored(convert, tmp_path_factory):
    """scored(name, how) -> its file, with caps or with sinks."""
    folder = tmp_path_factory.mktemp("scored")
    return cache(lambda name, how: how(convert(GOLDEN / name), folder / f"{name}-{how.__name__}.gguf"))


def exact(path, ids=IDS) -> np.ndarray:
    return Reference(path).logits(ids)


CASES = [(name, mode, capped) for name, mode in CAPPED] + [(name, "kv", with_sinks) for name in SINKS]
each_case = pytest.mark.parametrize(
    ("name", "mode", "how"), CASES, ids=[f"{how.__name__}-{name}-{mode}" for name, mode, how in CASES]
)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8", "q4"])
@each_case
def test_prompt_then_steps(name, mode, how, dtype, scored, convert):
    path = scored(name, how)
    got = decode(open_engine(path, mode, dtype, n_ctx=64), IDS, N_PREFILL)
    check(path, mode, dtype, got, N_PREFILL)
    assert relative(exact(path), exact(convert(GOLDEN / name))) > 0.02, "they do not matter"


@pytest.mark.parametrize("n_batch", [1, 5, 33])
@each_case
def test_prompt_in_chunks(name, mode, how, n_batch, scored):
    path = scored(name, how)
    engine = open_engine(path, mode, "f32", n_ctx=64, n_batch=n_batch, n_threads=2)
    check(path, mode, "f32", decode(engine, IDS, len(IDS)), len(IDS), n_batch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "mode", "how"), [("llama_mha", "k", capped), ("mistral_window", "kv", capped), ("bloom", "kv", with_sinks)]
)
def test_every_instruction_set(name, mode, how, isa, scored, monkeypatch):
    monkeypatch.setenv("SLIMRT_ISA", isa)
    path = scored(name, how)
    check(path, mode, "q8", decode(open_engine(path, mode, "q8", n_ctx=64), IDS, N_PREFILL), N_PREFILL)


@pytest.mark.parametrize("dtype", ["f32", "q8"])
@pytest.mark.parametrize("name", ["llama_gqa_tied", "gpt2_tanh", "olmo2"])
def test_k_and_a_residual_are_capped(name, dtype, scored):
    path, rank = scored(name, capped), 8
    engine = residual.engine_of(path, "k+r", dtype, rank, "q8")
    wanted = residual.predict(path, "k+r", dtype, rank, "q8", N_PREFILL)
    residual.check(decode(engine, IDS, N_PREFILL), wanted, *residual.types_of("k+r", dtype, "q8"))


@pytest.mark.parametrize("n_prefill", [1, 100, 190])
@pytest.mark.parametrize(
    ("mode", "levels", "how"),
    [
        ("kivi", "f32", capped),
        ("kivi", "q4+q8*0.2+sinks=4", capped),
        ("lowrank", "f32@0.5+f32*0.3", capped),
        ("lowrank", "f32@0.5+f32*0.3+predict", capped),
        ("kivi", "f32", with_sinks),
        ("kivi", "q4+q8*0.2+sinks=4", with_sinks),
        ("kivi", "none+f32*64+sinks=4", with_sinks),
    ],
)
def test_rows_age(mode, levels, how, n_prefill, scored):
    """Every region has a softmax of its own: a sink counts in one of them."""
    path, ids = scored("llama_gqa_tied", how), ids_of(0, 230)
    got = decode(open_engine(path, mode, levels, n_ctx=N_CTX, n_batch=256), ids, n_prefill)
    model = Reference(path, folds=derived(path, mode) if mode == "lowrank" else None)
    wanted = model.logits_cached(ids, n_prefill, mode, levels)
    forgets = levels.startswith("none")  # then without the rounding of what is left
    assert same_rounding(got, wanted, wanted if forgets else model.logits(ids), "f32" if "q" not in levels else levels)


@pytest.mark.parametrize("threshold", [1e-6, 1e-2])
def test_a_budget_beside_sinks(threshold, scored):
    """What is passed over is at most so much of a softmax that the sink is a part of."""
    path = scored("llama_gqa_tied", with_sinks)
    engine = open_engine(path, "kv", "f32", n_ctx=512, sparse_threshold=threshold)
    ids = ids_of(3, 400)
    assert relative(decode(engine, ids, 380)[380:], exact(path, ids)[380:]) < 2e-5 + 10 * threshold


# ---------------------------------------------------------------- what folding expects
@pytest.fixture(params=[capped, with_sinks])
def window(request, scored) -> Window:
    """A stretch of random inputs in a layer without RoPE, so that a query meets each row alike wherever it stands."""
    model = read_gguf(scored("gpt2_tanh", request.param))
    x = np.random.default_rng(4).normal(size=(90, 48)).astype(np.float32)
    return Window(LayerWeights(model, Attention.of(model), 0), None, x)


def test_folding_attends_as_the_reference(window, scored):
    how = with_sinks if window.weights.attention.sinks else capped
    model, x = Reference(scored("gpt2_tanh", how)), window.x.astype(np.float64)
    caches = model.new_cache("kv", None)
    exact = model._attention(0, x, np.arange(len(x)), caches).reshape(len(x), 4, -1)
    bias = model.w.layers[0].bv.reshape(4, -1)  # V is without it there
    for head, (p, out) in enumerate(window._attention):
        got = out + p.sum(axis=1, keepdims=True) * bias[head]
        assert np.abs(got - exact[window.queries, head]).max() < 1e-5


def test_folding_expects_of_noisy_keys_what_it_measures(window):
    """To first order, with scores that are bent."""
    random, a = np.random.default_rng(6), window.weights.attention
    size = 1e-3 * np.abs(window.exact_keys).max()
    noisy = [window.exact_keys + size * random.normal(size=window.exact_keys.shape) for _ in range(12)]
    measured = np.mean([window.output_error(keys, window.exact_v)[0] for keys in noisy])
    expected = window.from_scores(KeyNoise(np.full((len(window), a.kv_width), size**2)))
    assert 0.85 < measured / expected < 1.15


# ---------------------------------------------------------------- what is refused
REFUSED = [
    ("gpt2_tanh", "x", capped, "capped at 3"),
    ("gpt2_tanh", "v", capped, "K's bias"),
    ("stablelm", "xr", capped, "attn_logit_softcapping"),
    *[(name, mode, with_sinks, "attn_sinks") for name, mode in [
        ("llama_mha", "k"), ("qwen2_tied", "k+r"), ("qwen2_tied", "lowrank"), ("gpt2_tanh", "x"), ("gpt2_tanh", "v"),
        ("stablelm", "xr"),
    ]],
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "how", "reason"), REFUSED)
def test_modes_that_cannot_say_why(name, mode, how, reason, scored):
    path = scored(name, how)
    for load in (slimrt.Model, lambda path, **options: _core.plan(str(path), **options)):
        with pytest.raises(slimrt.CacheUnsupportedError, match=f"{reason}.*: kv"):
            load(path, cache=mode, n_ctx=64)
    with pytest.raises(slimrt.CacheUnsupportedError, match=reason):
        slimrt.convert(path, path.with_suffix(".out"), cache=mode, progress=False)


def test_modes_that_can(scored):
    for how, legal in ((capped, {"kv", "k", "k+r", "kivi", "lowrank"}), (with_sinks, {"kv", "kivi"})):
        modes = core.modes(str(scored("gpt2_tanh", how)))
        assert {mode.name for mode in modes if mode.legal} == legal


def test_a_bias_of_v_stays_where_weights_do_not_sum_to_one(scored, tmp_path):
    """Converting for kv moves it into the output's elsewhere."""
    path = scored("qwen2_tied", with_sinks)
    slimrt.convert(path, tmp_path / "kv.gguf", cache="kv", progress=False)
    got = decode(open_engine(tmp_path / "kv.gguf", n_ctx=64), IDS, N_PREFILL)
    assert relative(got, exact(path)) < 2e-5


DAMAGED = {
    "a cap below nothing": (
        lambda path, out: capped(path, out, score=-1),
        slimrt.ModelFormatError,
        "softcapping is -1",
    ),
    "no number": (
        lambda path, out: capped(path, out, logit=np.inf),
        slimrt.ModelFormatError,
        "final_logit_soft.*finite",
    ),
    "a layer without": (lambda path, out: with_sinks(path, out, (0,)), slimrt.ModelFormatError, "1.attn_sinks"),
    "a layer with": (lambda path, out: with_sinks(path, out, (1,)), slimrt.UnsupportedError, "1.attn_sinks"),
    "of other heads": (lambda path, out: with_sinks(path, out, heads=3), slimrt.ModelFormatError, "expected .1, 4"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case, convert, tmp_path):
    damage, error, words = DAMAGED[case]
    path = damage(convert(GOLDEN / "llama_mha"), tmp_path / "damaged.gguf")
    with pytest.raises(error, match=words):
        slimrt.Model(path, n_ctx=16)


def test_no_caps_in_encoder_decoders(seq2seq, convert, tmp_path):
    path = capped(convert(seq2seq("t5")), tmp_path / "t5.gguf")
    with pytest.raises(slimrt.UnsupportedError, match="softcapping is not supported in an encoder-decoder"):
        slimrt.Model(path, n_ctx=16)
