# SPDX-License-Identifier: Apache-2.0
"""The fold is exact in float64, refuses what cannot be exact, and its predicted error is the one that is measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from conftest import GOLDEN, relative, third_party
from slimrt import core
from slimrt.converter.convert import convert as run_convert
from slimrt.errors import CacheUnsupportedError, ModelFormatError
from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import calibrated, text_ids, white_inputs
from slimrt.folding.exact import FOLDED, condition, fold_layer, fold_matrix
from slimrt.folding.fold import fold_layers
from slimrt.folding.noise import ROUNDING, ROUNDOFF
from slimrt.folding.planes import Plane
from slimrt.folding.precision import measure_error_of_v, measured
from slimrt.folding.readback import Sample, VReader
from slimrt.folding.slim import KReader
from slimrt.folding.weights import LayerWeights, fold_value_bias, projections
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import ModelData, Tensor, read_gguf, write_gguf
from slimrt.modelfile.reading import read_model
from slimrt.modes import MODES
from synthetic import layer_of

pytestmark = pytest.mark.unsanitized  # NumPy most of the time; the core is tested by others

EXACT = 1e-9
FOR_K = ["llama_mha", "llama_bias", "llama_wide", "llama_gqa_wide", "qwen2_mha", "gptneox", "phi2", "gpt2_erf"]


def with_condition(random: np.random.Generator, d: int, e: int, cond: float) -> np.ndarray:
    """A [d, e] matrix with singular values from 1 down to 1 / cond."""
    u, _ = np.linalg.qr(random.normal(size=(d, d)))
    v, _ = np.linalg.qr(random.normal(size=(e, d)))
    return u * np.geomspace(1, 1 / cond, d) @ v.T


@pytest.mark.parametrize("cond", [1.0, 1e3, 1e6])
@pytest.mark.parametrize(("d", "e"), [(32, 32), (32, 48), (8, 64)])
def test_fold_is_exact_for_square_and_wide_matrices(d, e, cond):
    random = np.random.default_rng(0)
    w_in, w_out = with_condition(random, d, e, cond), random.normal(size=(d, e))
    weight, found = fold_matrix(w_in, w_out)
    assert found == pytest.approx(cond, rel=1e-2)
    assert relative(w_in @ weight, w_out) < EXACT
    right_inverse = np.linalg.pinv(w_in, rcond=1e-15)
    assert relative(weight, right_inverse @ w_out) < 1e-6
    assert condition(w_in) == pytest.approx(cond, rel=1e-2) == condition(w_in.T)


def test_singular_matrix_has_infinite_condition():
    w_in = with_condition(np.random.default_rng(0), 16, 16, 10.0)
    w_in[:, 3] = w_in[:, 5]
    assert fold_matrix(w_in, np.eye(16))[1] == np.inf


@pytest.mark.parametrize("name", FOR_K)
@pytest.mark.parametrize("mode", ["k", "v"])
def test_fold_layers_gives_what_each_layer_needs(name, mode, convert):
    path = convert(GOLDEN / name)
    model = read_gguf(path)
    attention = Attention.of(model)
    if attention.refusal(mode):
        with pytest.raises(CacheUnsupportedError, match="layer 0.*rotated.*Modes that work here: kv, k"):
            fold_layers(path, mode)
        return
    folded = fold_layers(path, mode, progress=False)
    assert sorted(folded) == sorted(f"blk.{i}.{FOLDED[mode]}" for i in range(attention.n_layers))
    for layer in range(attention.n_layers):
        w_k, w_v = projections(model, attention, layer)
        w_in, w_out = (w_k, w_v) if mode == "k" else (w_v, w_k)
        weight = folded[f"blk.{layer}.{FOLDED[mode]}"]
        assert weight.dtype == np.float32 and weight.shape == (attention.kv_width, attention.kv_width)
        assert relative(w_in @ weight.T, w_out) < 1e-4  # only the rounding of W to float32


@pytest.mark.parametrize(
    ("name", "others"),
    [("llama_gqa_tied", r"kv, k\+r, kivi, lowrank"), ("mistral_window", r"kv, k\+r"), ("phi3", r"kv, k\+r")],
)  # none ages behind a window
def test_k_is_refused_when_v_is_no_function_of_it(name, others, convert):
    with pytest.raises(CacheUnsupportedError, match=rf"layer 0: K is 24 wide \(2 KV heads.*input 48.*: {others}$"):
        fold_layers(convert(GOLDEN / name), "k")


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_legal_modes_are_those_of_the_runtime(name, convert):
    path = convert(GOLDEN / name)
    attention = Attention.of(read_gguf(path))
    runtime = {mode.name: mode.legal for mode in core.modes(str(path))}
    assert {mode: not attention.refusal(mode) for mode in MODES} == runtime


def test_other_modes_need_no_fold(convert):
    with pytest.raises(ValueError, match=r"'x' needs no fold; those that do: k, k\+r, v, xr"):
        fold_layers(convert(GOLDEN / "gpt2_erf"), "x")


def changed(model: ModelData, name: str, change) -> ModelData:
    values = model.tensor(name).values().copy()
    change(values)
    return model.with_tensors(Tensor.of(name, values))


def test_singular_projection_is_refused_by_layer():
    model, _ = read_model(GOLDEN / "llama_mha")
    model = changed(model, "blk.1.attn_k.weight", lambda w: w.__setitem__(3, w[7]))
    attention = Attention.of(model)
    fold_layer(model, attention, "k", 0)
    with pytest.raises(CacheUnsupportedError, match="'k' is not possible in layer 1: W_K is singular.*here: kv"):
        fold_layer(model, attention, "k", 1)


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_what_a_singular_projection_loses_is_in_the_residual(cache_type, run, tmp_path):
    """Of every type; and its condition, which is infinite, is null in JSON."""
    model = changed(read_model(GOLDEN / "llama_mha")[0], "blk.1.attn_k.weight", lambda w: w.__setitem__(3, w[7]))
    write_gguf(tmp_path / "in.gguf", model, show_progress=False)
    code, out, _ = run("convert", tmp_path / "in.gguf", "-o", tmp_path / "out.gguf", "--cache", f"k+r:{cache_type}",
                       "--json")  # fmt: skip
    layer = json.loads(out, parse_constant=pytest.fail)["layers"][1]
    assert code == 0 and layer["cond"] is None and layer["predicted"]["value"] < 0.01


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    model, _ = read_model(GOLDEN / "llama_mha")
    model = changed(model, "blk.0.attn_v.weight", lambda w: w.__setitem__((2, 2), value))
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_v\.weight.*not finite"):
        fold_layer(model, Attention.of(model), "k", 0)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_mha", "llama_bias", "gptneox", "phi2_gqa", "gpt2_erf"])
def test_value_bias_moves_into_the_output_bias(name):
    """For any softmax weights, the attention block's output stays what it was; GQA spreads b_V over its query heads."""
    random = np.random.default_rng(0)
    model, _ = read_model(GOLDEN / name)
    attention = Attention.of(model)
    moved = fold_value_bias(model, attention)
    weights = random.dirichlet(np.ones(5), attention.n_heads)  # of 5 tokens, a row a head
    values = random.normal(size=(5, attention.n_kv_heads, attention.head_dim))

    def output(m: ModelData, layer: int) -> np.ndarray:
        fused = m.tensors.get(f"blk.{layer}.attn_qkv.bias")
        bias = (fused or m.tensor(f"blk.{layer}.attn_v.bias")).values()[-attention.kv_width :].astype(np.float64)
        v = values + bias.reshape(attention.n_kv_heads, attention.head_dim)
        per_head = v.repeat(attention.n_heads // attention.n_kv_heads, axis=1)
        heads = np.einsum("ht,thd->hd", weights, per_head).ravel()
        out = m.tensors.get(f"blk.{layer}.attn_output.bias")
        return m.tensor(f"blk.{layer}.attn_output.weight").values() @ heads + (0 if out is None else out.values())

    for layer in range(attention.n_layers):
        assert relative(output(moved, layer), output(model, layer)) < 1e-6
        fused = moved.tensors.get(f"blk.{layer}.attn_qkv.bias")
        bias = (fused or moved.tensor(f"blk.{layer}.attn_v.bias")).values()
        assert not bias[-attention.kv_width :].any()
        if fused:  # Q's and K's stay
            old = model.tensor(fused.name).values()
            assert np.array_equal(bias[: -attention.kv_width], old[: -attention.kv_width])


@pytest.mark.parametrize("type_name", ["f16", "bf16"])
def test_rounding_noise_of_a_normal_channel(type_name):
    """The constant in the prediction, against the rounding itself, over the scales a channel may have."""
    values = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    noise = [
        np.mean((Plane(1, 1, type_name).round(v[:, None])[:, 0] - v) ** 2) / np.mean(v**2)
        for v in np.outer(np.geomspace(1, 2, 16), values).astype(np.float32)
    ]
    assert np.mean(noise) / ROUNDOFF[type_name] ** 2 == pytest.approx(ROUNDING, rel=0.03)
    assert max(noise) < 1.1 * min(noise)


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("d", "e", "cond"), [(64, 64, 1e2), (128, 128, 1e4), (96, 128, 1e4), (256, 256, 1e5)])
def test_prediction_holds_for_correlated_inputs(d, e, cond, type_name):
    random = np.random.default_rng(int(cond) + d)
    w_in, w_out = with_condition(random, d, e, cond), random.normal(size=(d, e)) / np.sqrt(d)
    w_in, w_out = (w.astype(np.float32).astype(np.float64) for w in (w_in, w_out))  # as a file holds them
    x = (random.normal(size=(2000, d)) * np.geomspace(1, 1e-2, d)) @ np.linalg.qr(random.normal(size=(d, d)))[0]
    x = x.astype(np.float32)
    weights = layer_of(w_in, w_out)
    window = Window(weights, None, x)
    reader = KReader(Sample(weights, x.astype(np.float64).T @ x / len(x), [window]), type_name)
    assert 1 / 1.5 < reader.value_error() / measured(reader, [window]).value < 1.5


