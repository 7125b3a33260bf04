# SPDX-License-Identifier: Apache-2.0
"""slimrt-bench, the executable without Python (csrc/bench): SLIMRT_BENCH says where it was built."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from conftest import open_engine
from slimrt import _core

BENCH = os.environ.get("SLIMRT_BENCH", "")
TALE = Path(__file__).parent.parent / "models" / "tale-llama.gguf"
PROMPT = [5, 10, 200, 31, 7]

pytestmark = pytest.mark.skipif(not BENCH, reason="SLIMRT_BENCH names no executable (docs/arm.md)")


def run(*arguments: object, code: int = 0) -> tuple[dict, str]:
    """What it printed, as JSON, and what it said."""
    done = subprocess.run([BENCH, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout or "{}"), done.stderr


def greedy(cache: str, n: int) -> list[int]:
    engine = open_engine(TALE, cache, "auto", n_ctx=128)
    sequence = engine.new_sequence()
    logits = engine.append([(sequence, np.array(PROMPT, np.int32))])
    ids = [int(logits[-1].argmax())]
    while len(ids) < n:
        ids.append(int(engine.append([(sequence, np.array(ids[-1:], np.int32))])[-1].argmax()))
    return ids


def test_decodes_as_the_module_does():
    prompt = ",".join(map(str, PROMPT))
    found, _ = run(TALE, "--no-kernels", "--tokens", prompt, "--decode", 12, "--threads", 2)
    rows = {row["cache"]: row for row in found["decode"]}
    assert set(rows) == {"kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank", "latent"}
    for cache in ("kv", "kivi"):
        assert rows[cache]["run"]["tokens"] == greedy(cache, 12) and rows[cache]["threads"] == 2
    assert rows["kv"]["run"]["depth"] == 5 and rows["kv"]["run"]["cache_bytes_per_token"] == 4096
    assert "RoPE" in rows["x"]["refused"] and "slimrt convert" in rows["k"]["refused"]


def test_depth_is_cached_before_decoding_is_timed():
    tokens = ",".join(["7"] * 64)
    found, _ = run(TALE, "--no-kernels", "--cache", "kv:q8", "--tokens", tokens, "--depth", 300, "--decode", 3)
    (row,) = found["decode"]
    assert row["run"]["depth"] == 288 and len(row["run"]["tokens"]) == 3


def test_every_kernel_is_measured():
    found, said = run("--quick", "--threads", "1,2")
    assert found["machine"]["isas"] == list(_core.cpu_info()["isas"]) and said.count("slimrt-bench:") == 4
    assert [(row["kind"], row["threads"]) for row in found["access"]] == [
        (kind, threads) for kind in _core.cpu_info()["access_kinds"] for threads in (1, 2)
    ]
    assert all(row["gain"] >= 1 for row in found["access"])
    assert [row["threads"] for row in found["bandwidth"]] == [1, 2]
    kinds = {(row["type"], row["threads"], row["tokens"]) for row in found["products"]}
    assert len(kinds) == len(found["products"]) == 12 * 2 * 3  # types, threads, tokens
    assert len(found["attention"]) == (6 * 6 + 2 * 3) * 2
    for row in (*found["products"], *found["attention"], *found["bandwidth"]):
        assert row["gb_s"] > 0


def test_attention_is_measured_in_every_mode_over_all_of_its_rows():
    found, _ = run("--quick", "--threads", "1")
    rows = {(row["mode"], row["type"]): row for row in found["attention"]}
    modes = ["kv", "k", "k+r", "v", "x", "xr", "kivi", "lowrank"]  # latent is for other layers
    assert list(dict.fromkeys(mode for mode, _ in rows)) == modes
    n, width = 256, 16 * 64
    assert {row["rows"] for row in rows.values()} == {n}
    bytes_ = {key: row["cache_bytes"] for key, row in rows.items()}
    for mode, columns in {"kv": 2 * width, "k": width, "k+r": width + 128, "v": width, "x": width, "xr": width}.items():
        assert bytes_[mode, "f32"] == 2 * bytes_[mode, "f16"] == n * columns * 4
        assert bytes_[mode, "q8"] < 0.6 * bytes_[mode, "f16"] and bytes_[mode, "q4"] < 0.7 * bytes_[mode, "q8"]
    recent = 128 * 2 * width * 2  # which kivi keeps in f16
    assert bytes_["kivi", "f16"] == bytes_["kv", "f16"]
    assert recent < bytes_["kivi", "q2"] < bytes_["kivi", "q4"] < recent + bytes_["kv", "q8"] / 2
    assert bytes_["lowrank", "q2@0.5+q4*0.1"] < bytes_["lowrank", "q2"] < bytes_["kivi", "q2"]
    assert {mode: row["rotated"] for (mode, _), row in rows.items()} == dict.fromkeys(modes, 64) | {
        "v": 0,
        "x": 0,
        "xr": 16,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--isa", "sse9"], "isa 'sse9' is not known or not supported here"),
        (["none.gguf"], "cannot read 'none.gguf'"),
        (["--decode", "0"], "--decode takes numbers from 1 on with commas between, not '0'"),
        (["--threads"], "--threads needs a value"),
        (["--fast"], "unknown argument '--fast'; --help lists them"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(arguments, said):
    found, message = run(*arguments, code=1)
    assert found == {} and said in message


def test_what_fails_later_is_in_the_json():
    found, message = run(TALE, "--no-kernels", "--cache", "kv:f99", code=1)
    assert "cache type 'f99' is not supported" in found["error"] and "f99" in message
