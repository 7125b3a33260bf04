# SPDX-License-Identifier: Apache-2.0
"""pytest --share leaves nothing out that no other case shows."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from shares import EVERY, FEW, spare_cases

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

CASES = [("llama", "k"), ("llama", "v"), ("t5", "k")]
PARAMETERS = {"dtype": ["f32", "f16", "q8"], "isa": ["avx2", "cuda"], "case": CASES}
TOGETHER = {"tests/test_kernels_x.py::test": 2, "tests/test_x.py::test": 1}


def cases(test: str, without: str = "", **parameters: list) -> list:
    """Items as pytest collects them, those of one value marked as skipped."""
    skip = pytest.mark.skipif(True, reason="no").mark
    return [
        SimpleNamespace(
            nodeid=f"{test}[{values}]",
            callspec=SimpleNamespace(params=dict(zip(parameters, values, strict=True))),
            iter_markers=lambda name, values=values: [skip] if without and without in str(values) else [],
        )
        for values in product(*parameters.values())
    ]


def kept(items: list) -> list:
    spare = {id(item) for item in spare_cases(items)}
    return [item for item in items if id(item) not in spare]


def shown(items: list, together: int) -> set:
    values = ([(n, v) for n, v in sorted(item.callspec.params.items()) if n != "case"] for item in items)
    return {pair for of_one in values for pair in combinations(of_one, together)}


@pytest.mark.parametrize(("test", "together"), TOGETHER.items())
def test_values_of_models_and_pairs_of_kernels_stay(test, together):
    items = cases(test, **PARAMETERS)
    assert len(kept(items)) < len(items)
    assert shown(kept(items), together) == shown(items, together)
    parts = [{item.callspec.params["case"][i] for item in kept(items)} for i in (0, 1)]
    assert parts == [{"llama", "t5"}, {"k", "v"}]


def test_a_case_that_is_skipped_shows_nothing():
    items = cases("tests/test_x.py::test", "cuda", n=list(range(200)), isa=["cuda", "avx2", "cuda too"])
    run = [item for item in items if item.callspec.params["isa"] == "avx2"]
    assert shown([item for item in kept(items) if item in run], 1) == shown(run, 1)


def test_a_share_of_the_rest_stays():
    items = cases("tests/test_x.py::test", n=[0, 1], m=list(range(1000)), k=[0])
    assert 1000 * (1 + 0.7 / EVERY) < len(kept(items)) < 1000 * (1 + 1.3 / EVERY)


def test_order_and_company_do_not_matter():
    items, others = (cases(test, **PARAMETERS) for test in TOGETHER)
    assert kept(items) == [item for item in kept([*others, *reversed(items)])[::-1] if item in items]


def test_all_of_a_few_stay():
    items = cases("tests/test_x.py::test", a=[0, 1], b=list(range(FEW // 2)))
    assert kept(items) == items
