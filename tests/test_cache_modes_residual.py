# SPDX-License-Identifier: Apache-2.0
"""Modes k+r and xr compute what the reference predicts with the same folded tensors, rounding the same rows.

Tolerances are those of test_cache_modes.py, but everything is measured from what the mode computes with rows that are
not rounded, since k+r is exact for full rank only:
  predicted   what rounding the stored rows does to the logits in the reference;
  noise       FLOAT32 of all logits, and a few times what rounding rows to float32 does.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, ISAS, decode, open_engine, relative, rms
from folds import as_converted, fold_all, fold_kr
from gguf_shapes import Shape, write_random
from pairwise import pairwise
from reference import Reference
from reference_modes import (
    CACHE_MODES,
    Mode,
    attend_heads,
    by_head,
    keys,
    norms,
    planes_kr,
    read_keys,
    store_kv,
    store_v,
    times,
)
from remembered import remembered
from slimrt import _core
from test_cache_modes import FLOAT32, FLOAT32_STEPS, IDS, N_PREFILL, SAME_ROUNDING, TYPES, exact_logits

# The residual's rank and type.
KR_CASES = {
    "llama_mha": (8, "q8"),
    "llama_gqa_tied": (12, "q4"),  # K predicts a part of V
    "llama_bias": (0, "q8"),
    "llama_wide": (5, "f16"),  # heads * head_dim > d_model
    "mistral_window": (8, "q8"),
    "qwen2_mha": (8, "q4"),  # K bias and RoPE
    "qwen2_tied": (4, "q8"),
    "phi3": (8, "f32"),
    "gpt2_tanh": (8, "q8"),  # no RoPE
    "gptneox": (6, "q4"),  # a part of each head rotates, K bias
    "olmo2": (8, "q8"),  # QK-norm
    "olmo2_gqa": (8, "q4"),
    "gemma": (8, "q4"),
    "gemma2": (8, "q8"),
    "granite_gqa": (8, "q8"),  # a scale of scores
    "opt": (8, "q8"),
    "cohere_gqa": (8, "q8"),  # RoPE of neighbours as they are stored
    "bloom": (8, "q8"),  # ALiBi
    "gemma3": (8, "q8"),  # windows, which turn otherwise
    "smollm3": (8, "q4"),  # a layer that knows no positions
    "olmo3": (8, "q8"),
    "ministral3": (8, "q8"),  # q grow with their position
    "qwen3": (8, "q8"),  # of each head
    "qwen3_gqa": (8, "q4"),
}
XR_CASES = [
    "stablelm",
    "stablelm_plain",
    "glm4",
    "glm4_mha",
    "gptneox",
    "gptneox_sequential",
    "phi2",
    "phi2_gqa",
    "phi3_partial",
]
CASES = [(name, "k+r", *residual) for name, residual in KR_CASES.items()] + [(name, "xr", 0, "") for name in XR_CASES]
each_case = pytest.mark.parametrize(("name", "mode", "rank", "residual"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])


@remembered
def folds(path, mode: str, dtype: str | None, rank: int, half: bool = False) -> dict[str, np.ndarray]:
    model = Reference(path)
    return fold_all(model, [mode] * len(model.w.layers), dtype, rank, half=half)


def reference(path, mode, dtype, rank, half: bool = False) -> Reference:
    return Reference(path, folds=folds(path, mode, dtype, rank, half))


def engine_of(path, mode, dtype, rank, residual, **options):
    given = {"rank": rank} | ({"residual_type": residual} if rank else {}) if mode == "k+r" else {}
    tensors = folds(path, mode, dtype, rank)
    return open_engine(path, mode, dtype, **({"n_ctx": 64, "derived": tensors} | given | options))


def types_of(mode, dtype, residual) -> tuple[str, str]:
    return (dtype, residual if mode == "k+r" else dtype)


@remembered
def predict(path, mode, dtype, rank, residual, n_prefill: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits with rows rounded, rounded to float32, and not rounded."""
    model = reference(path, mode, dtype, rank)
    types = (types_of(mode, dtype, residual), "f32", None)
    return tuple(model.logits_cached(IDS, n_prefill, mode, t) for t in types)


