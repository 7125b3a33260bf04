# SPDX-License-Identifier: Apache-2.0
"""Routing to experts and their products, for every instruction set and device, against NumPy and products of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import pytest

from conftest import DEVICES, ISAS, product_unit, relative
from reference import gated
from slimrt._core import ops
from test_kernels import NATIVE, PLAIN, on_devices
from weight_formats import dequantised, random_bytes

Biases = Sequence[np.ndarray]  # of gate, up and down: [experts, width]
WIDTH, INNER, EXPERTS, TAKEN = 256, 512, 7, 3


@lru_cache(maxsize=4)  # tests that follow each other mostly differ in tokens and instruction set
def networks(type_name: str, width: int, inner: int) -> list[list[np.ndarray]]:
    """Bytes of gate, up and down, of each expert."""
    shapes = ((inner, width), (inner, width), (width, inner))
    return [
        [random_bytes(type_name, rows, cols, seed=10 * expert + part) for expert in range(EXPERTS)]
        for part, (rows, cols) in enumerate(shapes)
    ]


class Call:
    """x, the weights of EXPERTS networks in a type, and what tokens take."""

    def __init__(self, type_name: str, tokens: int, width: int = WIDTH, inner: int = INNER):
        random = np.random.default_rng(tokens)
        self.type, self.inner = type_name, inner
        self.x = random.normal(size=(tokens, width)).astype(np.float32)
        self.raw = networks(type_name, width, inner)
        self.ids = np.stack([random.permutation(EXPERTS)[:TAKEN] for _ in range(tokens)]).astype(np.int32)
        self.shares = random.random(size=(tokens, TAKEN)).astype(np.float32)

    @cached_property
    def values(self) -> list[list[np.ndarray]]:
        return [[dequantised(raw, self.type) for raw in part] for part in self.raw]

    def run(
        self,
        isa: str,
        threads: int = 1,
        kind: str = "silu",
        biases: Biases = (),
        scale: np.ndarray | None = None,
        together: bool = False,
    ) -> np.ndarray:
        """together: gate and up are one tensor."""
        gate, up, down = self.raw
        parts = [[part for both in zip(gate, up, strict=True) for part in both], down] if together else self.raw
        weights = [(np.concatenate([raw.reshape(-1) for raw in part]), self.type) for part in parts]
        call = (kind, self.x, weights, EXPERTS, self.inner, self.ids, self.shares, isa, threads, biases, scale)
        return np.asarray(ops.experts(*call))

    def one_by_one(self, isa: str) -> np.ndarray:
        """Each expert's products of its own tokens."""
        out = np.zeros(self.x.shape)
        for expert in range(EXPERTS):
            tokens, choices = np.nonzero(self.ids == expert)
            if len(tokens) == 0:
                continue
            gate, up, down = (part[expert].reshape(-1) for part in self.raw)
            rows, shape = self.x[tokens], (self.inner, None, isa, 1)
            inner = ops.gate(
                "silu", ops.linear(rows, gate, self.type, *shape), ops.linear(rows, up, self.type, *shape), isa
            )
            of_tokens = ops.linear(inner, down, self.type, self.x.shape[1], None, isa, 1)
            np.add.at(out, tokens, self.shares[tokens, choices, None] * of_tokens.astype(np.float64))
        return out

    def exact(self, kind: str = "silu", biases: Biases = ()) -> np.ndarray:
        out, x = np.zeros(self.x.shape), self.x.astype(np.float64)
        of_gate, of_up, of_down = biases or (np.zeros((EXPERTS, 1)),) * 3
        for token, (ids, shares) in enumerate(zip(self.ids, self.shares, strict=True)):
            for expert, share in zip(ids, shares, strict=True):
                gate, up, down = (part[expert] for part in self.values)
                inner = gated(kind, gate @ x[token] + of_gate[expert], up @ x[token] + of_up[expert])
                out[token] += share * (down @ inner + of_down[expert])
        return out


def allowed_of(type_name: str, tokens: int, isa: str) -> float:
    allowed = 1e-5 + (1e-4 if isa == "cuda" and type_name != "f32" else 0)  # a GPU splits x into parts of 16 bits
    if type_name != "f32" and tokens == 64:
        allowed += 2e-3  # the CPU rounds both to 14 bits where there are many tokens, a GPU x to f16
        allowed += 2e-3 if (isa, type_name) == ("cuda", "bf16") else 0  # or bf16
    return allowed


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("type_name", PLAIN)
def test_experts_of_plain_types(type_name, tokens, isa):
    call = Call(type_name, tokens, width=52, inner=90)
    assert relative(call.run(isa), call.exact()) < allowed_of(type_name, tokens, isa)


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize(("type_name", "isa"), on_devices(["f16", *NATIVE]))
def test_experts_are_what_products_of_each_one_are(type_name, tokens, isa):
    call = Call(type_name, tokens)
    assert relative(call.run(isa), call.one_by_one(isa)) < 1e-5 + 8 * product_unit(isa, type_name)


