# SPDX-License-Identifier: Apache-2.0
"""pytest --share: of a test with many cases those that show most, for runs where each is slow and all run elsewhere.

Of kernels a case stays that has a pair of values (type and instruction set, say) which no case before it had; of other
tests one that has a value which none had. Of the rest, too, one in EVERY stays. Cases come in the order of the hash of
their names, so that each time the same ones stay. Counted are only those that -m and -k leave and that can run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

FEW = 12  # cases of a test that has no more are all run
EVERY = 5


def _values(item: pytest.Item) -> list[str]:
    """Each parameter with its value; a tuple's parts are values of their own, a kernel's name and its type, say."""
    found = []
    for name, value in sorted(item.callspec.params.items()):
        parts = value if isinstance(value, tuple) else (value,)
        found += [f"{name}.{i}={part!r}" for i, part in enumerate(parts)]
    return found


def spare_cases(items: Collection[pytest.Item]) -> list[pytest.Item]:
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        skipped = any(True in mark.args for mark in item.iter_markers("skipif"))
        if hasattr(item, "callspec") and not skipped:
            tests[item.nodeid.partition("[")[0]].append(item)
    spare = []
    for name, cases in tests.items():
        if len(cases) <= FEW:
            continue
        together = 2 if "/test_kernels" in f"/{name}" else 1
        seen: set[tuple[str, ...]] = set()
        for hashed, item in sorted(((crc32(item.nodeid.encode()), item) for item in cases), key=lambda pair: pair[0]):
            values = _values(item)
            new = set(combinations(values, min(together, len(values)))) - seen
            if not new and hashed % EVERY:
                spare.append(item)
            seen |= new
    return spare


class Share:
    """The plugin that leaves spare cases out, and says how many, from whichever process collected them."""

    left_out = 0

    @pytest.hookimpl(trylast=True)  # after what -m and -k leave out
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        spare = set(spare_cases(items))
        self.left_out = len(spare)
        items[:] = [item for item in items if item not in spare]
        config.hook.pytest_deselected(items=list(spare))
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if hasattr(node, "workeroutput"):  # not if it crashed
            self.left_out = node.workeroutput["left_out"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"{self.left_out} left out by --share: tests/shares.py")
