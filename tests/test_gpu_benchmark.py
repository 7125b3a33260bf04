# SPDX-License-Identifier: Apache-2.0
"""The benchmark that may run once on a GPU: its time is for measuring, and a failure costs what failed alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import TESTS
from slimrt import _core

sys.path.insert(0, str(TESTS.parent / "benchmarks"))
import gpu

pytestmark = pytest.mark.unsanitized


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, which only what is pretended here takes."""
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """Runs the benchmark with arguments on a device that there is not: its exit code, and what it wrote."""
    monkeypatch.setattr(_core, "cuda_devices", lambda: (["a GPU"], ""))
    monkeypatch.setattr(gpu, "copy_rate", lambda: 1.0)
    monkeypatch.setattr(gpu.machine, "describe", dict)

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(tmp_path / "out.json"), *arguments])
        return gpu.main(), json.loads((tmp_path / "out.json").read_text())

    return run


def test_time_counts_from_after_the_build(monkeypatch, now, on_a_gpu):
    left = []

    def part(clock, left_out):
        left.append(clock.left())
        yield {"what": "something"}

    def build():
        now[0] += 3600

    monkeypatch.setattr(gpu, "build", build)
    monkeypatch.setattr(gpu, "PARTS", [part])
    code, report = on_a_gpu("--build", "--no-checks", "--minutes", "8")
    assert code == 0 and left == [480] and report["rows"] == [{"what": "something"}]


def test_what_fails_does_not_stop_the_rest(monkeypatch, on_a_gpu):
    def broken(clock, left_out):
        yield {"what": "first"}
        raise RuntimeError("out of memory")

    def whole(clock, left_out):
        yield {"what": "second"}

    monkeypatch.setattr(gpu, "PARTS", [broken, whole])
    code, report = on_a_gpu("--no-checks")
    assert code == 1 and [row["what"] for row in report["rows"]] == ["first", "second"]
    assert report["failed"] == ["broken: RuntimeError: out of memory"]


def test_checks_share_their_time_and_show_more_than_the_first_failure(monkeypatch, now):
    ran = []

    def run(command, timeout, **_):
        ran.append(([str(part) for part in command], timeout))
        now[0] += 50
        if len(ran) == 2:
            raise subprocess.TimeoutExpired(command, timeout, b"3 failed")
        return subprocess.CompletedProcess(command, 1, "2 failed", "")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    found = gpu.checks(minutes=2)
    assert [timeout for _, timeout in ran] == [120, 70, 20, 1]
    assert list(found) == ["tests", "memcheck", "racecheck", "synccheck"]
    assert found["tests"] == {"exit": 1, "end": "2 failed"} and "3 failed" in found["memcheck"]["end"]
    assert all("-x" not in command and "--maxfail=30" in command for command, _ in ran)
