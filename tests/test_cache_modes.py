# SPDX-License-Identifier: Apache-2.0
"""Every cache mode and type computes what the reference predicts when it rounds the same rows in the same way.

Tolerances come from the reference. For one model, mode and type:
  predicted   what rounding the stored rows does to the logits (reference, rows rounded, minus reference, exact);
  noise       of an engine that computes in float32: FLOAT32 of all logits, and a few times what this mode makes of
              one rounding to float32 (its rows so rounded in the reference).
The engine rounds the same numbers, so it should be much nearer to the reference than `predicted`: they differ where
float32 puts a value on the other side of a rounding boundary. test_the_bound_separates shows that noise of that size
stays below SAME_ROUNDING, and that a wrong rounding does not.
"""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import numpy as np
import pytest

import reference as reference_module
import slimrt
from conftest import GOLDEN, decode, open_engine, rms
from pairwise import pairwise
from reference import Reference
from reference_latent import store_heads
from reference_modes import (
    CACHE_MODES,
    Mode,
    attend_heads,
    attend_kv,
    by_head,
    keys,
    norms,
    planes_kv,
    planes_n,
    read_keys,
    store_v,
)
from remembered import remembered
from slimrt import core

IDS = np.random.default_rng(5).integers(3, 100, 60)
N_PREFILL = 44
FLOAT32, FLOAT32_STEPS = 2e-6, 8
SAME_ROUNDING = 0.5
# Here float32's noise turns more roundings with each step: over twelve texts 0.26 to 0.90 of `predicted` after 16 steps
# (0.30 to 0.79 with W_KV in f32), which no bound tells from a wrong rounding, and over eight 0.01 to 0.34 after three.
FEW_STEPS = {("gemma2_mha", "k", "q8"): 57}
TYPES = ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4", "q3", "q2"]
CASES = [
    ("llama_mha", "kv"),
    ("llama_gqa_tied", "kv"),
    ("mistral_window", "kv"),
    ("llama_mha", "k"),
    ("llama_bias", "k"),
    ("qwen2_mha", "k"),  # K bias and RoPE
    ("llama_wide", "k"),  # right inverse: heads * head_dim > d_model
    ("llama_gqa_wide", "k"),  # grouped heads whose K is as wide as the input
    ("llama_yarn", "k"),
    ("mistral_mha", "k"),  # a window shorter than a chunk
    ("gptneox", "kv"),
    ("gptneox", "k"),  # a part of each head rotates, K bias
    ("gptneox_sequential", "k"),
    ("phi2", "k"),
    ("olmo2_gqa", "kv"),  # QK-norm
    ("qwen3_gqa", "kv"),  # of each head
    ("qwen3", "k"),  # grouped heads, factors of each
    ("olmo2", "k"),
    ("gpt2_tanh", "kv"),
    ("gpt2_tanh", "k"),
    ("gpt2_tanh", "v"),
    ("gpt2_tanh", "x"),
    ("stablelm", "k"),
    ("gemma", "k"),  # heads together wider than the input
    ("gemma2", "kv"),  # capped, a window in every other layer
    ("gemma2_mha", "k"),
    ("olmo", "k"),
    ("olmo_clipped", "kv"),
    ("granite", "k"),
    ("minicpm", "k"),
    ("glm4", "kv"),
    ("bitnet", "kv"),
    ("bitnet_online", "k"),  # ternary
    ("openlm", "kv"),  # QK-norm by LayerNorm
    ("olmoe", "k"),  # experts
    ("phimoe_plain", "k"),
    ("mixtral", "kv"),
    ("deepseek", "k"),  # the first layer dense
    ("qwen2moe", "k"),
    ("qwen3moe", "k"),
    ("granitemoe", "kv"),
    ("glm4_mha", "k"),
    ("opt", "k"),
    ("opt", "v"),
    ("opt", "x"),
    ("cohere", "k"),
    ("gpt_oss", "kv"),  # sinks, windows
    ("minimax_m2", "kv"),
    ("gemma3", "kv"),  # windows, which turn otherwise
    ("gemma3_mha", "k"),
    ("gemma4", "kv"),  # layers whose V is K, which is stored once
    ("gemma4_mha", "kv"),  # V is normed
    ("gemma4_small", "kv"),  # the last layers read the rows of others
    ("gemma4_experts", "kv"),  # beside each layer's network
    ("olmo3", "k"),
    ("cohere2", "k"),  # layers that know no positions
    ("exaone4", "k"),
    ("exaone4_full", "kv"),
    ("smollm3", "kv"),
    ("ministral3", "kv"),  # q grow with their position
    ("bloom", "k"),  # ALiBi
    ("bloom", "v"),
    ("bloom", "x"),
    ("mpt", "k"),
    ("mpt", "v"),
    ("mpt", "x"),
    ("deepseek2", "latent"),
    ("deepseek2_yarn", "latent"),
    ("mistral4", "latent"),  # q grow with their position in all columns
    ("minicpm3", "latent"),
    ("gpt2_erf", "k"),
    ("gpt2_erf", "v"),
    ("gpt2_erf", "x"),
]
each_case = pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name}-{mode}" for name, mode in CASES])


