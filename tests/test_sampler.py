# SPDX-License-Identifier: Apache-2.0
"""The sampler beside NumPy in float64: distribution, filters, penalties, ties, masks, logprobs, odd rows."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import joint
from slimrt import _core
from slimrt.errors import ModelFormatError
from slimrt.plumbing.numbers import log_softmax

ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits))


def row(n: int, seed: int = 0, scale: float = 2.5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def draws(sampler: _core.Sampler, logits: np.ndarray, n: int) -> np.ndarray:
    return np.bincount([sampler.sample(logits) for _ in range(n)], minlength=len(logits))


def assert_follows(counts: np.ndarray, p: np.ndarray) -> None:
    """Pearson's chi-square, five deviations of it above its mean; no count where p is 0. Rare tokens count as one."""
    assert not counts[p == 0].any()
    expected = p * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    freedom = np.count_nonzero(expected) - 1
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_draws_follow_the_distribution(n, temperature):
    logits = row(n)
    sampler = _core.Sampler(temperature=temperature, seed=3, **ALL)
    assert_follows(draws(sampler, logits, 8000), softmax(logits.astype(np.float64) / temperature))


@pytest.mark.parametrize(
    "options", [{"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.6}, {"top_k": 50, "top_p": 0.7}]
)
def test_draws_follow_what_filters_leave(options):
    logits, temperature = row(600, seed=5), 1.7
    left = _core.ops.filter_logits(logits, **options)
    p = np.zeros(len(logits))
    p[left] = softmax(logits[left].astype(np.float64) / temperature)
    assert 0 < len(left) < len(logits)
    assert_follows(draws(_core.Sampler(temperature=temperature, seed=3, **ALL | options), logits, 6000), p)


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-6])
def test_the_coldest_temperatures_draw_the_likeliest(temperature):
    logits = row(1000)
    assert _core.Sampler(temperature=temperature, seed=1, **ALL).sample(logits) == logits.argmax()


def test_zero_temperature_is_greedy_and_takes_the_first_of_equals():
    logits = row(1000)
    assert _core.Sampler(temperature=0).sample(logits) == logits.argmax()
    logits[[700, 333, 900]] = 50
    assert _core.Sampler(temperature=0).sample(logits) == 333


def test_a_seed_repeats_and_seeds_differ():
    logits = row(1000)
    texts = [[s.sample(logits) for _ in range(5)] for s in (_core.Sampler(seed=seed, **ALL) for seed in (1, 1, 2))]
    assert texts[0] == texts[1] != texts[2]


def test_choices_are_the_same_on_every_machine():
    """A checksum of them; logits are exact multiples of 1/64."""
    rng, chosen = np.random.default_rng(1), list[int]()
    for n in (7, 256, 1000, 40000):
        logits = (rng.integers(-600, 600, n) / 64).astype(np.float32)
        for more in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"typical_p": 0.5}, {"top_k": 300}):
            for seed in range(20):
                sampler = _core.Sampler(
                    temperature=1.3, repeat_penalty=1.1, seed=seed, frequency_penalty=0.3, **ALL | more
                )
                sampler.accept([1, 5, 5, 6])
                chosen += [sampler.sample(logits) for _ in range(3)]
    assert zlib.crc32(np.array(chosen, "<i4").tobytes()) == 957401429


@pytest.mark.parametrize(("temperature", "checksum"), [(1.0, 1750020062), (0.7, 425820235)])
def test_exponentials_are_precise_and_the_same_on_every_machine(temperature, checksum):
    logits = (np.random.default_rng(1).integers(-6000, 600, 5000) / 64).astype(np.float32)
    p, sums = _core.ops.row_exponentials(logits, temperature)
    shifted = (logits.astype(np.float64) - logits.max()) / temperature
    np.testing.assert_allclose(p, np.where(shifted < -87, 0, np.exp(shifted)), rtol=2e-5 if temperature != 1 else 2e-7)
    np.testing.assert_allclose(sums, [p[at : at + 256].sum(dtype=np.float64) for at in range(0, 5000, 256)], rtol=1e-14)
    assert zlib.crc32(p.astype("<f4").tobytes() + sums.astype("<f8").tobytes()) == checksum


