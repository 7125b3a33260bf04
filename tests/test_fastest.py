# SPDX-License-Identifier: Apache-2.0
"""Cache "fastest": what is measured decides, among what fits."""

from __future__ import annotations

from pathlib import Path

import pytest

import slimrt
from slimrt import machine
from slimrt.modelfile.source import ModelSource
from tiny_model import write_tiny

MODELS = Path(__file__).parent.parent / "models"
N_CTX = 8192  # where the cache is what memory goes to


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """A file that says k+r in q8."""
    folder = tmp_path_factory.mktemp("folded")
    tiny, out = write_tiny(folder / "tiny.gguf", n_ctx=N_CTX), folder / "folded.gguf"
    slimrt.convert(tiny, out, cache="k+r", cache_type="q8", calibration="none", progress=False)
    return out


@pytest.fixture
def rates(monkeypatch):
    """Nanoseconds a row of what is absorbed, of kv in q8 and in f16; no measuring."""
    given = {"absorbed": 1000.0, "q8": 2000.0, "f16": 3000.0}
    monkeypatch.setattr(
        machine,
        "attention_rates",
        lambda kinds, n: {kind: given["absorbed" if kind.absorbed else kind.type] for kind in kinds},
    )
    monkeypatch.setattr(machine, "rates", lambda n: machine.Rates(10.0, 10.0, 100.0, 50.0, n))
    return given


def chosen(path, **options) -> tuple[str, str]:
    with slimrt.Model(path, cache="fastest", n_ctx=N_CTX, n_threads=2, progress=False, **options) as model:
        layers = {(layer["mode"], layer["type"]) for layer in model.info()["layers"]}
        assert len(layers) == 1
        return layers.pop()


def test_the_fastest_is_chosen(folded, rates):
    assert chosen(folded) == ("k+r", "q8")
    rates["absorbed"] = 2500.0
    assert chosen(folded) == ("kv", "q8")
    rates["q8"] = 9000.0
    assert chosen(folded) == ("k+r", "q8")
    rates["f16"] = 2000.0
    assert chosen(folded) == ("kv", "f16")


def test_only_what_fits_is_chosen(folded, rates):
    rates["absorbed"] = 9000.0
    sizes = {"n_ctx": N_CTX, "n_seqs": 8, "n_threads": 2}  # of the cache, beside one scratch
    rows = {row.cache: row.total for row in slimrt.plan(folded, cache_type="q8", **sizes).rows}
    assert rows["k+r"] < rows["kv"]
    assert chosen(folded, n_seqs=8, memory_limit=rows["kv"]) == ("kv", "q8")
    assert chosen(folded, n_seqs=8, memory_limit=rows["kv"] - 1) == ("k+r", "q8")
    with pytest.raises(slimrt.WontFitError, match="--ctx"):
        chosen(folded, n_seqs=8, memory_limit=rows["k+r"] - 1)


def test_types_that_are_asked_for_are_kept(folded, rates):
    rates["f16"] = 1.0
    assert chosen(folded, cache_type="q8") == ("k+r", "q8")
    with slimrt.Model(folded, cache="fastest:f16", n_ctx=N_CTX, progress=False) as model:
        assert {(layer["mode"], layer["type"]) for layer in model.info()["layers"]} == {("kv", "f16")}


def test_a_plan_is_of_what_would_be_chosen(folded, rates):
    assert slimrt.plan(folded, n_ctx=N_CTX, cache="fastest").asked.modes == ("k+r", "k+r")


def test_why_is_said(folded, rates, capfd):
    rates["absorbed"] = 2500.0
    slimrt.Model(folded, cache="fastest", n_ctx=N_CTX, verbose=True, progress=False).close()
    said = capfd.readouterr().err
    ms = 2 * N_CTX / 2 * 1e-6  # of two layers
    for name, ns in (("kv:q8", 2000), ("kv:f16", 3000)):
        assert f"{name} {ms * ns:.3g} ms" in said
    assert "k+r:q8" in said and said.index("kv:q8") < said.index("k+r:q8")


def test_what_cannot_be_compared_is_said(tmp_path, rates, capfd):
    tiny, out = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "aging.gguf"
    slimrt.convert(tiny, out, cache="lowrank", calibration="none", progress=False)
    slimrt.Model(out, cache="fastest", verbose=True, progress=False).close()
    assert "not compared, since mode lowrank is timed with a model only" in capfd.readouterr().err


def test_where_it_says_nothing_it_is_refused(tmp_path):
    for path, cache in ((write_tiny(tmp_path / "tiny.gguf"), ["fastest", "kv"]), (MODELS / "tale-t5.gguf", "fastest")):
        with pytest.raises(slimrt.CacheUnsupportedError, match="cache 'fastest' compares caches of a decoder alone"):
            slimrt.Model(path, cache=cache)
    for budget in ({"sparse_threshold": 0.01}, {"sparse_delta": 0.01}):
        with pytest.raises(slimrt.CacheUnsupportedError, match="caches that are read whole"):
            slimrt.Model(tmp_path / "tiny.gguf", cache="fastest", **budget)


def test_rates_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kinds = [machine.Decoding(4, 4, 32, False, "q8", "q8"), machine.Decoding(4, 4, 32, True, "q8", "q8", 8)]
    found = machine.attention_rates(kinds, 1)
    assert found == machine.attention_rates(kinds, 1) and all(0 < ns < 1e6 for ns in found.values())
    assert machine.attention_rates(kinds[:1], 1) == {kinds[0]: found[kinds[0]]}


@pytest.mark.unsanitized
@pytest.mark.parametrize("said", ["", "float_rows=nta:64,rows=nta:128"])
def test_rates_are_of_rows_accessed_as_engines_will(said, monkeypatch, tmp_path):
    """As is measured to be fastest, unless the environment says it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SLIMRT_ACCESS", said)
    monkeypatch.setattr(machine.core, "tune", lambda *_: {"best": "t1:4160", "gain": 1.5, "read_share": 0.0})
    seen = set()

    def time_attention(*_, **__):
        seen.update(machine.core.access().split(",")[-2:])
        return [1e-6], 0, 0

    monkeypatch.setattr(machine.core.ops, "time_attention", time_attention)
    machine.attention_rates([machine.Decoding(4, 4, 32, False, "q8", "q8")], 1)
    assert seen == set((said or "float_rows=t1:4160,rows=t1:4160").split(","))
    monkeypatch.setenv("SLIMRT_ACCESS", "")
    assert machine.core.access() == machine.core.access("usual")


def test_weights_that_are_read_count(folded, rates):
    """W_KV and the residual's weights, at the rate of memory; W_V is not read in their place."""
    from slimrt.cache.config import CacheChoice
    from slimrt.cache.fastest import fastest
    from slimrt.cache.planner import Planner

    rates.update(absorbed=0.0, q8=0.0, f16=0.0)
    source = ModelSource.of(folded, False)
    planner = Planner.of(source, None, 1, 512, 2)
    times = fastest(planner, CacheChoice.of("fastest"), 64, lambda _: "").times
    tensors = source.file.tensors()
    of_fold = sum(source.file.tensor_bytes(name) for name in tensors if ".attn_kr_" in name)
    of_v = sum(source.file.tensor_bytes(name) for name in tensors if name.endswith(".attn_v.weight"))
    derived = [planner.ask(CacheChoice.of(cache), 64)["derived"] for cache in ("auto", "kv")]
    assert times["k+r:q8"] == pytest.approx((of_fold - of_v + derived[0] - derived[1]) / 10e9 * 1e3)
    assert times["kv:q8"] == times["kv:f16"] == 0