@cache
def reference(path) -> Reference:
    return Reference(path, wkv_dtype="f32")


@remembered
def exact_logits(path) -> np.ndarray:
    return reference(path).logits(IDS)


@remembered
def predict(path, mode, dtype, n_prefill: int, n_batch: int):
    """Logits with rows rounded, and exact ones."""
    return reference(path).logits_cached(IDS, n_prefill, mode, dtype, n_batch), exact_logits(path)


@remembered
def predict_chunks(path, mode, dtype, n_batch: int):
    """The same of a long append in a mode that materialises: its chunks read both k (raw) and v of earlier ones, what
    the mode stores as it is stored, the rest as it is kept: in f16 for want of a plain type."""

    def store(m, i, x, positions, cache):
        return keys(m, i, x) | store_v(m, i, x, positions, cache)

    def attend(m, i, q, rows, positions, absorbed):
        return attend_heads(m, i, q, read_keys(m, i, rows["k"], rows), by_head(m, rows["v"]), positions)

    both = Mode(store, attend, lambda m, types: planes_kv(m, types) | planes_n(m, types))
    if mode == "latent":
        both = Mode(store_heads, attend_kv, planes_kv)
    kept = dtype if dtype in ("f32", "bf16") else "f16"
    types = (dtype if mode == "k" else kept, dtype if mode == "v" else kept)
    with patch.dict(CACHE_MODES, {"k and v": both}):
        return reference(path).logits_cached(IDS, len(IDS), "k and v", types, n_batch), exact_logits(path)


def check(path, mode, dtype, got: np.ndarray, n_prefill: int, n_batch: int = 0) -> None:
    many = bool(n_batch) and mode != "kv"  # chunks of a materialising mode
    wanted, exact = (
        predict_chunks(path, mode, dtype, n_batch) if many else predict(path, mode, dtype, n_prefill, n_batch)
    )
    noise = FLOAT32 * rms(exact) + FLOAT32_STEPS * rms(predict(path, mode, "f32", n_prefill, n_batch)[0] - exact)
    predicted = 0.0 if dtype == "f32" else rms(wanted - exact)
    assert rms(got - wanted) <= noise + SAME_ROUNDING * predicted, "not the rounding that the reference does"
    assert rms(got - exact) <= noise + 1.5 * predicted, "a larger error than the reference predicts"


def truncated(x: np.ndarray, dtype: str | None, heads: int) -> np.ndarray:
    """x stored by cutting bits off instead of rounding to nearest."""
    if dtype == "q8":
        rows = np.asarray(x, np.float32).reshape(len(x), heads, -1)
        scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
        return (np.trunc(rows / scale) * scale.astype(np.float64)).reshape(x.shape)
    if dtype == "bf16":
        return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    half = np.asarray(x, np.float32).astype(np.float16)
    return np.where(np.abs(half) > np.abs(x), np.nextafter(half, np.float16(0)), half).astype(np.float64)