def ordered(score: np.ndarray) -> np.ndarray:
    """Places from the largest on, the lower of equals first."""
    return np.argsort(-score, kind="stable")


def assert_reaches(left: np.ndarray, order: np.ndarray, p: np.ndarray, share: float) -> None:
    """left are the first of this order whose p adds up to the share, and no more, but for rounding."""
    assert sorted(order[: len(left)]) == list(left)
    mass = p[order[: len(left)]].sum()
    assert mass >= share - 1e-6 and mass - p[order[len(left) - 1]] <= share + 1e-6


ROWS = st.builds(
    lambda n, seed, scale, step: np.round(row(n, seed, scale) / step) * np.float32(step),
    st.sampled_from([1, 2, 5, 100, 256, 300, 3000]),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    st.sampled_from([2**-20, 0.5, 4.0]),  # coarse ones have many ties
)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(1, 400))
def test_top_k_leaves_the_k_largest(logits, k):
    assert list(_core.ops.filter_logits(logits, top_k=k)) == sorted(ordered(logits)[:k])


@settings(max_examples=100, deadline=None)
@given(ROWS, st.floats(0.001, 0.9999))
def test_top_p_leaves_the_fewest_that_reach_it(logits, share):
    assert_reaches(_core.ops.filter_logits(logits, top_p=share), ordered(logits), softmax(logits), share)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.floats(0.001, 1))
def test_min_p_leaves_what_is_near_the_likeliest(logits, share):
    ratio, left = np.exp(logits.astype(np.float64) - logits.max()), _core.ops.filter_logits(logits, min_p=share)
    inside = np.zeros(len(logits), bool)
    inside[left] = True
    assert inside[ratio > share * (1 + 1e-5)].all() and not inside[ratio < share * (1 - 1e-5)].any()


@settings(max_examples=100, deadline=None)
@given(ROWS, st.floats(0.001, 0.9999))
def test_typical_leaves_what_is_nearest_to_the_entropy(logits, share):
    p = softmax(logits)
    surprise = logits.max().astype(np.float64) - logits
    distance = np.abs(surprise - (p * surprise).sum())
    left = _core.ops.filter_logits(logits, typical_p=share)
    inside = np.zeros(len(logits), bool)
    inside[left] = True
    border = distance[left].max()  # of those that are as near, rounding decides
    tolerance = 1e-5 * (1 + surprise.max())
    assert inside[distance < border - tolerance].all() and not inside[distance > border + tolerance].any()
    assert p[left].sum() >= share - 1e-6
    assert p[distance < border - tolerance].sum() <= share + 1e-6


@settings(max_examples=50, deadline=None)
@given(ROWS, st.integers(1, 400), st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(0.001, 0.5))
def test_filters_work_on_what_those_before_them_left(logits, k, typical, top, least):
    left = np.arange(len(logits))
    for option in ({"top_k": k}, {"typical_p": typical}, {"top_p": top}, {"min_p": least}):
        left = left[_core.ops.filter_logits(logits[left], **option)]
    together = _core.ops.filter_logits(logits, top_k=k, typical_p=typical, top_p=top, min_p=least)
    assert list(together) == list(left)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("option", "warper"),
    [("top_k", "TopK"), ("top_p", "TopP"), ("min_p", "MinP"), ("typical_p", "Typical")],
)
def test_filters_are_transformers(option, warper):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    random = np.random.default_rng(6)
    for seed in range(40):
        logits = row(int(random.integers(2, 3000)), seed, random.choice([0.3, 1, 3, 8]))
        share = int(random.integers(1, len(logits))) if option == "top_k" else float(random.uniform(0.01, 0.99))
        left = getattr(transformers, f"{warper}LogitsWarper")(share)(None, torch.tensor(logits)[None])[0].numpy()
        assert list(_core.ops.filter_logits(logits, **{option: share})) == list(np.flatnonzero(np.isfinite(left)))


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"typical_p": 0.6}])
def test_of_equal_tokens_those_with_lower_ids_are_left(options):
    assert list(_core.ops.filter_logits(np.zeros(5, np.float32), **options)) == [0, 1, 2]
    signs = np.array([0.0, -0.0, 0.0, -0.0, 0.0], np.float32)
    assert list(_core.ops.filter_logits(signs, **options)) == [0, 1, 2]


