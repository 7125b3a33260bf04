# SPDX-License-Identifier: Apache-2.0
"""Heads that keep V beside K in modes k and k+r: what the engine computes, keeps and refuses (see v_heads.py)."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from gguf import GGUFValueType
from hypothesis import settings

import slimrt
import v_heads
from conftest import GOLDEN, ISAS, decode, open_engine, relative, rms
from folds import as_converted
from reference import Reference
from reference_modes import CACHE_MODES, norms
from remembered import remembered
from slimrt import _core
from slimrt.converter import convert as tool
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import calibrated
from slimrt.folding.heads import reordered
from slimrt.modelfile.gguf import array, read_gguf, write_gguf
from test_cache_modes import IDS, N_PREFILL, exact_logits
from test_cache_modes_residual import check
from test_sequences_random import Operations

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
    ("qwen3", "k"),  # of each head
    ("qwen3_gqa", "k+r"),
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
        str(path), cache=mode, cache_type_k=dtype, cache_type_v=dtype,
        **({"n_ctx": 64, "derived": folds(path, mode, dtype)} | given | options),
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


@pytest.mark.parametrize("isa", ISAS)
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
    normed = 4 * norms(model, kept)
    for dtype, size in (("f16", 2), ("q8", 1)):
        made = as_converted(folds(path, mode, dtype), dtype, RESIDUAL)
        engine = engine_of(path, mode, dtype, derived=made)
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


def test_random_operations(keeping, tmp_path):
    """Any order of them, on a file with folds of its own."""
    plain = keeping("llama_mha", "k")
    Operations.path = v_heads.write(plain, tmp_path / "folded.gguf", "k", tensors=folds(plain, "k", "f32"))
    Operations.mode, Operations.window, Operations.n_ctx = "k", False, 80
    Operations.TestCase.settings = settings(max_examples=8, stateful_step_count=25, deadline=None, derandomize=True)
    Operations.TestCase().runTest()


# ---------------------------------------------------------------- conversion
TALE = Path(__file__).parents[1] / "models" / "tale-llama.gguf"
HELD_OUT = TALE.with_name("heldout.txt")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A quarter of the heads of a trained model in k+r q8, and what the conversion said."""
    out = tmp_path_factory.mktemp("tale") / "v.gguf"
    return out, tool.convert(TALE, out, cache="k+r", cache_type="q8", v_heads=0.25, progress=False)


def text(n: int) -> np.ndarray:
    return np.random.default_rng(2).integers(3, 200, n).astype(np.int32)


@pytest.mark.unsanitized  # a conversion, as those with the shipped models
def test_heads_that_attend_to_most_tokens_are_chosen(converted):
    """By the model's own softmax weights, in float64, on another text than the conversion's."""
    path, report = converted
    model = Reference(TALE)
    chosen = sum(layer.v_heads for layer in report.layers)
    assert chosen == round(0.25 * model.w.n_kv_heads * len(model.w.layers))
    assert len({layer.v_heads for layer in report.layers}) > 1  # ranked over all layers
    shares, old, new = [], read_gguf(TALE), read_gguf(path)
    for layer in report.layers:
        names = [f"blk.{layer.layer}.attn_{part}.weight" for part in "qkv"]
        before, after = (
            [m.tensor(name).values().reshape(model.w.n_kv_heads, -1) for name in names] for m in (old, new)
        )
        order = [next(i for i, row in enumerate(before[0]) if np.array_equal(row, one)) for one in after[0]]
        assert sorted(order) == list(range(model.w.n_kv_heads))
        assert all(np.array_equal(b[order], a) for b, a in zip(before, after, strict=True))
        kept = order[model.w.n_kv_heads - layer.v_heads :]
        shares.append([(share, i in kept) for i, share in enumerate(active_shares(layer.layer))])
    kept = [share for layer in shares for share, keeps in layer if keeps]
    others = [share for layer in shares for share, keeps in layer if not keeps]
    assert np.mean(kept) > 2 * np.mean(others) and np.median(kept) > np.quantile(others, 0.9)


def active_shares(layer: int) -> list[float]:
    """Of each head, over the later half of a text's queries: see slimrt.folding.heads."""
    model = Reference(TALE)
    with calibrated(str(TALE), read_gguf(TALE), HELD_OUT, show_progress=False) as known:
        x = known.layer(layer)[0].windows[0].x[:512].astype(np.float64)
    one, positions, found = model.w.layers[layer], np.arange(len(x)), []
    q, k = (model.rotate(x @ w.T, model.w.n_kv_heads, positions, layer) for w in (one.wq, one.wk))
    for head in range(model.w.n_kv_heads):
        shares = []
        for i in range(256, len(x), 8):
            s = q[i, head] @ k[: i + 1, head].T / np.sqrt(model.dk)
            p = np.sort(np.exp(s - s.max()) / np.exp(s - s.max()).sum())
            shares.append(sum(np.cumsum(p**2) > 0.02**2) / (i + 1))
        found.append(float(np.mean(shares)))
    return found


@pytest.mark.unsanitized
def test_another_order_of_heads_changes_nothing(converted):
    wanted, got = (
        decode(_core.Engine(str(path), cache="kv", cache_type_k="f32", cache_type_v="f32", n_ctx=128), text(96), 64)
        for path in (TALE, converted[0])
    )
    assert relative(got, wanted) < 2e-5


