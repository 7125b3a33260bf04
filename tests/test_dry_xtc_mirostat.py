# SPDX-License-Identifier: Apache-2.0
"""DRY, XTC, top-n-sigma and mirostat beside NumPy in float64, written from their definitions."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimrt import _core
from test_sampler import ALL, ROWS, assert_follows, draws, row, softmax


def longest_repetitions(history: list[int], breakers: list[list[int]]) -> dict[int, int]:
    """For each token: the longest ending of the history, after its last breaker, that it followed on before."""
    since = 0
    for end in range(len(history) + 1):
        if any(history[max(end - len(b), 0) : end] == b for b in breakers):
            since = end
    found: dict[int, int] = {}
    for at in range(1, len(history)):
        length = 0
        while length < min(at, len(history) - since) and history[at - 1 - length] == history[-1 - length]:
            length += 1
        found[history[at]] = max(found.get(history[at], 0), length)
    return {token: length for token, length in found.items() if [token] not in breakers}


def dried(logits, history, breakers, multiplier, base, allowed, last_n):
    window = history if last_n < 0 else history[len(history) - min(last_n, len(history)) :]
    result = logits.astype(np.float64)
    for token, length in longest_repetitions(window, breakers).items():
        if length >= allowed:
            result[token] -= multiplier * base ** (length - allowed)
    return result


def greedy_order(sampler_options: dict, history: list[int], logits: np.ndarray) -> list[int]:
    """All tokens as a greedy sampler ranks them: each found is banned for the next."""
    order: list[int] = []
    for _ in range(len(logits)):
        sampler = _core.Sampler(temperature=0, logit_bias=[(token, -np.inf) for token in order], **sampler_options)
        sampler.accept(history)
        order.append(sampler.sample(logits))
    return order


TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    TEXTS,
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=2),
    st.sampled_from([(0.8, 1.75, 2), (0.3, 1.1, 1), (2.0, 1.0, 0), (5.0, 4.0, 3)]),
    st.sampled_from([-1, 0, 3, 12]),
)
def test_dry_takes_off_what_its_definition_says(history, breakers, numbers, last_n):
    multiplier, base, allowed = numbers
    logits = row(6, seed=len(history))
    options = {"dry_multiplier": multiplier, "dry_base": base, "dry_allowed_length": allowed,
               "dry_penalty_last_n": last_n, "dry_breakers": breakers}  # fmt: skip
    expected = dried(logits, history, breakers, multiplier, base, allowed, last_n)
    order = greedy_order(options, history, logits)
    assert all(expected[a] >= expected[b] - 1e-5 for a, b in zip(order, order[1:], strict=False))


def test_dry_stops_a_loop_and_a_breaker_lets_it_go_on():
    """1 2 3 came twice: 3 would make it a third time."""
    history, logits = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2], np.zeros(12, np.float32)
    logits[3] = 1

    def choice(**more):
        sampler = _core.Sampler(temperature=0, dry_multiplier=1.0, **more)
        for token in history:
            sampler.accept([token])
        return sampler.sample(logits)

    assert choice() == 0  # 6 tokens of repetition: 1 - 1.75^4
    logits[3] = 1.75**4 - 0.01
    assert choice() == 0
    logits[3] = 1.75**4 + 0.01
    assert choice() == 3
    logits[3] = 1
    assert choice(dry_allowed_length=7) == 3
    assert choice(dry_breakers=[[2]]) == 3 and choice(dry_breakers=[[1, 2]]) == 3
    assert choice(dry_breakers=[[3]]) == 3  # what breaks is never penalised
    assert choice(dry_breakers=[[9]]) == 0  # 1 2 has been seen since it
    assert choice(dry_penalty_last_n=5) == 3 and choice(dry_penalty_last_n=0) == 3


def test_dry_penalties_of_long_repetitions_stay_finite():
    sampler = _core.Sampler(temperature=0, dry_multiplier=1.0, dry_base=9.0)
    sampler.accept([4] * 5000)
    logits = np.zeros(6, np.float32)
    logits[4] = 30
    assert sampler.sample(logits) == 0
    assert sampler.sample(np.where(np.arange(6) == 4, np.float32(0), -np.inf).astype(np.float32)) == 4


def without_top_choices(p: np.ndarray, threshold: float) -> np.ndarray:
    tops = np.flatnonzero(p >= threshold)
    stays = [token for token in tops if p[token] == p[tops].min()][-1:]
    left = p.copy()
    left[np.setdiff1d(tops, stays)] = 0
    return left / left.sum()


@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.6])
@pytest.mark.parametrize("probability", [0.4, 1.0])
def test_xtc_leaves_the_top_choices_out_but_the_last(threshold, probability):
    logits = row(60, seed=11)
    p = softmax(logits)
    assert threshold > 0.3 or (p >= threshold).sum() >= 2
    sampler = _core.Sampler(temperature=1.0, seed=5, xtc_probability=probability, xtc_threshold=threshold, **ALL)
    counts = draws(sampler, logits, 8000)
    assert_follows(counts, probability * without_top_choices(p, threshold) + (1 - probability) * p)


def test_xtc_comes_after_the_filters_and_before_the_temperature():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    options = ALL | {"top_k": 3, "xtc_probability": 1.0, "xtc_threshold": 0.3}
    sampler = _core.Sampler(temperature=0.5, seed=1, **options)
    left = np.array([0, 0.3, 0.15, 0]) ** 2  # of 0.5, 0.3, 0.15 over 0.95 the first two are over 0.3
    assert_follows(draws(sampler, logits, 4000), left / left.sum())
    assert _core.Sampler(temperature=0, **options).sample(logits) == 0  # greedy takes the likeliest


def test_xtc_of_equal_tokens_leaves_one():
    sampler = _core.Sampler(temperature=1.0, seed=1, xtc_probability=1.0, xtc_threshold=0.0, **ALL)
    assert set(np.flatnonzero(draws(sampler, np.zeros(7, np.float32), 50))) == {6}
    some = np.full(300, -np.inf, np.float32)
    some[[5, 280]] = [1.0, 2.0]
    assert set(np.flatnonzero(draws(sampler, some, 50))) == {5}


@settings(max_examples=100, deadline=None)
@given(ROWS, st.sampled_from([0.3, 1.0, 2.5]))
def test_top_n_sigma_leaves_what_is_near_the_largest(logits, n):
    x = logits.astype(np.float64)
    left = np.zeros(len(x), bool)
    left[_core.ops.filter_logits(logits, top_n_sigma=n)] = True
    bound, tolerance = x.max() - n * x.std(), 1e-5 * (1 + np.abs(x).max())
    assert left[x > bound + tolerance].all() and not left[x < bound - tolerance].any()


def test_top_n_sigma_does_not_count_banned_tokens():
    logits = np.append(np.full(50, -np.inf), [0.0, 1.0, 2.0, 3.0]).astype(np.float32)
    assert list(_core.ops.filter_logits(logits, top_n_sigma=1.0)) == [52, 53]  # 3 - 1.118


class Mirostat:
    """The second algorithm of the paper, for one text."""

    def __init__(self, tau: float, eta: float):
        self.tau, self.eta, self.most = tau, eta, 2 * tau

    def left(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        p = softmax(logits.astype(np.float64) / temperature)
        surprise = -np.log2(np.maximum(p, 1e-300))
        p[(surprise > self.most) & (p < p.max())] = 0
        return p / p.sum()

    def chose(self, p: np.ndarray, token: int) -> None:
        assert p[token] > 0
        self.most -= self.eta * (-np.log2(p[token]) - self.tau)


@pytest.mark.parametrize(("tau", "eta", "temperature"), [(2.0, 0.3, 1.0), (5.0, 0.1, 0.7), (0.5, 0.9, 1.5)])
def test_mirostat_draws_from_what_its_bound_leaves(tau, eta, temperature):
    """Text after text, so that each step's choices are those of one bound: here of the fourth."""
    rows = [row(400, seed=i) for i in range(4)]
    counts, expected = np.zeros(400, int), np.zeros(400)
    for seed in range(1500):
        sampler = _core.Sampler(temperature=temperature, seed=seed, mirostat=2, mirostat_tau=tau, mirostat_eta=eta)
        reference = Mirostat(tau, eta)
        for logits in rows:
            token, p = sampler.sample(logits), reference.left(logits, temperature)
            reference.chose(p, token)
        counts[token] += 1
        expected += p
    assert_follows(counts, expected / expected.sum())