# Many tokens of an expert take the code of all types, but for how these are unpacked: a type of each kind has them.
@pytest.mark.slow_emulated
@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q4_k", "q6_k", "iq3_s_n"])
def test_many_tokens_of_experts_are_too(type_name, isa):
    call = Call(type_name, 300)
    assert relative(call.run(isa), call.one_by_one(isa)) < 1e-5 + 8 * product_unit(isa, type_name)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("chosen", [[2, 2, 2], [5, 0, 5]])
def test_experts_that_nobody_takes_and_one_that_all_take(chosen, isa):
    call = Call("q8_0", 20)
    call.ids[:] = chosen
    assert relative(call.run(isa), call.one_by_one(isa)) < 1e-5 + 8 * product_unit(isa, "q8_0")


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("kind", ["silu", "clamped_swish"])
@pytest.mark.parametrize("type_name", ["f32", "f16"])
def test_experts_with_biases(type_name, kind, tokens, isa):
    """As gpt-oss has them, with its activation: gate and up have sizes that are clamped."""
    call = Call(type_name, tokens, width=52, inner=90)
    random = np.random.default_rng(tokens)
    sizes = ((6, 90), (6, 90), (300, 52))
    biases = [(scale * random.normal(size=(EXPERTS, n))).astype(np.float32) for scale, n in sizes]
    allowed = allowed_of(type_name, tokens, isa)
    assert relative(call.run(isa, 1, kind, biases), call.exact(kind, biases)) < allowed
    assert relative(call.run(isa, 1, kind), call.exact(kind, biases)) > 0.1


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("type_name", ["f32", "f16", "q4_k"])
def test_experts_with_gate_and_up_together_and_scales(type_name, tokens, isa):
    """As Gemma 4 has them: the same bits, but for scales."""
    call = Call(type_name, tokens, **({"width": 52, "inner": 90} if type_name in PLAIN else {}))
    assert np.array_equal(call.run(isa, together=True), call.run(isa))
    scale = np.linspace(0.5, 2, EXPERTS).astype(np.float32)
    scaled = call.run(isa, scale=scale, together=True)
    call.shares *= scale[call.ids]
    assert relative(scaled, call.run(isa)) < 1e-6
    assert relative(scaled, call.run(isa, scale=scale)) > 1e-2


@pytest.mark.parametrize("type_name", ["f32", "q4_k"])
@pytest.mark.parametrize("isa", ISAS)
def test_threads_do_not_change_a_bit(isa, type_name):
    call = Call(type_name, 33)
    one = call.run(isa, 1)
    assert all(np.array_equal(call.run(isa, threads), one) for threads in (2, 3))


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize(("n", "taken"), [(1, 1), (7, 3), (64, 8), (128, 8), (1000, 1000)])
def test_route(n, taken, renormalised, isa):
    scores = 3 * np.random.default_rng(n).normal(size=(19, n)).astype(np.float32)
    ids, shares = ops.route(scores, taken, renormalised, 2.5, isa)
    p = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :taken]
    wanted = np.take_along_axis(p, best, axis=1)
    if renormalised:
        wanted /= wanted.sum(axis=1, keepdims=True)
    assert np.array_equal(ids, best)
    np.testing.assert_allclose(shares, 2.5 * wanted, rtol=1e-5, atol=1e-30)


def chosen(scores: np.ndarray, taken: int, groups: tuple[int, int] = (1, 1), best: int = 1) -> np.ndarray:
    """The experts of the highest scores, of the groups whose `best` highest scores have the highest sum."""
    of_groups = scores.reshape(len(scores), groups[0], -1)
    order = np.argsort(-np.sort(of_groups, axis=2)[:, :, -best:].sum(axis=2), axis=1, kind="stable")
    left = np.full(of_groups.shape, -np.inf)
    for token, some in enumerate(order[:, : groups[1]]):
        left[token, some] = of_groups[token, some]
    return np.argsort(-left.reshape(scores.shape), axis=1, kind="stable")[:, :taken]