@pytest.mark.unsanitized  # the reference alone
@pairwise(lambda case, dtype: case == ("llama_mha", "k"), case=CASES, dtype=["f16", "bf16", "q8"])
def test_the_bound_separates(case, dtype, convert, monkeypatch):
    """Rows with noise of float32's size deviate less than SAME_ROUNDING from the reference, truncated rows more."""
    name, mode = case
    model, rng, rounded = reference(convert(GOLDEN / name)), np.random.default_rng(0), reference_module.rounded
    wanted, exact = predict(convert(GOLDEN / name), mode, dtype, len(IDS), 5)

    def deviation(store) -> float:
        monkeypatch.setattr(reference_module, "rounded", store)
        return rms(model.logits_cached(IDS, len(IDS), mode, dtype, 5) - wanted) / rms(wanted - exact)

    def with_noise(x, dtype, heads=1):
        return rounded(x + 3e-7 * rms(x) * rng.standard_normal(np.shape(x)), dtype, heads)

    assert deviation(with_noise) < SAME_ROUNDING < 1 < deviation(truncated)


@pytest.mark.parametrize("dtype", TYPES)
@each_case
def test_prompt_then_steps(name, mode, dtype, convert):
    path = convert(GOLDEN / name)
    engine = open_engine(path, mode, dtype, n_ctx=64)
    n_prefill = FEW_STEPS.get((name, mode, dtype), N_PREFILL)
    check(path, mode, dtype, decode(engine, IDS, n_prefill), n_prefill)


@pairwise(case=CASES, n_batch=[1, 5, 20, 33], dtype=["f32", "f16", "q8", "fp8_e5m2"])
def test_prompt_in_chunks(case, n_batch, dtype, convert):
    """Mode kv: later chunks read earlier ones as stored. Others compute the prompt layer by layer."""
    name, mode = case
    path = convert(GOLDEN / name)
    engine = open_engine(path, mode, dtype, n_ctx=64, n_batch=n_batch)
    check(path, mode, dtype, decode(engine, IDS, len(IDS)), len(IDS), n_batch)


def test_prompt_of_several_long_steps(convert):
    """Chunks of a later step read rows that earlier ones stored, and rows kept since."""
    path, ids = convert(GOLDEN / "llama_mha"), np.random.default_rng(6).integers(3, 100, 2048 + 100)
    engines = [open_engine(path, mode, "f32", n_ctx=4096, n_batch=400) for mode in ("kv", "k")]
    kv, k = (decode(engine, ids, len(ids)) for engine in engines)
    assert rms(k - kv) <= 1e-4 * rms(kv)


@pytest.mark.parametrize("name", ["gptneox", "gptneox_sequential", "phi2"])
def test_k_equals_kv_where_a_part_of_each_head_rotates(name, convert):
    """In f32: both within their noise of the exact logits, so within twice of each other."""
    path = convert(GOLDEN / name)
    model = reference(path)
    assert 0 < 2 * len(model.w.layers[0].rope.inv_freq) < model.dk and model.w.layers[0].bk.any()
    kv, k = (decode(open_engine(path, mode, "f32", n_ctx=64), IDS, N_PREFILL) for mode in ("kv", "k"))
    rounded, exact = predict(path, "k", "f32", N_PREFILL, 0)
    noise = FLOAT32 * rms(exact) + FLOAT32_STEPS * rms(rounded - exact)
    assert rms(k - kv) <= 2 * noise < 1e-3 * rms(exact)


@pytest.mark.parametrize("modes", [["v", "k", "x"], ["kv", "x", "kv"], ["k", "kv", "v"]], ids="-".join)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_modes_by_layer(modes, dtype, convert):
    path = convert(GOLDEN / "gpt2_erf")
    engine = open_engine(path, modes, dtype, n_ctx=64)
    assert [layer["mode"] for layer in engine.info()["layers"]] == modes
    check(path, tuple(modes), dtype, decode(engine, IDS, N_PREFILL), N_PREFILL)


@pytest.mark.parametrize("dtype", ["f16", "q8"])
def test_kivi_where_v_is_k(dtype, convert):
    """It keeps both: keys that have turned, and normed values."""
    path, modes = convert(GOLDEN / "gemma4"), ["kv", "kivi", "kv", "kivi", "kivi"]
    engine = open_engine(path, modes, dtype, n_ctx=64)
    check(path, tuple(modes), dtype, decode(engine, IDS, N_PREFILL), N_PREFILL)


