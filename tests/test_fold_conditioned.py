# SPDX-License-Identifier: Apache-2.0
"""The conditioned fold: the filter is the best one, its limits are slim attention and kv, and few tokens do no harm."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, relative
from slimrt import _core
from slimrt.errors import CacheUnsupportedError
from slimrt.folding.attention import Attention
from slimrt.folding.conditioned import Conditioned
from slimrt.folding.exact import fold_matrix
from slimrt.folding.fold import fold_layers
from slimrt.folding.planes import Plane, bytes_per_token, planes, static_scales
from slimrt.folding.precision import measured
from slimrt.folding.readback import Sample, XrReader
from slimrt.folding.wiener import half_rows, leading, shrunk, stacked_wiener, wiener
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import read_gguf
from slimrt.modes import CACHE_TYPES, default_residual
from synthetic import layer_of

pytestmark = pytest.mark.unsanitized  # NumPy most of the time; the core is tested by others

D = 96


def inputs(n: int, d: int = D, seed: int = 0) -> np.ndarray:
    """Correlated inputs float32 [n, d], energies over four decades; other tokens, but the same moments, by seed."""
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0]
    x = np.random.default_rng((2, seed)).normal(size=(n, d)) * np.geomspace(1, 1e-2, d)
    return (x @ turn).astype(np.float32)


def moment_of(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide.T @ wide / len(x)


def projections_with(cond: float, e: int = D) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    u, v = (np.linalg.qr(random.normal(size=(n, n)))[0] for n in (D, e))
    k = min(D, e)
    w_k = u[:, :k] * np.geomspace(1, 1 / cond, k) @ v[:k]
    return tuple(w.astype(np.float32).astype(np.float64) for w in (w_k, random.normal(size=(D, e)) / np.sqrt(D)))


def sample_of(cond: float = 1e3, e: int = D, n: int = 2000, n_heads: int = 4, arch: str = "gpt2") -> Sample:
    weights, x = layer_of(*projections_with(cond, e), n_heads=n_heads, arch=arch), inputs(n)
    return Sample(weights, moment_of(x), [Window(weights, None, x)])


def held_out(sample: Sample, n: int = 1000) -> list[Window]:
    return [Window(sample.weights, None, inputs(n, seed=7))]


# ---------------------------------------------------------------- the filter
@pytest.mark.parametrize("e", [D, 32, 128])
@pytest.mark.parametrize("bits", [11, 7, 3])
def test_wiener_is_the_minimum_and_both_ways_agree(bits, e):
    w_k, w_v = projections_with(1e4, e)
    moment = moment_of(inputs(2000))
    noise = np.einsum("ij,ij->j", w_k, moment @ w_k) * 4.0**-bits / 5
    weight = wiener(moment, w_k, w_v, noise)
    assert relative(stacked_wiener(moment, w_k, w_v, noise), weight) < 1e-6
    # the gradient of |S^1/2 (W_K W - W_V)|^2 + |N^1/2 W|^2 vanishes, against its own parts
    parts = w_k.T @ moment @ (w_k @ weight), noise[:, None] * weight, w_k.T @ moment @ w_v
    assert np.abs(parts[0] + parts[1] - parts[2]).max() < 1e-12 * max(np.abs(part).max() for part in parts)


def test_without_noise_the_filter_is_the_exact_fold():
    w_k, w_v = projections_with(1e3)
    moment = moment_of(inputs(2000))
    noise = np.full(D, 1e-24) * moment.trace()  # 1e18 below: Cholesky would not do, QR is taken
    exact, _ = fold_matrix(w_k, w_v)
    assert relative(wiener(moment, w_k, w_v, noise), exact) < 1e-4


@pytest.mark.parametrize("decades", [3, 9])
def test_leading_spans_nearly_as_much_as_eigenvectors_do(decades):
    random = np.random.default_rng(0)
    turn = np.linalg.qr(random.normal(size=(1100, 1100)))[0]
    values = np.geomspace(1, 10.0**-decades, 1100)
    found, basis = leading((turn * values) @ turn.T, 100)
    assert np.abs(basis.T @ basis - np.eye(100)).max() < 1e-12
    left = values.sum() - found.sum()
    assert left == pytest.approx(values.sum() - np.einsum("ij,ij->", basis, (turn * values) @ (turn.T @ basis)))
    assert left < 1.05 * values[100:].sum()


def test_directions_that_are_all_alike_still_give_a_basis():
    values, basis = leading(np.zeros((1100, 1100)), 8)
    assert not values.any() and np.abs(basis.T @ basis - np.eye(8)).max() < 1e-12


def test_half_rows_hold_what_float16_does_not():
    weight = np.random.default_rng(0).normal(size=(6, 40)) * np.geomspace(1e-9, 1e9, 6)[:, None]
    weight[3] = 0
    rows, scale = half_rows(weight)
    assert rows.dtype == np.float16 and np.isfinite(rows).all()
    error = np.abs(rows * scale[:, None].astype(np.float64) - weight)
    assert (error <= 2.0**-11 * np.abs(weight) + 2.0**-24 * np.abs(weight).max(axis=1, keepdims=True)).all()


def test_static_scales_serve_better_than_none_or_the_maximum():
    """Channels of very different sizes, one row in a hundred an outlier."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(4000, 64)) * np.geomspace(1, 1e-3, 64)
    rows[::100] *= 5
    plane = Plane(64, 1, "q8")

    def noise(scales: np.ndarray) -> float:
        return float(np.mean(((plane.round(rows / scales) * scales - rows) / rows.std(axis=0)) ** 2))

    ours = static_scales(rows, "q8")
    assert noise(ours) < noise(np.abs(rows).max(axis=0)) and noise(ours) < noise(np.ones(64)) / 100
    assert static_scales(rows, "f16") is None and static_scales(np.zeros((3, 2)), "q8").tolist() == [1, 1]