def test_mirostat_comes_to_the_surprise_that_is_asked_for():
    sampler, reference = _core.Sampler(temperature=1.0, seed=3, mirostat=2, mirostat_tau=3.0), Mirostat(3.0, 0.1)
    surprises = []
    for step in range(1500):
        logits = row(1000, seed=step)
        token = sampler.sample(logits)
        p = reference.left(logits, 1.0)
        surprises.append(-np.log2(p[token]))
        reference.chose(p, token)
    assert np.mean(surprises[200:]) == pytest.approx(3.0, abs=0.15)


def test_mirostat_takes_the_likeliest_where_its_bound_leaves_nothing():
    sampler, logits = _core.Sampler(temperature=1.0, seed=1, mirostat=2, mirostat_tau=0.0), row(50)
    assert [sampler.sample(logits) for _ in range(20)] == [logits.argmax()] * 20


def test_mirostat_s_bound_stays_a_number():
    """However fast it learns: after a surprise only the likeliest token is left, after that every token."""
    sampler, logits = _core.Sampler(temperature=1.0, seed=1, mirostat=2, mirostat_eta=1e308), row(300, scale=0.01)
    chosen = [sampler.sample(logits) for _ in range(40)]
    assert chosen[1::2] == [logits.argmax()] * 20
    assert len(set(chosen[::2])) > 10