def test_nothing_is_chosen_by_measuring_where_v_is_normed(convert, tmp_path):
    with pytest.raises(slimrt.UnsupportedError, match="V is normed: choose modes"):
        slimrt.convert(convert(GOLDEN / "gemma4"), tmp_path / "out.gguf", cache="auto", progress=False)


@pytest.mark.parametrize("types", [("f32", "bf16"), ("bf16", "f32"), ("q8", "f16"), ("q8", "q4"), ("fp8_e4m3", "q8")])
@pytest.mark.parametrize("name", ["llama_gqa_tied", "gpt2_tanh"])
def test_types_of_k_and_v_differ(name, types, convert):
    path = convert(GOLDEN / name)
    engine = open_engine(path, "kv", cache_type_k=types[0], cache_type_v=types[1], n_ctx=64)
    check(path, "kv", types, decode(engine, IDS, N_PREFILL), N_PREFILL)


@pytest.mark.parametrize("dtype", TYPES)
@each_case
def test_a_prompt_alone_reads_nothing_stored(name, mode, dtype, convert):
    """One append computes with its own rows in full precision: the type does not matter."""
    path = convert(GOLDEN / name)
    got = decode(open_engine(path, mode, dtype, n_ctx=64), IDS, len(IDS))
    exact = exact_logits(path)
    assert rms(got - exact) / rms(exact) < 2e-5


@each_case
def test_bytes_per_token(name, mode, convert):
    """The promise of the mode, from the sizes of each layer."""
    path = convert(GOLDEN / name)
    model, wanted = reference(path), dict.fromkeys(TYPES, 0)
    for layer in (layer for i, layer in enumerate(model.w.layers) if model.owners[i] == i):
        model.at = layer
        k, v = len(layer.wk), len(layer.wv)
        width = {"kv": k if layer.v_is_k else k + v, "k": k, "v": v, "x": model.d_model}
        width = (width | {"latent": layer.latent and len(layer.latent.down)})[mode]
        planes = CACHE_MODES[mode].planes(model, (None, None))
        heads = sum(heads for name, (_, heads) in planes.items() if name != "n")
        normed = 4 * norms(model) * ("n" in planes)
        few = {
            f"q{bits}": heads * ((width // heads * bits + 7) // 8 + 4 * -(-(width // heads) // 32))
            for bits in (4, 3, 2)
        }
        sizes = {"f32": 4 * width, "f16": 2 * width, "bf16": 2 * width, "q8": width + 4 * heads,
                 "fp8_e4m3": width + 4 * heads, "fp8_e5m2": width, **few}  # fmt: skip
        wanted = {dtype: bytes + sizes[dtype] + normed for dtype, bytes in wanted.items()}
    for dtype, bytes in wanted.items():
        memory = open_engine(path, mode, dtype, n_ctx=64).memory()
        assert memory["cache_bytes_per_token"] == bytes
        assert memory["cache"] == 64 * bytes


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama_mha", "k"),
        ("gpt2_erf", "v"),
        ("llama_wide", "k"),
        ("qwen3", "k"),
        ("bitnet_online", "k"),
        ("bloom", "v"),
    ],
)
def test_model_folds_by_itself(name, mode, convert):
    """slimrt.Model folds what the file lacks, or finds it in a converted file; both as the reference does."""
    path = convert(GOLDEN / name)
    for source in (path, GOLDEN / name):
        with slimrt.Model(source, cache=mode, cache_type="f16", n_ctx=64) as model, model.session() as session:
            steps = [session.append(IDS[:N_PREFILL])] + [session.append([int(i)]) for i in IDS[N_PREFILL:]]
        check(path, mode, "f16", np.concatenate(steps), N_PREFILL)


