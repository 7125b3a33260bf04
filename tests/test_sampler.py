# SPDX-License-Identifier: Apache-2.0
"""The sampler: greedy, seeded, its distribution and its filters."""

from __future__ import annotations

import numpy as np

from slimrt import _core


def test_sampler_is_greedy_at_zero_and_repeats_with_a_seed():
    random = np.random.default_rng(17)
    logits = random.normal(size=50).astype(np.float32)
    assert _core.Sampler(temperature=0, repeat_penalty=1.0).sample(logits, []) == logits.argmax()
    draws = [[_core.Sampler(temperature=1.5, seed=s).sample(logits, []) for _ in range(3)] for s in range(40)]
    assert all(len(set(d)) == 1 for d in draws) and len({d[0] for d in draws}) > 5


def test_sampler_follows_the_distribution_and_its_filters():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = _core.Sampler(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=3)
    draws = np.bincount([sampler.sample(logits, []) for _ in range(8000)], minlength=4) / 8000
    assert np.abs(draws - [0.5, 0.25, 0.125, 0.125]).max() < 0.02
    filters = [({"top_k": 2}, {0, 1}), ({"top_p": 0.7}, {0, 1}), ({"min_p": 0.4}, {0, 1}), ({"top_k": 1}, {0})]
    for options, allowed in filters:
        plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        sampler = _core.Sampler(temperature=1.0, repeat_penalty=1.0, seed=4, **(plain | options))
        assert {sampler.sample(logits, []) for _ in range(300)} == allowed, options


def test_sampler_penalises_repeats_and_survives_odd_logits():
    logits = np.array([3.0, 2.9, -5.0], np.float32)
    sampler = _core.Sampler(temperature=0, repeat_penalty=1.5)
    assert sampler.sample(logits, []) == 0 and sampler.sample(logits, [0]) == 1
    assert _core.Sampler(temperature=0.7, seed=1).sample(np.array([-np.inf, 0, -np.inf], np.float32), []) == 1
    assert _core.Sampler(temperature=0.7, seed=1).sample(np.array([7.0], np.float32), []) == 0