@pytest.mark.parametrize("options", [{"top_k": 300}, {"top_p": 0.99}, {"typical_p": 0.99}, {"min_p": 1e-30}])
def test_tokens_without_a_probability_are_never_drawn(options):
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 300, 999]] = [1.0, 2.0, 1.5]
    assert set(np.flatnonzero(draws(_core.Sampler(seed=1, **ALL | options), logits, 200))) <= {3, 300, 999}


def test_large_logits_are_fine():
    logits = np.array([3e38, -3e38, 2.9e38, 3e38] * 100, np.float32)
    for options in ({"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.5}, {"top_k": 150}, {}):
        counts = draws(_core.Sampler(temperature=1.0, seed=2, **ALL | options), logits, 50)
        assert set(np.flatnonzero(counts) % 4) <= {0, 3}


def penalised(logits: np.ndarray, history: list[int], repeat: float, frequency: float, presence: float) -> np.ndarray:
    result = logits.astype(np.float64)
    for token in set(history):
        result[token] = result[token] / repeat if result[token] > 0 else result[token] * repeat
        result[token] -= history.count(token) * frequency + presence
    return result


@pytest.mark.parametrize("penalties", [(1.3, 0, 0), (1, 0.7, 0), (1, 0, 1.5), (1.2, 0.5, -0.4), (0.8, 0, 0)])
@pytest.mark.parametrize("last_n", [-1, 0, 1, 3, 64])
def test_penalties_count_what_was_accepted_last(penalties, last_n):
    logits, history = row(12, seed=4), [3, 5, 5, 1, 5, 3, 9, 11, 9]
    options = dict(zip(("repeat_penalty", "frequency_penalty", "presence_penalty"), penalties, strict=True))
    at_once = _core.Sampler(temperature=1.0, seed=8, repeat_last_n=last_n, **ALL, **options)
    at_once.accept(history)
    one_by_one = _core.Sampler(temperature=1.0, seed=8, repeat_last_n=last_n, **ALL, **options)
    for token in history:
        one_by_one.accept([token])
    window = history if last_n < 0 else history[len(history) - min(last_n, len(history)) :]
    counts = draws(at_once, logits, 6000)
    assert (counts == draws(one_by_one, logits, 6000)).all()
    assert_follows(counts, softmax(penalised(logits, window, *penalties)))


def test_penalties_come_after_the_bias_and_before_the_choice():
    sampler = _core.Sampler(temperature=0, repeat_penalty=2.0, logit_bias=[(1, 1.0)])
    logits = np.array([2.0, 1.5, 0.9], np.float32)
    assert sampler.sample(logits) == 1  # 2, 2.5, 0.9
    sampler.accept([1, -1, 3, 999])  # the others are no tokens of this vocabulary
    assert sampler.sample(logits) == 0  # 2, 1.25, 0.9
    sampler.accept([0])
    assert sampler.sample(logits) == 1  # 1, 1.25, 0.9


def test_bias_bans_and_forces():
    logits = row(100)
    assert _core.Sampler(seed=1, logit_bias=[(7, 1000.0)]).sample(logits) == 7
    banned = [(token, -np.inf) for token in range(100) if token not in (4, 6)]
    sampler = _core.Sampler(temperature=1, seed=1, logit_bias=banned, **ALL)
    assert set(np.flatnonzero(draws(sampler, logits, 200))) == {4, 6}


def words_of(allowed: np.ndarray) -> np.ndarray:
    bits = np.packbits(allowed, bitorder="little")
    return np.append(bits, np.zeros(-len(bits) % 4, np.uint8)).view("<u4").astype(np.uint32)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 700])