def test_inputs_without_a_text_know_gamma_and_beta():
    model, _ = read_model(GOLDEN / "gpt2_erf")
    weights = LayerWeights(model, Attention.of(model), 1)
    random = np.random.default_rng(0)
    white = random.normal(size=(20_000, weights.attention.d))
    x = white * model.tensor("blk.1.attn_norm.weight").values() + model.tensor("blk.1.attn_norm.bias").values()
    moment, some = white_inputs(weights)
    assert relative(moment, x.T @ x / len(x)) < 0.05
    assert np.square(some).sum(axis=1).mean() == pytest.approx(moment.trace(), rel=0.05)


def test_a_projection_of_zeros_has_no_error():
    weights = layer_of(np.eye(4), np.zeros((4, 4)))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    reader = KReader(Sample(weights, np.eye(4), [Window(weights, None, x)]), "f16")
    assert reader.value_error() == reader.output_error() == reader.fold_error() == 0


def trained(name: str, tmp_path):
    """A trained model as GGUF, and ids of text it knows, disjoint from those it is calibrated on."""
    import json

    directory = third_party(f"models/{name}")
    run_convert(directory, tmp_path / "plain.gguf", progress=False)
    if name == "slm4096":
        golden = json.loads((directory / "golden.json").read_text())
        place = {character: id for id, character in enumerate(golden["vocab"])}
        ids = [place[c] for c in (directory / "corpus.txt").read_text() if c in place]
    else:
        ids = np.random.default_rng(0).integers(0, 27, 400).tolist()
    return tmp_path / "plain.gguf", np.array(ids, np.int32)


@pytest.mark.parametrize("mode", ["k", "v"])
@pytest.mark.parametrize("name", ["slm4096", "makemore_lmj9_model"])
def test_predicted_error_is_measured_on_trained_models(name, mode, tmp_path):
    path, ids = trained(name, tmp_path)
    model = read_gguf(path)
    attention = Attention.of(model)
    context = model.size("context_length")
    found = measure_error_of_v(path, ids[-context:], mode)
    make = KReader if mode == "k" else VReader
    with calibrated(path, model, ids[:-context], show_progress=False) as known:
        for layer in range(attention.n_layers):
            sample, _ = known.layer(layer)
            for type_name in ("f16", "bf16"):
                ratio = make(sample, type_name).fold_error() / found[type_name][layer]
                assert 0.5 < ratio < 2, (layer, type_name, ratio)  # measured on one short context


def test_no_tokenizer_means_no_text(convert):
    assert text_ids(convert(GOLDEN / "llama_mha"), None) is None