@pytest.mark.parametrize(
    "name",
    ["llama_gqa_wide", "gptneox", "qwen3moe", "gemma3_mha", "olmo2_gqa", "bitnet"],  # qkv; norms of heads, rows, W_O's
)
def test_any_order_of_heads_is_the_same_model(name, convert, tmp_path):
    model = read_gguf(str(convert(GOLDEN / name)))
    attention, path = Attention.of(model), tmp_path / "moved.gguf"
    order = {layer: np.arange(attention.n_kv_heads)[::-1] for layer in range(attention.n_layers)}
    write_gguf(path, reordered(model, attention, order, unpack=False), show_progress=False)
    got, wanted = (decode(open_engine(one, "kv", "f32", n_ctx=64), IDS, 40) for one in (path, convert(GOLDEN / name)))
    assert relative(got, wanted) < 2e-5


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_heads_that_are_biased_by_their_place_stay_there(name, tmp_path):
    with pytest.raises(slimrt.UnsupportedError, match="v_heads is not possible here: .*ALiBi"):
        tool.convert(GOLDEN / name, tmp_path / "out.gguf", cache="k+r", v_heads=0.5, progress=False)


@pytest.mark.unsanitized
def test_a_converted_file_is_what_its_report_says(converted):
    path, report = converted
    with slimrt.Model(path) as model:
        layers = model.info()["layers"]
    assert [one["v_heads"] for one in layers] == [one.v_heads for one in report.layers]
    assert [one["bytes_per_token"] for one in layers] == [one.bytes_per_token for one in report.layers]
    assert slimrt.plan(path).asked.bytes_per_token == sum(one.bytes_per_token for one in report.layers)
    assert all(one.measured.value < 0.02 and one.predicted.value < 0.02 for one in report.layers)
    assert all(one.predicted.value == pytest.approx(one.measured.value, rel=0.3) for one in report.layers)
    kept = next(one for one in report.layers if one.v_heads)
    assert f"k+r, V of {kept.v_heads}" in report.table()
    # as near to kv as the same mode without such heads
    exact = decode(_core.Engine(str(path), cache="kv", cache_type_k="f32", cache_type_v="f32", n_ctx=128), text(96), 64)
    assert rms(decode(_core.Engine(str(path), n_ctx=128), text(96), 64) - exact) < 0.05 * rms(exact)


@pytest.mark.unsanitized
def test_a_layer_all_of_whose_heads_are_chosen_has_kv(tmp_path):
    report = tool.convert(TALE, tmp_path / "k.gguf", cache="k", cache_type="f32", v_heads=0.8, progress=False)
    modes = [layer.mode for layer in report.layers]
    assert "kv" in modes and all(layer.v_heads == 0 for layer in report.layers if layer.mode == "kv")
    got, wanted = (
        decode(_core.Engine(str(tmp_path / "k.gguf"), n_ctx=128, **options), text(96), 64)
        for options in ({}, {"cache": "kv", "cache_type_k": "f32", "cache_type_v": "f32"})
    )
    assert rms(got - wanted) < 1e-2 * rms(wanted)


@pytest.mark.unsanitized
def test_weights_in_blocks_of_several_heads(tmp_path):
    """Are refused as they are, and put in order before they are quantised."""
    source = tmp_path / "q4_k.gguf"
    tool.convert(TALE, source, outtype="q4_k", progress=False)
    with pytest.raises(slimrt.UnsupportedError, match="blocks of 256 columns of 'blk.*attn_output.weight'.*outtype"):
        tool.convert(source, tmp_path / "out.gguf", cache="k", v_heads=0.25, progress=False)
    assert not (tmp_path / "out.gguf").exists()
    report = tool.convert(
        TALE, tmp_path / "out.gguf", cache="k+r", cache_type="q8", outtype="q4_k", v_heads=0.25, progress=False
    )
    model = read_gguf(tmp_path / "out.gguf")
    assert model.tensor("blk.0.attn_output.weight").type.name == "Q4_K" and any(one.v_heads for one in report.layers)
    got, wanted = (
        decode(_core.Engine(str(path), cache="kv", cache_type_k="f32", cache_type_v="f32", n_ctx=128), text(96), 64)
        for path in (tmp_path / "out.gguf", source)
    )
    assert rms(got - wanted) < 0.2 * rms(wanted)  # other blocks, other rounding


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cache": "k", "v_heads": 1.0}, ValueError, "below 1"),
        ({"cache": "k", "v_heads": -0.1}, ValueError, "at least 0"),
        ({"cache": "kv", "v_heads": 0.25}, ValueError, "'k' and 'k\\+r'.*'kv'"),
        ({"cache": "auto", "v_heads": 0.25}, ValueError, "'k' and 'k\\+r'.*'auto'"),
        ({"v_heads": 0.25}, ValueError, "not for a conversion that names none"),
        ({"cache": "k", "v_heads": 0.25, "calibration": "none"}, slimrt.UnsupportedError, "a text"),
    ],
)
def test_what_cannot_be_converted_is_refused(options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        tool.convert(TALE, tmp_path / "out.gguf", progress=False, **options)
    assert list(tmp_path.iterdir()) == []