def test_masks_leave_only_what_they_allow(n):
    logits, allowed = row(n), np.random.default_rng(n).random(n) < 0.3
    allowed[n - 1] = True
    p = np.where(allowed, softmax(logits), 0)
    sampler = _core.Sampler(temperature=1, seed=1, **ALL)
    counts = np.bincount([sampler.sample(logits, words_of(allowed)) for _ in range(4000)], minlength=n)
    assert_follows(counts, p / p.sum())


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        ([], ValueError, "no logits"),
        ([-np.inf] * 300, ValueError, "every logit is -infinity"),
        ([0.0, np.nan], ModelFormatError, "NaN"),
        ([0.0] * 299 + [np.nan] + [0.0] * 300, ModelFormatError, "NaN"),
        ([-np.inf, np.nan], ModelFormatError, "NaN"),
        ([0.0, np.inf], ModelFormatError, r"\+infinity"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_are_told_and_draw_nothing(logits, error, message, temperature):
    sampler, other = (_core.Sampler(temperature=temperature, seed=1, **ALL) for _ in range(2))
    with pytest.raises(error, match=message):
        sampler.sample(np.array(logits, np.float32))
    assert sampler.sample(row(500)) == other.sample(row(500))
    if logits:
        with pytest.raises(error, match=message):
            _core.token_logprobs(np.array(logits, np.float32), 0)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -0.1}, {"temperature": np.inf}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1},
     {"min_p": 1.1}, {"typical_p": 0.0}, {"typical_p": 1.5}, {"repeat_penalty": 0.0}, {"repeat_penalty": 9e-7},
     {"repeat_penalty": np.inf}, {"frequency_penalty": np.inf}, {"presence_penalty": np.nan}, {"repeat_last_n": -2},
     {"logit_bias": [(-1, 0.0)]}, {"logit_bias": [(1, np.inf)]}, {"logit_bias": [(1, np.nan)]}],
)  # fmt: skip
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        _core.Sampler(**options)


def test_biases_and_masks_for_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="logit_bias names token 9, the vocabulary has 9"):
        _core.Sampler(logit_bias=[(9, 1.0)]).sample(row(9))
    with pytest.raises(ValueError, match="a mask for 33 tokens needs 2 words of 32 bits, it has 1"):
        _core.Sampler().sample(row(33), np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="masks must be uint32"):
        _core.Sampler().sample(row(33), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="every logit is -infinity"):
        _core.Sampler().sample(row(33), np.zeros(2, np.uint32))