# ---------------------------------------------------------------- few tokens
@pytest.mark.parametrize("n", [32, 96, 384, 1536])
def test_few_tokens_make_it_cautious_not_wrong(n):
    """Unshrunk, 32 tokens predict next to no error and leave V to chance."""
    weights, x = layer_of(*projections_with(1e3), n_heads=4), inputs(n)
    sample = Sample(weights, shrunk(moment_of(x), n), [Window(weights, None, x)])
    reader = Conditioned(sample, "q8", half=True, max_rank=D // 4).reader(D // 4, "q4")
    found = measured(reader, held_out(sample)).value
    assert found < (2 if n >= D else 3) * measured_with_many()  # fewer tokens than dimensions: some are unknown
    assert 1 / 1.5 < reader.value_error() / found < 1.5
    if n == 32:
        bold = Sample(weights, moment_of(x), sample.windows)
        reader = Conditioned(bold, "q8", half=True, max_rank=D // 4).reader(D // 4, "q4")
        assert measured(reader, held_out(sample)).value > 5 * found > 25 * reader.value_error()


def measured_with_many() -> float:
    sample = sample_of(n=8000)
    return measured(Conditioned(sample, "q8", half=True, max_rank=D // 4).reader(D // 4, "q4"), held_out(sample)).value


# ---------------------------------------------------------------- limits and tensors
def test_float32_without_a_residual_is_slim_attention(tiny):
    exact, limit = fold_layers(tiny, "k"), fold_layers(tiny, "k+r", cache_type="f32", rank=0, calibration="none")
    assert sorted(limit) == ["blk.0.attn_kr_v.weight", "blk.1.attn_kr_v.weight"]
    for layer in range(2):
        assert np.array_equal(limit[f"blk.{layer}.attn_kr_v.weight"], exact[f"blk.{layer}.attn_kv.weight"])


@pytest.mark.parametrize("e", [D, 32])
def test_a_full_residual_is_v_itself(e):
    """Sums of d and of e products in float32, the terms of W up to its condition: about 1e-5 of V."""
    sample = sample_of(e=e)
    reader = Conditioned(sample, "f32", half=False, max_rank=e).reader(e, "f32")
    assert measured(reader, held_out(sample)).value < 1e-4 and reader.value_error() < 1e-4


@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4"])
def test_the_loop_is_closed(type_name):
    """rho is the residual of the *stored* row: kept whole, V is right however coarse K and W are."""
    sample = sample_of(1e5)
    reader = Conditioned(sample, type_name, half=True, max_rank=D).reader(D, "f32")
    found = measured(reader, held_out(sample)).value  # float32 sums of W's terms, which nothing corrects
    assert found < 1e-4 and found < 1.5 * reader.value_error()
    assert reader.tensors["attn_kr_v.weight"].dtype == (np.float32 if type_name in ("f16", "bf16") else np.float16)


def test_ranks_are_slices_of_one_fold():
    fold = Conditioned(sample_of(), "q8", half=True, max_rank=48)
    small, large = (fold.reader(rank, "q4").tensors for rank in (8, 48))
    assert small["attn_kr_x.weight"].shape == (8, D) and small["attn_kr_out.weight"].shape == (D, 8)
    for name in ("attn_kr_x.weight", "attn_kr_k.weight"):
        assert np.array_equal(small[name], large[name][:8])
    assert "attn_kr_x.weight" not in fold.reader(0, "q4").tensors
    errors = [fold.value_error(rank, "q8") for rank in range(0, 49, 8)]
    assert errors == sorted(errors, reverse=True)
    rank = fold.smallest_rank("q8", errors[3])
    assert rank <= 24 and fold.value_error(rank, "q8") <= errors[3] < fold.value_error(rank - 4, "q8")
    assert fold.smallest_rank("q8", errors[-1] / 2) is None


@pytest.mark.parametrize("rank", [D // 4, D])
@pytest.mark.parametrize("cond", [1e2, 1e4])
def test_a_residual_in_float16_is_fitted_to_its_own_rounding(cond, rank):
    sample = sample_of(cond)
    fold, windows = Conditioned(sample, "q8", half=True, max_rank=rank), held_out(sample)
    reader = fold.reader(rank, "q4")
    residual = {name: tensor for name, tensor in reader.tensors.items() if name in fold.residual_tensors}
    assert len(residual) == 3 and {tensor.dtype for tensor in residual.values()} == {np.dtype(np.float16)}
    assert all(fold.residual_tensors[name].dtype == np.float32 for name in residual)

    def error_with(tensors: dict[str, np.ndarray]) -> float:
        reader.tensors = fold.tensors | tensors
        return measured(reader, windows).value

    exact, stored = error_with(fold.residual_tensors), error_with(residual)
    rounded = error_with({name: tensor.astype(np.float16) for name, tensor in fold.residual_tensors.items()})
    assert stored**2 - exact**2 < 0.01 * exact**2
    assert rounded**2 - exact**2 > 10 * abs(stored**2 - exact**2)


@pytest.mark.parametrize(
    ("type_name", "residual", "kinds"),
    [
        ("q8", "q4", ("float16",) * 3),
        ("q8", "f32", ("float32",) * 3),  # a residual that is not coarse
        ("f16", "q4", ("float32",) * 3),  # nor rows
    ],
)
def test_only_coarse_residuals_are_in_float16(type_name, residual, kinds):
    fold = Conditioned(sample_of(), type_name, half=True, max_rank=D)
    tensors = fold.reader(D, residual).tensors
    assert tuple(tensors[f"attn_kr_{part}.weight"].dtype.name for part in ("x", "k", "out")) == kinds


def test_the_filter_beats_the_inverse():
    """What it is for: 8-bit rows of an ill-conditioned K."""
    sample = sample_of(1e4)
    fold = Conditioned(sample, "q8", half=True, max_rank=D // 4)
    windows = held_out(sample)
    without, with_residual = (measured(fold.reader(rank, "q4"), windows).value for rank in (0, D // 4))
    naive, _ = fold_matrix(sample.weights.w_k, sample.weights.w_v)
    k = Plane(D, 4, "q8").round(windows[0].k).astype(np.float64)
    inverse = np.linalg.norm(k @ naive - windows[0].exact_v) / np.linalg.norm(windows[0].exact_v)
    assert with_residual < without / 3 < inverse / 30


def test_a_channel_that_is_always_zero_is_left_out():
    w_k, w_v = projections_with(10.0)
    w_k[:, 5] = 0
    weights, x = layer_of(w_k, w_v, n_heads=4), inputs(1000)
    sample = Sample(weights, moment_of(x), [Window(weights, None, x)])
    reader = Conditioned(sample, "f16", half=True, max_rank=8).reader(8, "q8")
    assert not reader.tensors["attn_kr_v.weight"][:, 5].any()
    assert measured(reader, sample.windows).value == pytest.approx(reader.value_error(), rel=0.3)


def test_xr_keeps_the_input(convert):
    model = read_gguf(convert(GOLDEN / "gptneox"))
    a = Attention.of(model)
    folded = fold_layers(convert(GOLDEN / "gptneox"), "xr", cache_type="f32")
    w_k, w_v = (model.tensor("blk.0.attn_qkv.weight").values().astype(np.float64)[i:][: a.kv_width].T
                for i in (a.q_width, a.q_width + a.kv_width))  # fmt: skip
    basis, k, v = (folded[f"blk.0.attn_xr_{part}.weight"].astype(np.float64).T for part in ("in", "k", "v"))
    assert relative(basis @ k, w_k) < 1e-5 and relative(basis @ v, w_v) < 1e-5
    assert relative(basis[:, : a.rotated_width], w_k[:, a.rotated]) < 1e-6
    rest = basis[:, a.rotated_width :]
    assert np.abs(rest.T @ rest - np.eye(rest.shape[1])).max() < 1e-6
    assert np.abs(rest.T @ w_k[:, a.rotated]).max() < 1e-6


def test_xr_of_dependent_columns_is_refused():
    w_k, w_v = projections_with(10.0)
    w_k[:, 1] = w_k[:, 0]
    weights = layer_of(w_k, w_v, n_heads=4, arch="gptneox")
    weights.model.metadata["gptneox.rope.dimension_count"] = type(weights.model.metadata["gptneox.block_count"])(
        8, weights.model.metadata["gptneox.block_count"].type
    )
    weights = type(weights)(weights.model, Attention.of(weights.model), 0)
    with pytest.raises(
        CacheUnsupportedError, match="'xr' is not possible in layer 0: the rotated columns.*here: kv, k"
    ):
        XrReader(Sample(weights, np.eye(D), [Window(weights, None, inputs(50))]), "f16", half=True)


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize(
    "name", ["llama_bias", "llama_gqa_tied", "gpt2_erf", "phi2", "olmo2", "llama_head_dim", "qwen3"]
)
def test_bytes_are_the_engine_s(name, convert):
    path = convert(GOLDEN / name)
    attention = Attention.of(read_gguf(path))
    for mode in attention.predictable():
        for type_name in CACHE_TYPES:
            usual = default_residual(mode, type_name, attention.kv_width)
            for rank, residual in {usual, (0, ""), (12, "q4")} if mode == "k+r" else {usual}:
                options = {"rank": rank, "residual_type": residual or "auto"} if mode == "k+r" else {}
                types = {"cache_type_k": type_name, "cache_type_v": type_name}
                said = _core.plan(str(path), n_ctx=32, cache=mode, **types, **options)
                stored = planes(attention, mode, type_name, rank, residual)
                assert bytes_per_token(stored) == said["layers"][0]["bytes_per_token"], (mode, type_name, rank)


def test_folding_at_load_takes_what_it_is_told(tiny):
    made = fold_layers(tiny, "k+r", cache_type="q8", rank=8, residual_type="q8", calibration="none", layers=[1])
    parts = ("k.weight", "out.weight", "row.scale", "v.scale", "v.weight", "x.weight")
    assert sorted(made) == [f"blk.1.attn_kr_{part}" for part in parts]
    assert {name for name, tensor in made.items() if tensor.dtype == np.float16} == {
        f"blk.1.attn_kr_{part}.weight" for part in ("k", "out", "v")
    }  # as a conversion
    with slimrt.Model(tiny, n_ctx=64, cache="k+r:q8:8:q8", calibration="none") as model:
        assert model.generate("the cat", max_tokens=4, ignore_eos=True).usage
    with pytest.raises(ValueError, match="rank must be from 0 to 32"):
        fold_layers(tiny, "k+r", rank=33)