def test_choices_are_the_same_on_every_machine():
    """A checksum of them; logits are exact multiples of 1/64."""
    rng, chosen = np.random.default_rng(2), list[int]()
    kinds = [{"dry_multiplier": 0.8, "dry_breakers": [[3], [4, 1]]}, {"xtc_probability": 0.5, "xtc_threshold": 0.01},
             {"top_n_sigma": 1.5}, {"mirostat": 2, "mirostat_tau": 3.0}]  # fmt: skip
    for n in (7, 256, 1000, 40000):
        logits = (rng.integers(-600, 600, n) / 64).astype(np.float32)
        for more in kinds:
            for seed in range(20):
                sampler = _core.Sampler(temperature=1.3, seed=seed, **ALL | more)
                sampler.accept([1, 5, 6, 2, 1, 5, 6, 2, 1, 5, 6])
                chosen += [sampler.sample(logits) for _ in range(6)]
    assert zlib.crc32(np.array(chosen, "<i4").tobytes()) == 881864522


@pytest.mark.parametrize(
    "options",
    [{"dry_multiplier": -1.0}, {"dry_multiplier": np.inf}, {"dry_base": 0.9}, {"dry_base": np.nan},
     {"dry_allowed_length": -1}, {"dry_penalty_last_n": -2}, {"top_n_sigma": -1.0}, {"top_n_sigma": np.inf},
     {"xtc_probability": 1.1}, {"xtc_probability": -0.1}, {"xtc_threshold": -0.1}, {"xtc_threshold": np.nan},
     {"mirostat": 1}, {"mirostat": 3}, {"mirostat_tau": -1.0}, {"mirostat_tau": np.inf}, {"mirostat_eta": -0.1}],
)  # fmt: skip
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        _core.Sampler(**options)
    with pytest.raises(ValueError, match="a sequence breaker has no tokens"):
        _core.Sampler(dry_breakers=[[]])