# ---------------------------------------------------------------- what is refused
ILLEGAL = [
    ("llama_gqa_tied", "k", 0, "multi-head|head"),
    ("llama_head_dim", "k", 0, "multi-head|head"),
    ("mistral_window", "k", 0, "multi-head|head"),
    ("llama_mha", "v", 0, "RoPE"),
    ("llama_mha", "x", 0, "RoPE"),
    ("gptneox", "v", 0, "RoPE"),
    ("phi2", "x", 0, "RoPE"),
    ("phi2_gqa", "k", 0, "head"),
    ("olmo2", "v", 0, "QK-norm"),
    ("qwen3", "v", 0, "QK-norm"),
    ("qwen3_gqa", "k", 0, "40 wide"),
    ("olmo2", "x", 0, "QK-norm"),
    ("olmo_clipped", "k+r", 0, "attention.clamp_kqv"),
    ("olmo_clipped", "lowrank", 0, "attention.clamp_kqv"),
    ("mpt_clipped", "x", 0, "attention.clamp_kqv"),
    ("mpt_clipped", ["kivi", "v"], 1, "attention.clamp_kqv"),
    ("openlm", "k", 0, "LayerNorm"),
    ("openlm", "k+r", 0, "LayerNorm"),
    ("openlm", "x", 0, "QK-norm"),
    ("stablelm", "x", 0, "RoPE"),
    ("gemma", "xr", 0, "all columns"),
    ("gemma2", "k", 0, "40 wide"),
    ("gemma2", "x", 0, "RoPE"),
    ("gemma2", "kivi", 0, "window"),
    ("gemma2_mha", "lowrank", 1, "window"),
    ("granite", "v", 0, "RoPE"),
    ("glm4", "k", 0, "24 wide"),
    ("gemma3", "k", 0, "40 wide"),
    ("gpt_oss", "k+r", 0, "attn_sinks"),
    ("gpt_oss", ["kv", "lowrank", "kv"], 1, "attn_sinks"),
    ("gemma4", "k", 0, "V is normed"),
    ("gemma4_mha", "k+r", 0, "V is normed"),
    ("gemma4_mha", ["kv", "kv", "xr"], 2, "V is normed"),
    ("gemma4", ["kv", "lowrank", "kv", "kv", "kv"], 1, "V is normed"),
    ("gemma4", "kivi", 0, "behind a window"),
    ("olmo3", "x", 0, "QK-norm"),
    ("cohere2", "x", 0, "RoPE"),
    ("cohere2", ["kv", "kv", "kv", "xr"], 3, "no RoPE"),
    ("exaone4", "v", 0, "QK-norm"),
    ("bloom", "xr", 0, "no RoPE"),
    ("deepseek2", "kv", 0, "latent of 20 columns"),
    ("deepseek2_yarn", "lowrank", 0, "MLA"),
    ("mistral4", "k", 0, "MLA"),
    ("gemma4_experts", "k+r", 0, "V is normed"),
    ("minicpm3", ["latent", "k"], 1, "mode latent stores"),
    ("llama_mha", "latent", 0, "not made of a latent"),
    ("qwen2_mha", ["kv", "x"], 1, "RoPE"),
    ("qwen2_mha", ["k", "v"], 1, "RoPE"),
]


@pytest.mark.parametrize(("name", "mode", "layer", "reason"), ILLEGAL)
def test_illegal_modes_say_layer_reason_and_alternatives(name, mode, layer, reason, convert):
    path = convert(GOLDEN / name)
    legal = [mode.name for mode in core.modes(str(path)) if mode.legal]
    for load in (
        lambda: slimrt._core.Engine(str(path), cache=mode, n_ctx=64),
        lambda: slimrt.Model(path, cache=mode, n_ctx=64),
        lambda: slimrt._core.plan(str(path), cache=mode, n_ctx=64),
    ):
        with pytest.raises(slimrt.CacheUnsupportedError, match=f"layer {layer}") as caught:
            load()
        message = str(caught.value)
        assert any(word in message for word in reason.split("|")), message
        assert all(m in message.rsplit(":", 1)[-1] for m in legal), message


WINDOWED = ("gpt_oss", "gemma3", "gemma3_mha", "gemma4", "gemma4_mha", "gemma4_small", "gemma4_experts",
            "olmo3", "cohere2", "exaone4")  # fmt: skip


