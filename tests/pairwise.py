# SPDX-License-Identifier: Apache-2.0
"""Parameters of a test without all their combinations: those that cover every pair of values, the others nightly.

The others are only there for who asks for them: to collect tens of thousands takes seconds, on an emulated CPU minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product

import pytest
from allpairspy import AllPairs

from remembered import remembered

with_nightly = True  # conftest.py says


def _name(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@remembered
def _covering(*sizes: int) -> set[tuple[int, ...]]:
    """Combinations of so many values each that have every pair of values."""
    return {tuple(at) for at in AllPairs([list(range(size)) for size in sizes])}


def pairwise(always: Callable[..., bool] = lambda **_: False, **parameters: Collection) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize once for each parameter. Combinations beyond those of the covering are marked
    `nightly`, except where `always`, called with the values by name, says otherwise."""
    values = [[v if hasattr(v, "marks") else pytest.param(v) for v in known] for known in parameters.values()]
    covering = _covering(*map(len, values))

    def combination(at: tuple[int, ...]) -> list:
        chosen = [known[i] for known, i in zip(values, at, strict=True)]
        plain = [one.values[0] for one in chosen]
        marks = [mark for one in chosen for mark in one.marks]
        if at not in covering and not always(**dict(zip(parameters, plain, strict=True))):
            if not with_nightly:
                return []
            marks.append(pytest.mark.nightly)
        return [pytest.param(*plain, marks=marks, id="-".join(map(_name, plain)))]

    return pytest.mark.parametrize(
        list(parameters), [one for at in product(*(range(len(k)) for k in values)) for one in combination(at)]
    )