ROUTERS = [(7, 3, (1, 1)), (64, 6, (8, 3)), (256, 8, (8, 4)), (66, 9, (22, 3)), (64, 4, (32, 2)), (12, 4, (2, 1))]


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("n", "taken", "groups"), ROUTERS)
def test_route_by_sigmoids_a_bias_and_groups(n, taken, groups, sigmoid, biased, isa):
    """As DeepSeek-V2 (the best of a group) and V3 (the sum of its two best sigmoids) do; no share has the bias."""
    random = np.random.default_rng(n)
    scores = 2 * random.normal(size=(19, n)).astype(np.float32)
    bias = (0.3 * random.normal(size=(1, n))).astype(np.float32) if biased else None
    p = np.exp(scores.astype(np.float64))
    p = p / (1 + p) if sigmoid else p / p.sum(axis=1, keepdims=True)
    best = chosen(p + (bias if biased else 0), taken, groups, 2 if sigmoid else 1)
    wanted = np.take_along_axis(p, best, axis=1)
    for renormalised in (False, True):
        ids, shares = ops.route(scores, taken, renormalised, 2.5, isa, sigmoid, bias, groups)
        assert np.array_equal(ids, best)
        total = wanted.sum(axis=1, keepdims=True) if renormalised else 1
        np.testing.assert_allclose(shares, 2.5 * wanted / total, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize(("n", "taken"), [(2, 2), (16, 2), (70, 5)])
def test_route_by_sparse_mixer(n, taken, isa):
    """As Phi-3.5-MoE does, with scores of both signs: of each in turn a softmax over those left that are near it."""
    scores = np.random.default_rng(n).normal(size=(19, n)).astype(np.float32)
    scores[:4] -= 9  # the largest is negative
    near = 0.3
    ids, shares = ops.route(scores, taken, False, 1.0, isa, near=near)
    for row, (s, best) in enumerate(zip(scores.astype(np.float64), chosen(scores, taken), strict=True)):
        assert ids[row].tolist() == best.tolist()
        left = np.ones(n, bool)
        for place, one in enumerate(best):
            among = left & ((s[one] - s) / np.maximum(abs(s), s[one]) <= near)
            np.testing.assert_allclose(shares[row, place], 1 / np.exp(s[among] - s[one]).sum(), rtol=1e-5)
            left[one] = False
    _, of_all = ops.route(scores, taken, False, 1.0, isa)
    assert not np.allclose(shares, of_all, rtol=1e-2)


@pytest.mark.parametrize("isa", DEVICES)
def test_of_equal_groups_the_first_one_is_taken_and_of_none_the_last(isa):
    scores = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1], [np.nan, 9, np.nan, 8, 0, 0]], np.float32)
    ids, _ = ops.route(scores, 2, True, 1.0, isa, True, None, (3, 2))
    assert ids.tolist() == [[0, 1], [2, 5], [1, 4]]
    ids, _ = ops.route(scores, 3, True, 1.0, isa, True, None, (3, 2))
    assert ids.tolist() == [[0, 1, 2], [2, 5, 3], [1, 4, 5]]


@pytest.mark.parametrize("isa", DEVICES)
def test_shares_of_nothing_are_nothing(isa):
    """Sigmoids that are zero in float32, of which no share can be made."""
    ids, shares = ops.route(np.full((2, 4), -200, np.float32), 2, True, 1.0, isa, True)
    assert ids.tolist() == [[0, 1], [0, 1]] and not shares.any()


@pytest.mark.parametrize("isa", DEVICES)
def test_of_equal_scores_the_first_one_is_taken_and_of_none_the_last(isa):
    scores = np.array([[1, 2, 2, 1, 2], [0, 0, 0, 0, 0], [np.nan, -1, np.nan, 1, -2]], np.float32)
    ids, shares = ops.route(scores, 4, False, 1.0, isa)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [3, 1, 4, 0]]
    np.testing.assert_allclose(shares[1], 0.2, rtol=1e-6)
    assert np.isnan(shares[2]).all()


def test_route_takes_no_more_than_there_are():
    for n, taken in ((4, 5), (4, 0), (1025, 1)):
        with pytest.raises(ValueError, match="cannot be taken"):
            ops.route(np.zeros((1, n), np.float32), taken, False, 1.0, ISAS[0])
    for groups, taken in (((3, 1), 1), ((4, 5), 1), ((4, 0), 1), ((4, 2), 5), ((0, 0), 1)):
        with pytest.raises(ValueError, match="cannot be taken from"):
            ops.route(np.zeros((1, 8), np.float32), taken, False, 1.0, ISAS[0], groups=groups)
    with pytest.raises(ValueError, match="a bias for each"):
        ops.route(np.zeros((1, 8), np.float32), 1, False, 1.0, ISAS[0], bias=np.zeros((1, 7), np.float32))


@pytest.mark.parametrize("isa", DEVICES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 40), (3, 7), (4, 16)])
def test_gate_heads(heads, dim, isa):
    random = np.random.default_rng(dim)
    x = random.normal(size=(5, heads * dim)).astype(np.float32)
    by = 4 * random.normal(size=(5, heads)).astype(np.float32)
    wanted = x / (1 + np.exp(-np.repeat(by.astype(np.float64), dim, axis=1)))
    np.testing.assert_allclose(ops.gate_heads(x, by, isa), wanted, rtol=1e-6, atol=1e-30)