@pytest.mark.parametrize("n", [1, 7, 300, 5000])
def test_logprobs_are_those_of_the_row(n):
    logits = row(n)
    logits[n // 2] = -np.inf if n > 1 else 0
    logits[: n // 3 : 5] = 1.25  # ties
    expected = log_softmax(logits)
    for token in (0, n - 1, n // 2):
        logprob, top = _core.token_logprobs(logits, token, 20)
        assert logprob == pytest.approx(expected[token], abs=1e-5)
        assert [id for id, _ in top] == list(ordered(logits)[:20])
        np.testing.assert_allclose([p for _, p in top], expected[ordered(logits)[:20]], atol=1e-5)
    assert _core.token_logprobs(logits, 0) == (_core.token_logprobs(logits, 0, 1)[0], [])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        _core.token_logprobs(logits, n)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_rows_are_sampled_as_if_each_were_alone(tiny, n_threads):
    engine = _core.Engine(str(tiny), n_ctx=32, n_threads=n_threads)
    options = [{"top_k": 0}, {"top_p": 0.5, "top_k": 0}, {"typical_p": 0.4}, {"repeat_penalty": 1.5},
               {"temperature": 0}, {"logit_bias": [(3, 5.0)]}] * 3  # fmt: skip
    logits = np.stack([row(5000, seed=i) for i in range(len(options))])
    masks = np.random.default_rng(2).integers(1, 2**32, (len(options), 157), dtype=np.uint32)
    counts = [i % 4 for i in range(len(options))]
    alone, together = ([_core.Sampler(seed=i, **one) for i, one in enumerate(options)] for _ in range(2))
    for sampler in alone + together:
        sampler.accept([1, 2, 2])
    for mask in (None, masks):
        expected = []
        for i, sampler in enumerate(alone):
            token = sampler.sample(logits[i], None if mask is None else mask[i])
            expected.append((token, _core.token_logprobs(logits[i], token, counts[i]) if counts[i] else None))
        assert engine.sample(logits, together, masks=mask, logprobs=counts) == expected
    assert [token for token, _ in engine.sample(logits, together)] == [
        s.sample(x) for s, x in zip(alone, logits, strict=True)
    ]
    assert engine.sample(logits[:0], []) == []


@pytest.mark.parametrize("masked", [False, True])
def test_joint_tokens_are_one_choice(tiny, masked):
    """Where tokens from an id on are likelier together than the best one before, what is before is left out."""
    engine, n, start = _core.Engine(str(tiny), n_ctx=32, n_threads=2), 3001, 2900
    logits = np.stack([row(n, seed=i) for i in range(40)])
    logits[:, :start] += np.linspace(-6, 2, 40, dtype=np.float32)[:, None]
    logits[7, start:] = -np.inf
    masks = np.random.default_rng(1).integers(0, 2**32, (40, 94), dtype=np.uint32)
    masks[:, 2] |= 1
    masks[5, start // 32 :] = 0
    masks[6, : start // 32] = 0
    every = np.full_like(masks, -1 & 0xFFFFFFFF)
    samplers = [_core.Sampler(temperature=i % 2, seed=i, **ALL) for i in range(40)]
    alone = [_core.Sampler(temperature=i % 2, seed=i, **ALL) for i in range(40)]
    left = [joint(one, mask, start) for one, mask in zip(logits, masks if masked else every, strict=True)]
    assert 5 < sum(np.isinf(one[:start]).all() for one in left) < 35
    expected = [sampler.sample(one) for sampler, one in zip(alone, left, strict=True)]
    expected = [(token, _core.token_logprobs(one, token, 2)) for token, one in zip(expected, left, strict=True)]
    kind = {"masks": masks} if masked else {}
    assert engine.sample(logits, samplers, logprobs=[2] * 40, joint_from=[start] * 40, **kind) == expected
    none = engine.sample(logits, [_core.Sampler(temperature=0)] + samplers[1:], joint_from=[n] + [-1] * 39)
    assert none[0] == (int(logits[0].argmax()), None)


def test_rows_that_do_not_fit_are_refused(tiny):
    engine, samplers = _core.Engine(str(tiny), n_ctx=32, n_threads=2), [_core.Sampler(seed=i) for i in range(3)]
    logits = np.stack([row(64, seed=i) for i in range(3)])
    bad = [
        ((logits[:2], samplers), {}, "logits must be float32 .3, vocabulary"),
        ((logits[0], samplers), {}, "logits must be float32 .3, vocabulary"),
        ((logits, [samplers[0]] * 3), {}, "a sampler is listed twice"),
        ((logits, samplers), {"logprobs": [1]}, "logprobs must be 3 numbers"),
        ((logits, samplers), {"joint_from": [1]}, "joint_from must be 3 numbers"),
        ((logits, samplers), {"masks": np.ones((2, 2), np.uint32)}, "masks must be uint32 .3, words"),
        ((logits, samplers), {"masks": np.ones((3, 2), np.int64)}, "masks must be uint32"),
    ]
    for arguments, more, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.sample(*arguments, **more)


def test_a_row_that_fails_leaves_the_others_their_choices(tiny):
    engine = _core.Engine(str(tiny), n_ctx=32, n_threads=2)
    alone, together = ([_core.Sampler(seed=i, logit_bias=[(64, 0.0)] * (i == 3)) for i in range(5)] for _ in range(2))
    logits = np.stack([row(64, seed=i) for i in range(5)])
    logits[1, 5], logits[4] = np.nan, -np.inf
    for _ in range(3):
        found = engine.sample(logits, together)
        assert [found[i] for i in (0, 2)] == [(alone[i].sample(logits[i]), None) for i in (0, 2)]
        errors = [found[i] for i in (1, 3, 4)]
        assert [type(one) for one in errors] == [ModelFormatError, ValueError, ValueError]
        for error, text in zip(errors, ("NaN", "logit_bias names token 64", "every logit is -infinity"), strict=True):
            assert text in str(error)
    narrow = engine.sample(logits[:1], together[:1], masks=np.ones((1, 1), np.uint32))
    assert [str(one) for one in narrow] == ["a mask for 64 tokens needs 2 words of 32 bits, it has 1"]
