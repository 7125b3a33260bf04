# SPDX-License-Identifier: Apache-2.0
"""Mode lowrank (TALE): older rows keep few bits and of V's latent the first columns. Against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, ISAS, decode, derived, ids_of, open_engine, relative
from folds import fold_lowrank
from gguf_shapes import Shape, write_random
from pairwise import pairwise
from reference import Cache, Reference, Weights
from reference_files import load
from reference_formats import SCALED
from reference_modes import BLOCK, Level, aged
from remembered import remembered
from slimrt import _core
from slimrt.folding.fold import fold_layers
from test_regions import N_CTX, same_rounding
from test_windows import appended

SAME = 2e-5  # the order of float32 sums
USUAL = "q2@0.5+q4*0.1"
MODELS = ["llama_mha", "llama_gqa_tied", "qwen2_mha", "olmo2_gqa", "qwen3_gqa", "mpt", "openlm", "phi2"]
LEVELS = [
    "f32@0.5+f32*0.3",
    "f16@0.25+f16@0.5*0.2+f16*0.3",
    "q8@0.5+f16*0.3+sinks=0",
    "q4@0.5+q8@0.75*0.2+q8*0.3+recent=20",
    "q3/q4+q8*0.2+sinks=40",
    USUAL,
    "q2",
    "f32@0.5+f32*0.3+predict",
    "q4@0.5+q8@0.75*0.2+q8*0.3+recent=20+predict",
    f"{USUAL}+predict",
]
SHIPPED = Path(__file__).parent.parent / "models"


def engine_of(path: Path, levels: str, **options) -> _core.Engine:
    return open_engine(path, "lowrank", levels, n_ctx=N_CTX, **options)


@remembered
def exact(path, seed: int, n: int) -> np.ndarray:
    return Reference(path).logits(ids_of(seed, n))


@remembered
def predicted(path, levels: str, seed: int, n: int, n_prefill: int) -> np.ndarray:
    return Reference(path, folds=derived(path, "lowrank")).logits_cached(ids_of(seed, n), n_prefill, "lowrank", levels)


def near(got: np.ndarray, wanted: Callable[[str], np.ndarray], levels: str) -> bool:
    """As the reference with these levels: nearer than it is to itself with the same columns in float32."""
    plain = re.sub(r"\b(f16|bf16|f32|q8|q4|q3|q2)(/\w+)?", "f32", levels)
    return same_rounding(got, wanted(levels), wanted(plain), "f32" if levels == plain else levels)


def appended_at_once(engine: _core.Engine, ids: np.ndarray) -> tuple[int, np.ndarray]:
    sequence = engine.new_sequence()
    return sequence, engine.append([(sequence, ids)], all_logits=True)


# ---------------------------------------------------------------- what holds exactly, in float64
def groups_of(n_kv_heads: int) -> list[int]:
    return [heads for heads in range(1, n_kv_heads + 1) if n_kv_heads % heads == 0]


def one_layer(name: str) -> Weights:
    weights = load(GOLDEN / name, 0)
    return replace(weights, layers=weights.layers[:1])


@pytest.mark.parametrize("name", ["llama_bias", "llama_gqa_tied", "qwen2_mha", "gpt2_tanh", "olmo2_gqa", "phi2_gqa"])
def test_the_whole_latent_is_v(name):
    weights = one_layer(name)
    plain, ids = Reference(weights), ids_of(0, 40)
    wanted = plain.logits_cached(ids, 20)
    for heads in groups_of(weights.n_kv_heads):
        folds = fold_lowrank(plain, 0, heads)
        into = np.asarray(folds["blk.0.attn_v_latent.weight"], np.float64)
        width, dim = into.shape[1], plain.dv
        out = np.linalg.inv(into.reshape(-1, width, width))  # [groups, width of v, columns]
        model = Reference(weights, folds={**folds, "blk.0.attn_v_expand.weight": out.reshape(-1, width)})
        for absorbed in (True, False):
            assert relative(model.logits_cached(ids, 20, "lowrank", absorbed=absorbed), wanted) < 1e-12
        assert len(out) * width == weights.n_kv_heads * dim


@pytest.mark.parametrize("name", ["llama_mha", "llama_gqa_tied"])
@pytest.mark.parametrize("part", [0.01, 0.25, 0.5, 0.9, 1])
def test_summed_latents_make_the_same_output_as_reconstructed_values(name, part):
    """In float64; and in the engine, which sums latents of rows as they are stored, to float32."""
    weights, ids = one_layer(name), ids_of(1, 90)
    for heads in groups_of(weights.n_kv_heads):
        model = Reference(weights, folds=fold_lowrank(Reference(weights), 0, heads))
        levels = f"f32@{part}+f32*0.3"
        absorbed, made = (model.logits_cached(ids, 50, "lowrank", levels, absorbed=way) for way in (True, False))
        assert relative(absorbed, made) < 1e-12


@pytest.mark.parametrize("dtype", [dtype for dtype in SCALED if dtype.startswith("q")])
def test_errors_of_old_rows_are_half_a_step(dtype):
    """K: for each channel of 32 tokens; V: for each token and 32 columns, or the columns of a head."""
    random = np.random.default_rng(0)
    cache = Cache("lowrank", (dtype, dtype), {"k": ("f32", 2), "v": ("f32", 2)}, absorbed=True)
    rows = {name: random.normal(size=(64, 96)) * 10.0 ** random.uniform(-2, 2, (1, 96)) for name in ("k", "v")}
    found = aged(cache, rows, Level(dtype, dtype, 1))
    groups = {
        "k": lambda x: x.reshape(2, BLOCK, 96).swapaxes(1, 2),
        "v": lambda x: np.stack([x[:, [*range(i, i + 32)]] for i in (0, 48)], axis=1),  # each head's first group
    }
    for name, grouped in groups.items():
        x, error = grouped(rows[name]), grouped(np.abs(found[name] - rows[name]))
        if dtype == "q8":  # V: all 48 columns of a head
            whole = x if name == "k" else rows["v"].reshape(64, 2, 48)
            step = 2 * np.abs(whole).max(axis=-1, keepdims=True) / 254
        else:
            span = np.ptp(x, axis=-1, keepdims=True) + 2.0**-10 * np.abs(x.min(axis=-1, keepdims=True))
            step = span / (2 ** int(dtype[1]) - 1) * (1 + 2.0**-9) + 2.0**-23
        assert (error <= step / 2 * (1 + 1e-5)).all()
    constant = {name: np.full((BLOCK, 96), 0.37) for name in rows}
    assert all(np.abs(x - 0.37).max() < 0.37 * 2.0**-18 for x in aged(cache, constant, Level(dtype, dtype)).values())


# ---------------------------------------------------------------- the engine and the reference
@pairwise(name=MODELS, levels=LEVELS, n_prefill=[1, 100, 120])
def test_prompt_then_steps(name, levels, n_prefill, convert):
    """What has aged before, within and after the prompt is read as the reference stores it."""
    path, n = convert(GOLDEN / name), 230
    # Pieces of a prompt read each other's rows in f16: much, beside what such rows themselves lose. Of 128 tokens on,
    # weights in f16 are multiplied as integers.
    n_batch = 127 if levels.startswith("f16") else 48
    got = decode(engine_of(path, levels, n_batch=n_batch), ids_of(0, n), n_prefill)
    assert near(got, lambda levels: predicted(path, levels, 0, n, n_prefill), levels)


def test_decoding_reads_codes_even_where_all_rows_have_aged(convert):
    """After 4 + 6 * 32 tokens no row is recent: values made of dense rows in bf16 would be off by 2^-9."""
    path, ids, levels = convert(GOLDEN / "llama_mha"), ids_of(9, 197), "q8+bf16*0.1"
    model = Reference(path, folds=derived(path, "lowrank"))
    caches, engine = model.new_cache("lowrank", levels), engine_of(path, levels)
    sequence, _ = appended_at_once(engine, ids[:196])
    model.append(ids[:196], caches)
    assert caches[0].ends[1] == 196
    assert relative(engine.append([(sequence, ids[196:])]), model.append(ids[196:], caches)) < SAME


@pytest.mark.parametrize("name", ["llama_bias", "llama_gqa_tied"])
def test_full_rank_without_quantisation_is_kv(name, convert):
    path, ids = convert(GOLDEN / name), ids_of(2, 230)
    for levels in ("f32", "f32+f32*0.3+f32*0.2+sinks=40", "q2@0.5+f32*1", f"{USUAL}+f32*0.1+sinks=300",
                   "q2+f32*0.1+recent=300", "f32+f32*0.3+predict"):  # fmt: skip
        assert relative(decode(engine_of(path, levels), ids, 100), exact(path, 2, 230)) < SAME, levels


@pytest.mark.parametrize("name", ["llama_bias", "llama_gqa_tied"])
def test_an_eager_prompt_reads_latents(name, convert):
    """As a model would whose W_V has been replaced by the product of its factors, from the first token on."""
    path, ids = convert(GOLDEN / name), ids_of(18, 230)
    folds, model = derived(path, "lowrank"), Reference(path)
    for i, layer in enumerate(model.w.layers):
        into, out = (folds[f"blk.{i}.attn_v_{part}.weight"].astype(float) for part in ("latent", "expand"))
        groups, kept = len(into) // into.shape[1], into.shape[1] * 3 // 8
        layer.wv = np.concatenate(
            [
                (part_out[:, :kept] @ part_in[:kept]) @ w
                for part_in, part_out, w in zip(
                    np.split(into, groups), np.split(out, groups), np.split(layer.wv, groups), strict=True
                )
            ]
        )
    wanted = model.logits(ids)
    assert relative(wanted, exact(path, 18, 230)) > 0.05
    for n_prefill in (1, 100, 229):
        assert relative(decode(engine_of(path, "f32@0.375+eager"), ids, n_prefill), wanted) < SAME
    coded = decode(engine_of(path, "f32/q8@0.375+eager"), ids, 100)
    assert SAME < relative(coded, wanted) < 0.02


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_any_number_of_heads_may_share_a_latent(heads, convert):
    path, ids = convert(GOLDEN / "llama_mha"), ids_of(3, 150)
    plain = Reference(path)
    folds = {}
    for layer in range(len(plain.w.layers)):
        folds |= fold_lowrank(plain, layer, heads)
    for levels in ("f32@0.4+f32*0.3", "q8@0.4+q8*0.3"):
        model = Reference(path, folds=folds)
        got = decode(engine_of(path, levels, derived=folds), ids, 100)
        assert near(got, partial(model.logits_cached, ids, 100, "lowrank", absorbed=False), levels)


def test_a_latent_that_is_of_no_whole_groups(convert):
    path, folds = convert(GOLDEN / "llama_mha"), derived(convert(GOLDEN / "llama_mha"), "lowrank")
    broken = {**folds, "blk.0.attn_v_latent.weight": np.zeros((48, 20), np.float32)}
    with pytest.raises(slimrt.ModelFormatError, match="20 columns in layer 0 is not of whole groups of its 4 KV heads"):
        engine_of(path, USUAL, derived=broken)


@pytest.mark.parametrize("n_batch", [1, 7, 33, 512])
def test_an_append_does_not_depend_on_its_levels(n_batch, convert):
    """However rows will be stored, and in whatever pieces it is computed."""
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(4, 300)
    first, *others = (
        appended_at_once(engine_of(path, levels, n_batch=n_batch), ids)[1]
        for levels in (
            "f16",
            USUAL,
            f"{USUAL}+predict",
            "q2@0.1+q3@0.5*0.2+q8*0.7+sinks=60",
            "q4@0.75+q4*0.1+recent=64",
        )
    )
    assert all(np.array_equal(first, other) for other in others)
    kv = appended_at_once(open_engine(path, "kv", "f16", n_ctx=N_CTX, n_batch=n_batch), ids)[1]
    assert relative(first, kv) < 2e-3  # rows of either in f16, but before RoPE, and latents
    assert n_batch < 512 or relative(first, exact(path, 4, 300)) < SAME


@pytest.mark.parametrize("levels", [USUAL, "q8@0.5+q8@0.75*0.3+q8*0.2+sinks=0", "q8@0.5+q8@0.75*0.3+q8*0.2+predict"])
def test_many_queries_over_aged_rows(levels, convert):
    """A second prompt reads what the first has left behind: in one piece, and longer than a batch."""
    path, ids = convert(GOLDEN / "llama_gqa_tied"), ids_of(5, 300)
    model, parts = Reference(path, folds=derived(path, "lowrank")), np.split(ids, [200, 230])

    def wanted(levels: str) -> np.ndarray:
        caches = model.new_cache("lowrank", levels)
        return np.concatenate([model.append(part, caches) for part in parts])

    engine = engine_of(path, levels, n_batch=40)
    sequence = engine.new_sequence()
    got = np.concatenate([engine.append([(sequence, part)], all_logits=True) for part in parts])
    assert near(got, wanted, levels)


def test_beside_other_layers(convert):
    path, ids = convert(GOLDEN / "llama_mha"), ids_of(6, 230)
    engine = open_engine(path, ["lowrank", "kv"], "f32", n_ctx=N_CTX, n_batch=48)
    assert relative(decode(engine, ids, 190), exact(path, 6, 230)) < SAME


def test_beside_an_encoder():
    """T5: a bias by distance, which is the same in every region."""
    path, ids, logits = SHIPPED / "tale-t5.gguf", ids_of(11, 230) % 27 + 3, {}
    made = fold_layers(str(path), "lowrank", progress=False)
    for mode in ("kv", "lowrank"):
        engine = _core.Engine(str(path), cache=mode, n_ctx=N_CTX, n_batch=48, derived=made, cache_type_k="f32",
                              cache_type_v="f32")  # fmt: skip
        sequence = engine.new_sequence()
        engine.encode([(sequence, np.arange(3, 20, dtype=np.int32))])
        logits[mode] = decode(engine, ids, 190, sequence)
    assert relative(logits["lowrank"], logits["kv"]) < SAME


# ---------------------------------------------------------------- groups that lose nothing
def test_a_constant_channel_is_kept(convert):
    """A text of one token: K is the same in each row before RoPE, so that 2 bits tell it."""
    path, ids = convert(GOLDEN / "llama_mha"), np.full(150, 7, np.int32)
    got = decode(engine_of(path, "q2/f32+q2/f32*0.3"), ids, 70)
    assert relative(got, Reference(path).logits(ids)) < 1e-4


def test_a_row_of_equal_columns_is_kept(tmp_path):
    shape = Shape(48, 2, 4, 320)
    w_v = np.repeat(np.random.default_rng(0).normal(size=(1, 48)), 48, axis=0).astype(np.float16)
    path = write_random(tmp_path / "model.gguf", shape, edit={f"blk.{i}.attn_v.weight": w_v for i in (0, 1)})
    same = {f"blk.{i}.attn_v_{part}.weight": np.tile(np.eye(24, dtype=np.float32), (2, 1))
            for i in (0, 1) for part in ("latent", "expand")}  # fmt: skip
    ids = ids_of(0, 150) % 64
    got = decode(engine_of(path, "f32/q2+f32*0.3", derived=same), ids, 70)
    assert relative(got, Reference(path).logits(ids)) < 1e-4


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("levels", [USUAL, "q2@0.25+q3@0.5*0.2+q8*0.3+sinks=40+recent=64", f"{USUAL}+predict"])
def test_planned_bytes_are_allocated(levels, convert):
    path = convert(GOLDEN / "llama_gqa_tied")
    engine = open_engine(path, "lowrank", levels, n_ctx=1000, n_batch=32, n_seqs=2)
    memory = engine.memory()
    planned = _core.plan(str(path), cache="lowrank", cache_type_k=levels, cache_type_v=levels, n_ctx=1000, n_batch=32,
                         n_seqs=2)  # fmt: skip
    assert {key: planned[key] for key in memory} == memory
    held = sum(layer["bytes_held"] for layer in planned["layers"])
    assert 2 * held < memory["cache"] < 3 * held + 2 * 2 * len(planned["layers"]) * 192 * 2 * 24 * 2
    for _ in range(2):
        sequence = engine.new_sequence()
        engine.append([(sequence, ids_of(0, 997))])
        appended(engine, sequence, ids_of(1, 3), 1)
    assert engine.memory() == memory


def test_windows_refuse(convert):
    with pytest.raises(slimrt.CacheUnsupportedError, match="rows behind a window are given back"):
        engine_of(convert(GOLDEN / "mistral_window"), USUAL, derived={})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("arch", "n_rot", "n_heads"), [("llama", 64, 4), ("gptneox", 64, 2), ("gptneox", 32, 2)])
def test_heads_of_whole_vectors(arch, n_rot, n_heads, isa, tmp_path):
    """Keys that are turned as codes, block by block: neighbours or halves, a head or a part of it, for one query head
    or two. Against the reference, which turns them one by one."""
    shape = Shape(128, 1, n_heads, 320, n_kv_heads=2, head_dim=64, n_vocab=100, arch=arch)
    path = write_random(tmp_path / "wide.gguf", shape, {f"{arch}.rope.dimension_count": n_rot})
    n, n_prefill = 230, 150
    for levels in ("q2@0.5+q3/q4@0.75*0.2+q8*0.2", "q2@0.5+q3/q4@0.75*0.2+q8*0.2+predict"):
        got = decode(engine_of(path, levels, device=isa), ids_of(3, n), n_prefill)
        assert same_rounding(got, predicted(path, levels, 3, n, n_prefill), exact(path, 3, n), "q2")
