# SPDX-License-Identifier: Apache-2.0
"""The planner's table for models with an encoder is the paper's, and its bytes are those that are allocated."""

from __future__ import annotations

import json

import pytest

import slimrt
from slimrt import _core
from slimrt.cache import CacheChoice
from slimrt.source import ModelSource
from whisper_shapes import N_CTX, SIZES, write_whisper

# Graef and Wasielewski, "Slim attention", table of Whisper (cache-math.md, section 6): millions of elements of the
# baseline and of option 2 without E; how much smaller with E; how many fewer reads at batch 64 with E on chip.
PAPER = {
    "tiny": (6.0, 0.7, 4.7, 5.6),
    "base": (12.0, 1.4, 5.6, 5.8),
    "small": (35.9, 4.1, 6.8, 5.8),
    "medium": (95.7, 11.0, 7.6, 5.6),
    "large": (159.6, 18.4, 7.9, 5.3),
}
WITHOUT_E = 8.7
READ_AGAIN = (1.83, 1.87)  # if every layer reads E again


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """whisper(size) -> a file of its shape."""
    folder, made = tmp_path_factory.mktemp("whisper"), {}

    def path(size: str):
        if size not in made:
            made[size] = write_whisper(folder / f"{size}.gguf", SIZES[size])
        return made[size]

    return path


def options(path, **arguments) -> dict[str, slimrt.results.EncoderRow]:
    return {row.name: row for row in slimrt.plan(path, memory_limit="64GiB", **arguments).encoder}


@pytest.mark.parametrize("size", PAPER)
def test_the_papers_table(size, whisper):
    baseline, option_2, with_e, on_chip = PAPER[size]
    rows = options(whisper(size), n_seqs=64)
    assert list(rows) == ["baseline", "option 1", "option 2, x", "option 2, k"]
    first = rows["baseline"]
    exact = first.self_bytes + first.cross_bytes * 1500 // 1504  # rows are kept in blocks of 32
    assert round(exact / 64 / 2 / 1e6, 1) == baseline
    assert first.cache_bytes == 2 * rows["option 1"].cache_bytes
    for name in ("option 2, x", "option 2, k"):
        row = rows[name]
        assert round(row.uncounted / 64 / 2 / 1e6, 1) == option_2
        assert round(first.uncounted / row.uncounted, 1) == WITHOUT_E
        assert round(first.cache_bytes / row.cache_bytes, 1) == with_e
        assert round(first.read_on_chip / row.read_on_chip, 1) == on_chip
        assert READ_AGAIN[0] <= round(first.read / row.read, 2) <= READ_AGAIN[1]


@pytest.mark.parametrize("size", ["tiny", "base", "small", "medium", "large-v3"])
@pytest.mark.parametrize(("mode", "cross"), [("kv", "kv"), ("x", "e")])
def test_measured_cache_bytes_are_the_planners(mode, cross, size, whisper):
    """An engine of the shape, its weights zero."""
    path = whisper(size)
    (row,) = (
        row for row in options(path, cache=mode, cross=cross).values() if (row.modes[0], row.cross) == (mode, cross)
    )
    engine = _core.Engine(str(path), n_ctx=N_CTX, cache=mode, cross=cross)
    assert engine.memory()["cache"] == row.cache_bytes
    assert engine.memory() == {key: _core.plan(str(path), n_ctx=N_CTX, cache=mode, cross=cross)[key]
                               for key in engine.memory()}  # fmt: skip


@pytest.mark.parametrize("type_name", ["f32", "q8"])
def test_another_type_and_several_at_once(type_name, whisper):
    path = whisper("tiny")
    for row in options(path, n_seqs=3, cache_type=type_name, cross_type=type_name).values():
        given = {"n_ctx": N_CTX, "n_seqs": 3, "cache": row.modes[0], "cross": row.cross, "cross_type": type_name}
        planned = _core.plan(str(path), cache_type_k=type_name, cache_type_v=type_name, **given)
        assert planned["cache"] == row.cache_bytes


def test_what_auto_chooses_is_what_is_loaded(whisper):
    path = whisper("tiny")
    plan = slimrt.plan(path)
    assert set(plan.asked.modes) == {"x"} == set(CacheChoice.of("auto").arguments(ModelSource(path))["cache"])
    with slimrt.Model(path) as model:
        assert {layer["mode"] for layer in model.info()["layers"]} == {"x"}
        assert model.info()["cross"]["mode"] == "e" and "serves all 4 layers" in model.info()["cross"]["reason"]
        assert model.memory()["cache"] == plan.asked.cache_bytes == plan.encoder[2].cache_bytes


def test_a_model_without_an_encoder_has_no_such_table(tiny):
    assert slimrt.plan(tiny).encoder == ()
    with pytest.raises(ValueError, match=r"cross, cross_type and n_source are for models with an encoder.*leave them"):
        slimrt.plan(tiny, cross="e")


@pytest.mark.usefixtures("clean_environment")
def test_the_command_prints_it(run, whisper):
    code, out, _ = run("plan", whisper("tiny"), "--batch", "64")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("option 2, x"))
    assert "4.7" in line and "8.71x" in line and "x f16" in line and "e f16" in line
    code, out, _ = run("plan", whisper("tiny"), "--cross", "kv", "--cross-type", "q8", "--cache", "x", "--json")
    assert code == 0 and json.loads(out)["encoder"][-1]["name"] == "this choice"
