# SPDX-License-Identifier: Apache-2.0
"""The identities of docs/cache-math.md section 1 hold in the reference itself, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conftest import GOLDEN, relative
from reference import Reference
from reference_files import load
from reference_formats import rounded
from reference_rope import Rope, yarn

pytestmark = pytest.mark.unsanitized  # NumPy alone

EXACT = 1e-9
MHA_ROPE = ["llama_mha", "llama_bias", "qwen2_mha", "llama_wide", "llama_yarn", "llama_gqa_wide", "mistral_mha"]
MHA_ROPE += ["gptneox", "gptneox_sequential", "phi2"]  # a part of each head turns
MHA_NO_ROPE = ["gpt2_tanh", "gpt2_erf"]
IDS = np.random.default_rng(0).integers(3, 100, 40)


def weights(name: str):
    return load(GOLDEN / name)


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("name", MHA_ROPE + MHA_NO_ROPE)
def test_k_equals_kv(name, absorbed):
    model = Reference(weights(name))
    assert relative(model.logits_cached(IDS, 24, "k", absorbed=absorbed), model.logits(IDS)) < EXACT


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("mode", ["v", "x"])
@pytest.mark.parametrize("name", MHA_NO_ROPE)
def test_v_and_x_equal_kv_without_rope(name, mode, absorbed):
    model = Reference(weights(name))
    assert relative(model.logits_cached(IDS, 24, mode, absorbed=absorbed), model.logits(IDS)) < EXACT


def test_x_needs_no_inverse_so_any_head_count_will_do():
    w = weights("llama_gqa_tied")
    model = Reference(replace(w, layers=[replace(layer, rope=None) for layer in w.layers]))
    assert model.w.n_kv_heads < model.w.n_heads
    assert relative(model.logits_cached(IDS, 24, "x"), model.logits(IDS)) < EXACT


def test_modes_may_differ_by_layer():
    model = Reference(weights("gpt2_erf"))
    assert relative(model.logits_cached(IDS, 24, ["v", "k", "x"]), model.logits(IDS)) < EXACT


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
def test_cached_in_chunks_equals_all_at_once(name, convert):
    model = Reference(convert(GOLDEN / name))
    assert relative(model.logits_cached(IDS, 30, model.baseline, n_batch=7), model.logits(IDS)) < EXACT


@pytest.mark.parametrize(("e", "d"), [(16, 16), (24, 16), (40, 8)])
def test_right_inverse_recovers_v(e, d):
    random = np.random.default_rng(1)
    model = Reference(weights("llama_mha"))
    w_k, w_v, x = random.normal(size=(d, e)), random.normal(size=(d, e)), random.normal(size=(5, d))
    w_kv = model._derive("test", 0, w_k, w_v)
    assert w_kv.shape == (e, e)
    assert relative((x @ w_k) @ w_kv, x @ w_v) < EXACT


def test_v_is_not_a_function_of_k_for_gqa():
    with pytest.raises(AssertionError, match="not recoverable"):
        Reference(weights("llama_gqa_tied")).w_kv(0)


def test_k_bias_matters_with_rope_and_not_without():
    rope, plain = weights("qwen2_mha"), weights("gpt2_tanh")
    for w, matters in ((rope, True), (plain, False)):
        without = replace(w, layers=[replace(layer, bk=None) for layer in w.layers])
        difference = relative(Reference(without).logits(IDS), Reference(w).logits(IDS))
        assert difference > 1e-2 if matters else difference < EXACT


def test_v_bias_folds_into_the_output_bias():
    w = weights("llama_bias")
    folded = [replace(x, bv=None, bo=x.bo + x.wo @ x.bv) for x in w.layers]
    assert relative(Reference(replace(w, layers=folded)).logits(IDS), Reference(w).logits(IDS)) < EXACT


def test_interleaved_and_neox_rope_are_a_permutation_of_rows():
    w = weights("llama_bias")

    def permuted(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(w.n_heads, 2, -1, *rows.shape[1:])  # (first half, second half) of each head
        return np.swapaxes(heads, 1, 2).reshape(rows.shape)

    turned = [replace(x, rope=replace(x.rope, interleaved=True)) for x in w.layers]
    layers = [replace(x, wq=permuted(x.wq), wk=permuted(x.wk), bq=permuted(x.bq), bk=permuted(x.bk)) for x in turned]
    other = Reference(replace(w, layers=layers))
    assert relative(other.logits(IDS), Reference(w).logits(IDS)) < EXACT
    unpermuted = Reference(replace(w, layers=turned))
    assert relative(unpermuted.logits(IDS), Reference(w).logits(IDS)) > 1e-2


def test_rope_turns_and_depends_on_distance_only():
    random = np.random.default_rng(2)
    q, k = random.normal(size=(2, 1, 1, 8))
    for interleaved in (True, False):
        rope = Rope(10000.0 ** (-np.arange(0, 6, 2) / 6), interleaved)
        scores = [(rope(q, np.array([p + 3])) * rope(k, np.array([p]))).sum() for p in (0, 50, 3000)]
        assert np.ptp(scores) < 1e-11
        assert np.array_equal(rope(q, np.array([9]))[..., 6:], q[..., 6:])  # n_rot < head_dim: the rest stays


def test_window_hides_older_rows():
    w = weights("mistral_window")
    assert [layer.window for layer in w.layers] == [13, 13]
    ids = IDS.copy()
    before = Reference(w).logits(ids)[-1]
    # Two layers: a token reaches 2 * 12 positions ahead, not one more.
    ids[-1 - 25] += 1
    assert np.array_equal(Reference(w).logits(ids)[-1], before)
    ids[-1 - 24] += 1
    assert not np.array_equal(Reference(w).logits(ids)[-1], before)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    inv_freq = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    scaled = yarn(inv_freq, 4.0, 4096, 10000.0, 32, 1)
    assert scaled[0] == inv_freq[0] and scaled[-1] == inv_freq[-1] / 4
    assert (np.diff(inv_freq / scaled) >= 0).all()
    assert np.allclose(yarn(inv_freq, 1.0, 4096, 10000.0, 32, 1), inv_freq)


def test_rounded_types():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -3.14159265, 1e-30, 65504.0])
    bf16 = rounded(x, "bf16")
    assert bf16[0] == 1 and bf16[1] == 1 + 2**-6  # halfway cases go to even
    assert abs(bf16[2] + 3.140625) < 1e-12
    assert np.array_equal(rounded(x, "f16"), x.astype(np.float16).astype(np.float64))
    assert np.array_equal(rounded(x, None), x)
    for dtype in ("f32", "f16", "bf16"):
        assert np.array_equal(rounded(rounded(x, dtype), dtype), rounded(x, dtype))


def test_fold_amplifies_rounding_and_x_does_not():
    """Section 2: the error of K-only follows the spectrum of W_K; x stores without an inverse."""
    model = Reference(weights("gpt2_erf"))
    exact = model.logits(IDS)
    error = {mode: relative(model.logits_cached(IDS, 8, mode, "f16"), exact) for mode in ("kv", "k", "x")}
    assert error["k"] > 3 * error["x"] and error["x"] < 3 * error["kv"]
