# SPDX-License-Identifier: Apache-2.0
"""Bars: none for what is quick, and none that stays."""

from __future__ import annotations

import itertools
import sys

import pytest

from slimrt.plumbing import progress

pytestmark = pytest.mark.unsanitized  # Python alone


def work() -> None:
    with progress.bar(True, 3, "work", "step") as update:
        update(1, 3)
        with progress.aside():
            print("said", file=sys.stderr)
        update(3, 3)


def test_less_than_a_second_of_work_draws_no_bar(capsys):
    import tqdm  # noqa: F401  as if another bar had been shown before

    work()
    assert capsys.readouterr().err == "said\n"


def test_a_bar_is_gone_afterwards(capsys, monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", itertools.count(0.0, 2.0).__next__)
    work()
    err = capsys.readouterr().err
    assert "work:  33%" in err and "said\n" in err
    assert err.rpartition("\n")[2].rstrip("\r").rpartition("\r")[2].strip() == ""  # written over with blanks