def test_cache_modes_lists_every_mode_with_a_reason(convert):
    for name, legal in {
        "llama_gqa_tied": {"kv", "k+r"},
        "llama_mha": {"kv", "k", "k+r"},
        "llama_wide": {"kv", "k", "k+r"},
        "gptneox": {"kv", "k", "k+r", "xr"},
        "phi2_gqa": {"kv", "k+r", "xr"},
        "olmo2": {"kv", "k", "k+r"},
        "olmo2_gqa": {"kv", "k+r"},
        "qwen3": {"kv", "k", "k+r"},
        "qwen3_gqa": {"kv", "k+r"},
        "gpt2_erf": {"kv", "k", "k+r", "v", "x"},
        "stablelm": {"kv", "k", "k+r", "xr"},
        "gemma": {"kv", "k", "k+r"},
        "olmo": {"kv", "k", "k+r"},
        "cohere": {"kv", "k", "k+r"},
        "cohere_gqa": {"kv", "k+r"},
        "granite_gqa": {"kv", "k+r"},
        "minicpm": {"kv", "k", "k+r"},
        "gemma3": {"kv", "k+r"},
        "gemma3_mha": {"kv", "k", "k+r"},
        "gemma4": {"kv"},
        "gemma4_mha": {"kv"},
        "gemma4_small": {"kv"},
        "gemma4_experts": {"kv"},
        "olmo3": {"kv", "k", "k+r"},
        "cohere2": {"kv", "k", "k+r"},
        "exaone4": {"kv", "k", "k+r"},
        "smollm3": {"kv", "k+r"},
        "glm4": {"kv", "k+r", "xr"},
        "glm4_mha": {"kv", "k", "k+r", "xr"},
        "bitnet": {"kv", "k+r"},
        "bitnet_online": {"kv", "k", "k+r"},
        "openlm": {"kv"},
        "gpt_oss": {"kv"},
        "minimax_m2": {"kv", "k+r"},
        "opt": {"kv", "k", "k+r", "v", "x"},
        "bloom": {"kv", "k", "k+r", "v", "x"},
        "mpt": {"kv", "k", "k+r", "v", "x"},
        "deepseek2": {"latent"},
        "phimoe": {"kv", "k+r"},
        "phimoe_plain": {"kv", "k", "k+r"},
        "minicpm3": {"latent"},
        "mistral4": {"latent"},
    }.items():
        modes = core.modes(str(convert(GOLDEN / name)))
        assert {mode.name for mode in modes} == {"kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank", "latent"}
        ages = set() if name in WINDOWED or "kv" not in legal else {"kivi", "lowrank"}  # none behind a window
        assert {mode.name for mode in modes if mode.legal} == legal | ages
        assert not any(mode.cross for mode in modes)


def test_unknown_mode_type_and_count(convert):
    path = str(convert(GOLDEN / "llama_mha"))
    with pytest.raises(slimrt.UnsupportedError, match="kv"):
        slimrt._core.Engine(path, cache="kk")
    with pytest.raises((slimrt.UnsupportedError, ValueError), match="f16"):
        slimrt._core.Engine(path, cache_type_k="f17")
    with pytest.raises((slimrt.UnsupportedError, ValueError), match="q4_k"):
        slimrt._core.Engine(path, cache_type_k="q4_k")
    with pytest.raises(ValueError, match="2 layers|1"):
        slimrt._core.Engine(path, cache=["kv"])
    with pytest.raises(slimrt.UnsupportedError, match="kv"):
        slimrt.Model(path, cache="kvv")


def test_missing_or_misshapen_fold_is_refused(convert):
    path = str(convert(GOLDEN / "llama_mha"))
    with pytest.raises(slimrt.SlimrtError, match="attn_kv"):
        slimrt._core.Engine(path, cache="k")
    wrong = {f"blk.{i}.attn_kv.weight": np.zeros((48, 47), np.float32) for i in range(2)}
    with pytest.raises((slimrt.SlimrtError, ValueError), match="attn_kv"):
        slimrt._core.Engine(path, cache="k", derived=wrong)