@remembered
def predict_chunks(path, mode, dtype, rank, n_batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of a long append: its chunks read rows of k (k+r) as stored, V (and K in xr) as they are kept: in f16
    for want of a plain type."""

    def store(m, i, x, positions, own):
        if mode == "xr":
            return store_kv(m, i, x, positions, own) | store_v(m, i, x, positions, own)
        rows = keys(m, i, x)
        scale = m.folded(i, "attn_kr_row.scale")
        return rows | {"k": rows["k"] if scale is None else rows["k"] / scale} | store_v(m, i, x, positions, own)

    def attend(m, i, q, rows, positions, absorbed):
        k = by_head(m, rows["k"])
        if mode == "k+r":
            k = read_keys(m, i, times(rows["k"], m.folded(i, "attn_kr_row.scale")), rows)
        return attend_heads(m, i, q, k, by_head(m, rows["v"]), positions)

    def planes(m, types):
        stored = planes_kr(m, types)
        stored.pop("r", None)
        return (stored if mode == "k+r" else {"k": (types[1], 1)}) | {"v": (types[1], 1)}

    model = reference(path, mode, dtype, rank)
    kept = dtype if dtype in ("f32", "bf16") else "f16"
    with patch.dict(CACHE_MODES, {"chunks": Mode(store, attend, planes)}):
        rounded, single, exact = (
            model.logits_cached(IDS, len(IDS), "chunks", types, n_batch) for types in ((dtype, kept), "f32", None)
        )
    return rounded, single, exact


def check(got: np.ndarray, predicted: tuple[np.ndarray, np.ndarray, np.ndarray], *types: str) -> None:
    wanted, single, exact = predicted
    noise = FLOAT32 * rms(exact) + FLOAT32_STEPS * rms(single - exact)
    rounding = 0.0 if set(types) == {"f32"} else rms(wanted - exact)
    assert rms(got - wanted) <= noise + SAME_ROUNDING * rounding, "not the rounding that the reference does"
    assert rms(got - exact) <= noise + 1.5 * rounding, "a larger error than the reference predicts"


@pytest.mark.parametrize("dtype", TYPES)
@each_case
def test_prompt_then_steps(name, mode, rank, residual, dtype, convert):
    path = convert(GOLDEN / name)
    engine = engine_of(path, mode, dtype, rank, residual)
    check(
        decode(engine, IDS, N_PREFILL),
        predict(path, mode, dtype, rank, residual, N_PREFILL),
        *types_of(mode, dtype, residual),
    )


@pytest.mark.parametrize("dtype", ["q8", "q4", "fp8_e4m3"])
@pytest.mark.parametrize(("name", "residual"), [("llama_mha", "q4"), ("olmo2", "q8")])
def test_tensors_in_the_types_of_conversions(name, residual, dtype, convert):
    path = convert(GOLDEN / name)
    made = as_converted(folds(path, "k+r", dtype, 8), dtype, residual)
    types, model = (dtype, residual), Reference(path, folds=made)
    wanted = tuple(model.logits_cached(IDS, N_PREFILL, "k+r", t) for t in (types, "f32", None))
    check(decode(engine_of(path, "k+r", dtype, 8, residual, derived=made), IDS, N_PREFILL), wanted, *types)


@pytest.mark.parametrize("residual", ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4"])
@pytest.mark.parametrize("dtype", ["f16", "q8"])
@pytest.mark.parametrize("name", ["llama_mha", "llama_gqa_tied"])
def test_residuals_of_every_type(name, dtype, residual, convert):
    path = convert(GOLDEN / name)
    engine = engine_of(path, "k+r", dtype, 8, residual)
    check(decode(engine, IDS, N_PREFILL), predict(path, "k+r", dtype, 8, residual, N_PREFILL), dtype, residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f16", "q8", "q4"])
@pytest.mark.parametrize(
    ("name", "mode"), [("llama_gqa_tied", "k+r"), ("olmo2", "k+r"), ("qwen3", "k+r"), ("phi2", "xr")]
)
def test_every_instruction_set(name, mode, dtype, isa, convert, monkeypatch):
    monkeypatch.setenv("SLIMRT_ISA", isa)
    path, rank, residual = convert(GOLDEN / name), 8 * (mode == "k+r"), "q4"
    engine = engine_of(path, mode, dtype, rank, residual)
    assert isa in engine.info()["device"]
    check(
        decode(engine, IDS, N_PREFILL),
        predict(path, mode, dtype, rank, residual, N_PREFILL),
        *types_of(mode, dtype, residual),
    )


@pairwise(case=CASES, n_batch=[1, 5, 33], dtype=["f32", "f16", "q8", "q4"])
def test_prompt_in_chunks(case, n_batch, dtype, convert):
    name, mode, rank, residual = case
    path = convert(GOLDEN / name)
    engine = engine_of(path, mode, dtype, rank, residual, n_batch=n_batch)
    check(decode(engine, IDS, len(IDS)), predict_chunks(path, mode, dtype, rank, n_batch), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@each_case
def test_a_prompt_alone_reads_nothing_stored(name, mode, rank, residual, dtype, convert):
    path = convert(GOLDEN / name)
    got = decode(engine_of(path, mode, dtype, rank, residual), IDS, len(IDS))
    exact = exact_logits(path)
    assert rms(got - exact) / rms(exact) < 2e-5


# ---------------------------------------------------------------- limits
@pytest.mark.parametrize("name", ["llama_mha", "qwen2_mha", "llama_wide", "gpt2_erf", "gptneox", "olmo2", "qwen3"])
def test_without_residual_and_noise_it_is_mode_k(name, convert):
    """W_KV of mode k as W': the same operations on the same numbers."""
    path = convert(GOLDEN / name)
    model = Reference(path)
    weights = {i: np.ascontiguousarray(model.w_kv(i).T, np.float32) for i in range(len(model.w.layers))}
    k, kr = (
        open_engine(path, mode, "f32", n_ctx=64, derived={f"blk.{i}.{suffix}": w for i, w in weights.items()}, **given)
        for mode, suffix, given in (("k", "attn_kv.weight", {}), ("k+r", "attn_kr_v.weight", {"rank": 0}))
    )
    assert np.array_equal(decode(k, IDS, N_PREFILL), decode(kr, IDS, N_PREFILL))
    assert k.memory()["cache"] == kr.memory()["cache"]


@pytest.mark.parametrize(
    "name", ["llama_mha", "llama_gqa_tied", "mistral_window", "gpt2_tanh", "olmo2_gqa", "qwen3_gqa"]
)
def test_full_rank_is_kv(name, convert):
    """In f32, within a few roundings to float32; k in 8 bits, whose rounding the residual then corrects in V."""
    path = convert(GOLDEN / name)
    full = Reference(path).w.layers[0].wv.shape[0]
    wanted = decode(open_engine(path, "kv", "f32", n_ctx=64), IDS, N_PREFILL)
    got = decode(engine_of(path, "k+r", "f32", full, "f32"), IDS, N_PREFILL)
    assert rms(got - wanted) < 1e-5 * rms(wanted)
    q8 = decode(engine_of(path, "k+r", "q8", full, "f32"), IDS, N_PREFILL)
    kv_q8 = decode(open_engine(path, "kv", "q8", n_ctx=64, cache_type_v="f32"), IDS, N_PREFILL)
    assert rms(q8 - wanted) < 3 * rms(kv_q8 - wanted)


@pytest.mark.parametrize("name", XR_CASES)
def test_xr_is_kv(name, convert):
    path = convert(GOLDEN / name)
    wanted = decode(open_engine(path, "kv", "f32", n_ctx=64), IDS, N_PREFILL)
    got = decode(engine_of(path, "xr", "f32", 0, ""), IDS, N_PREFILL)
    assert relative(got, wanted) < 1e-5


def test_a_residual_corrects_what_rounding_does(convert):
    """More columns, less error; and without the correction (R = 0) the residual leaves the rounding of k in V."""
    path = convert(GOLDEN / "llama_mha")
    exact = Reference(path).logits(IDS)
    errors = [rms(decode(engine_of(path, "k+r", "q8", rank, "q8"), IDS, N_PREFILL) - exact) for rank in (0, 8, 24, 48)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 2 * errors[3]
    open_loop = {name: 0 * t if name.endswith("attn_kr_k.weight") else t
                 for name, t in folds(path, "k+r", "q8", 48).items()}  # fmt: skip
    wrong = decode(engine_of(path, "k+r", "q8", 48, "q8", derived=open_loop), IDS, N_PREFILL)
    assert rms(wrong - exact) > 3 * errors[3]


# ---------------------------------------------------------------- memory
@each_case
def test_bytes_per_token(name, mode, rank, residual, convert):
    path = convert(GOLDEN / name)
    model = Reference(path)
    width = model.w.layers[0].wk.shape[0] if mode == "k+r" else model.d_model
    normed = 4 * norms(model) * (mode == "k+r")

    def size(dtype: str, width: int, heads: int = 1) -> int:
        share = width // heads
        few = {f"q{bits}": heads * ((share * bits + 7) // 8 + 4 * -(-share // 32)) for bits in (4, 3, 2)}
        return {"f32": 4 * width, "f16": 2 * width, "bf16": 2 * width, "q8": width + 4, "fp8_e4m3": width + 4,
                "fp8_e5m2": width, **few}[dtype]  # fmt: skip

    for dtype in TYPES:
        made = as_converted(folds(path, mode, dtype, rank), dtype, residual)
        engine = engine_of(path, mode, dtype, rank, residual, derived=made)
        heads = model.w.n_kv_heads if mode == "k+r" and dtype in ("q4", "q3", "q2") else 1
        row = size(dtype, width, heads) + (size(residual, rank) if rank else 0) + normed
        for layer in engine.info()["layers"]:
            assert layer["mode"] == mode and layer["type"] == dtype and layer["bytes_per_token"] == row
            assert (layer["rank"], layer["residual_type"]) == (rank, residual if rank else "")
        given = {"rank": rank} | ({"residual_type": residual} if rank else {}) if mode == "k+r" else {}
        plan = _core.plan(str(path), cache=mode, cache_type_k=dtype, cache_type_v=dtype, n_ctx=64, **given)
        assert {key: plan[key] for key in engine.memory()} == engine.memory()


# ---------------------------------------------------------------- folded files
def write_folded(path, shape: Shape, tensors: dict[str, np.ndarray], metadata: dict[str, list]):
    """A random model with folded tensors and what slimrt.cache says of its layers."""
    return write_random(path, shape, {f"slimrt.cache.{key}": values for key, values in metadata.items()}, tensors)


SHAPE = Shape(d=32, n_layers=2, n_heads=4, n_ctx=256, n_kv_heads=2, n_vocab=101, dtype="f32")


@pytest.fixture
def folded(tmp_path):
    """Layer 0 k+r q8 with a residual of 4 columns in q4 and W' in float16, layer 1 kv in bf16."""
    plain = write_random(tmp_path / "plain.gguf", SHAPE)
    tensors = fold_kr(Reference(plain), 0, "q8", 4, half=True)
    metadata = {"modes": ["k+r", "kv"], "types": ["q8", "bf16"], "residual_types": ["q4", ""], "ranks": [4, 0]}
    return write_folded(tmp_path / "folded.gguf", SHAPE, tensors, metadata), tensors


def test_a_folded_file_says_what_its_cache_is(folded):
    path, tensors = folded
    engine = _core.Engine(str(path), n_ctx=64)
    layers = [{key: layer[key] for key in ("mode", "type", "rank", "residual_type")}
              for layer in engine.info()["layers"]]  # fmt: skip
    assert layers == [{"mode": "k+r", "type": "q8", "rank": 4, "residual_type": "q4"},
                      {"mode": "kv", "type": "bf16", "rank": 0, "residual_type": ""}]  # fmt: skip
    assert _core.plan(str(path), n_ctx=64)["total"] == engine.memory()["total"]
    # Each layer with its own types, which the reference takes one pair of: layer by layer.
    model = Reference(path, folds=tensors)
    caches = [model.new_cache("k+r", ("q8", "q4"))[0], model.new_cache("kv", "bf16")[1]]
    exact = [model.new_cache("k+r", None)[0], model.new_cache("kv", None)[1]]
    steps = [IDS[:N_PREFILL], *([token] for token in IDS[N_PREFILL:])]
    wanted, unrounded = (np.concatenate([model.append(step, c) for step in steps]) for c in (caches, exact))
    got = decode(engine, IDS, N_PREFILL)
    assert rms(got - wanted) <= FLOAT32 * 10 * rms(wanted) + SAME_ROUNDING * rms(wanted - unrounded)


def test_options_overrule_the_file_and_its_types_are_of_its_modes(folded):
    path, _ = folded

    def layers(**options):
        plan = _core.plan(str(path), n_ctx=64, **options)
        return [(layer["mode"], layer["type"], layer["rank"], layer["residual_type"]) for layer in plan["layers"]]

    assert layers(cache="kv") == [("kv", "f16", 0, ""), ("kv", "bf16", 0, "")]
    assert layers(cache_type_k="f16") == [("k+r", "f16", 4, "q4"), ("kv", "f16+bf16", 0, "")]
    assert layers(cache_type_k=["auto", "q8"], cache_type_v=["auto", "q4"], residual_type="q8") == [
        ("k+r", "q8", 4, "q8"), ("kv", "q8+q4", 0, "")]  # fmt: skip
    assert layers(cache=["auto", "k+r"], rank=[-1, 8], residual_type=["auto", "f16"]) == [
        ("k+r", "q8", 4, "q4"), ("k+r", "f16", 8, "f16")]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 8}, ValueError, "rank 4.*rank 8"),
        ({"cache": "k+r"}, slimrt.CacheUnsupportedError, "layer 1.*rank"),
        ({"cache": "k+r", "rank": [4, 17]}, ValueError, "rank 17.*16"),
        ({"cache": "k+r", "rank": [4, 8]}, ValueError, "residual_type"),
        ({"cache": "kv", "rank": 4}, ValueError, r"k\+r"),
        ({"cache": "kv", "residual_type": "q8"}, ValueError, r"k\+r"),
        ({"residual_type": "q7"}, slimrt.UnsupportedError, "q7"),
        ({"cache_type_k": ["q8"] * 3}, ValueError, "cache_type_k.*3 entries.*2 layers"),
        ({"rank": [4, 0, 0]}, ValueError, "rank.*3 entries"),
        ({"cache": []}, ValueError, "cache"),
        ({"rank": 1.5}, TypeError, "rank"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, error, words, folded):
    for call in (_core.plan, _core.Engine):
        with pytest.raises(error, match=words):
            call(str(folded[0]), n_ctx=64, **options)


def test_a_file_folded_for_one_mode_serves_no_other(folded, convert, tmp_path):
    """attn_kr_* are not W_KV of mode k, and a layer without tensors says how to make them."""
    path, _ = folded
    square = Shape(d=32, n_layers=1, n_heads=4, n_ctx=256, n_vocab=101, dtype="f32")
    plain = write_random(tmp_path / "square.gguf", square)
    other = write_folded(tmp_path / "kr.gguf", square, fold_kr(Reference(plain), 0, "f32", 4), {"modes": ["k+r"]})
    with pytest.raises(slimrt.CacheUnsupportedError, match="attn_kv.weight.*convert"):
        _core.Engine(str(other), n_ctx=64, cache="k")
    with pytest.raises(slimrt.CacheUnsupportedError, match="blk.1.attn_kr_v.weight.*convert"):
        _core.Engine(str(path), n_ctx=64, cache="k+r", rank=4, residual_type="q4")
    with pytest.raises(slimrt.CacheUnsupportedError, match="attn_xr_in.weight.*convert"):
        _core.Engine(str(convert(GOLDEN / "phi2")), n_ctx=64, cache="xr")
    for choice in ("kv", "auto"):
        assert _core.Engine(str(other), n_ctx=64, cache=choice, residual_type="q8" if choice == "auto" else "auto")


@pytest.mark.parametrize(
    ("name", "mode", "rank"), [("llama_mha", "k+r", 8), ("llama_mha", "k+r", 0), ("phi2", "xr", 0)]
)
def test_rows_of_another_fold_are_refused(name, mode, rank, convert):
    """They have the same shape and mean something else."""
    path = convert(GOLDEN / name)
    other = {key: 1.01 * tensor if key.endswith((".scale", "x.weight", "in.weight")) else tensor
             for key, tensor in folds(path, mode, "q8", rank).items()}  # fmt: skip
    one, same, another = (engine_of(path, mode, "q8", rank, "q8", **given) for given in ({}, {}, {"derived": other}))
    saved = one.save_sequence(one.new_sequence())
    assert same.length(same.load_sequence(saved)) == 0
    with pytest.raises(slimrt.ModelFormatError, match="another model or cache"):
        another.load_sequence(saved)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_are_none_are_refused(scale, convert):
    path = convert(GOLDEN / "llama_mha")
    tensors = dict(folds(path, "k+r", "q8", 8))
    tensors["blk.1.attn_kr_row.scale"] = tensors["blk.1.attn_kr_row.scale"].copy()
    tensors["blk.1.attn_kr_row.scale"][3] = scale
    with pytest.raises(slimrt.ModelFormatError, match="blk.1.attn_kr_row.scale"):
        engine_of(path, "k+r", "q8", 8, "q8", derived=tensors)
