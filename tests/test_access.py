# SPDX-License-Identifier: Apache-2.0
"""How memory is accessed: no result depends on it; what is measured of a machine is kept, and measured once."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import slimrt
from conftest import ISAS, PROMPT, lies_side_by_side
from slimrt import _core, core, machine
from slimrt._core import ops
from slimrt.modelfile.gguf import ModelData, Tensor, read_gguf, write_gguf
from slimrt.runtime import huge_pages
from slimrt.runtime.huge_pages import HugePages
from tiny_model import write_tiny
from weight_formats import random_bytes

# Every hint, alone and with rows side by side; near, within a row, beyond several rows, and beyond the weights.
ACCESSES = ["none", "none:0:several", "t1", "nta:1048576"] + [
    f"{hint}:{ahead}{several}"
    for hint in ("t0", "t1", "nta")
    for ahead in (64, 100, 4096, 70000)
    for several in ("", ":several")
]
TYPES = {"f32": 130, "f16": 131, "bf16": 67, "q8_0": 1056, "q4_0": 96, "q4_k": 768, "q5_k": 512, "q6_k": 768}
TYPES |= {"iq4_nl": 96, "iq4_xs": 768, "mxfp4": 96, "tq2_0": 512, "iq2_n": 512, "iq3_xxs_n": 256, "iq3_s_n": 512}
TYPES |= {"q2_k_r16": 512, "q3_k_r16": 256, "q4_0_r16": 96, "q4_1_r16": 96, "q4_k_r16": 768, "q5_0_r16": 160}
TYPES |= {"q5_1_r16": 64, "q5_k_r16": 512, "iq4_nl_r16": 96, "iq4_xs_r16": 768, "mxfp4_r16": 96}


def kinds_of(isa: str) -> list[str]:
    """Those in which models are held, and rows of a cache."""
    held = [kind for kind in TYPES if kind.endswith("_r16") == lies_side_by_side(kind.removesuffix("_r16"), isa)]
    return [*held, "float_rows", "rows"]


@pytest.mark.parametrize(
    ("kind", "isa"), [(k, i) for k in TYPES for i in ISAS if not k.endswith("_r16") or k in kinds_of(i)]
)
def test_products_have_the_same_bits_however_weights_are_accessed(kind, isa, monkeypatch):
    of_rows, k = kind.removesuffix("_r16"), TYPES[kind]
    rows = 53 if of_rows == kind else 48
    raw = random_bytes(of_rows, rows, k, seed=1)
    if of_rows != kind:
        _, raw = ops.interleave(of_rows, raw.reshape(-1), k)
    for tokens in (1, 3):
        x = np.random.default_rng(tokens).normal(size=(tokens, k)).astype(np.float32)
        found = set()
        for access in ("usual", *ACCESSES):
            monkeypatch.setenv("SLIMRT_ACCESS", access)
            found.add(ops.linear(x, raw.reshape(-1), kind, rows, None, isa, 2).tobytes())
        assert len(found) == 1
        assert np.frombuffer(found.pop(), np.float32).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8", "fp8_e4m3", "fp8_e5m2", "q4"])
def test_attention_has_the_same_bits_however_rows_are_accessed(kind, isa, monkeypatch):
    random = np.random.default_rng(2)
    q = random.normal(size=(1, 4 * 64)).astype(np.float32)
    keys, values = (random.normal(size=(331, 2 * 64)).astype(np.float32) for _ in range(2))
    for threshold in (0.0, 0.1):
        found = set()
        for access in ("usual", *ACCESSES):
            rows = f"float_rows={access},rows={access}"
            monkeypatch.setenv("SLIMRT_ACCESS", rows if access != "usual" else access)
            out, lse, _ = ops.attention(
                q, keys, values, 4, 2, 2, kind, 1, 1 / 8, 0, isa, 2, sparse_threshold=threshold
            )  # fmt: skip
            found.add(out.tobytes() + lse.tobytes())
        assert len(found) == 1


def test_an_access_is_said_kind_by_kind(monkeypatch):
    usual = dict(part.split("=") for part in core.access("usual").split(","))
    assert list(usual) == core.cpu_info()["access_kinds"] == kinds_of(core.cpu_info()["isa"])
    assert core.access("t1:4096") == ",".join(f"{kind}=t1:4096" for kind in usual)
    assert core.access("none:0:several,q8_0=nta:64") == ",".join(
        f"{kind}={'nta:64' if kind == 'q8_0' else 'none:several'}" for kind in usual
    )
    assert core.access(core.access("usual")) == core.access("usual")
    for text in ("none:several", "t0:4096:several", "nta:0"):
        assert core.access(f"rows={text}").endswith(f"rows={text}")
    monkeypatch.setenv("SLIMRT_ACCESS", "f16=t1:2048")
    core.set_access("f16=nta:64")
    assert "f16=t1:2048" in core.access()
    monkeypatch.setenv("SLIMRT_ACCESS", "")
    assert "f16=nta:64" in core.access()
    core.set_access("usual")
    assert core.access() == core.access("usual")


@pytest.mark.parametrize(
    "text",
    ["t5", "q9=t0", "q4_k", "q4_k=", "t0:-1", "t0:1048577", "t0:8k", "t0:64:several:64", "t0:64:", "rows=t0,", ","],
)
def test_an_unknown_access_is_refused_with_the_list(text, tiny, monkeypatch):
    for refuse in (core.access, core.set_access):
        with pytest.raises(
            ValueError, match=r"there is no access '.*none, t0, t1 or nta.*f32, f16, bf16, .*, float_rows, rows"
        ):
            refuse(text)
    monkeypatch.setenv("SLIMRT_ACCESS", text)
    with pytest.raises(ValueError, match="there is no access"):
        _core.Engine(str(tiny))


def test_what_is_measured_is_an_access(monkeypatch):
    for isa in ISAS:
        some = {"q6_k", "f16", "q4_k_r16", "q2_k_r16", "q5_0_r16", "iq3_s_n", "float_rows", "rows"}
        for kind in some.intersection(kinds_of(isa)):
            found = core.tune(kind, isa, 2, 0.0)
            assert f"{kind}={found['best']}" in core.access(f"{kind}={found['best']}").split(",")
            assert found["gain"] == 1 or found["gain"] > 1.05
            assert (found["read_share"] > 0) == (not kind.endswith("rows"))
            usual = f"{kind}={found['best']}" in core.access("usual").split(",")
            assert usual == (found["gain"] == 1)
    for wrong in ("q2_k", "", "keys"):
        with pytest.raises(ValueError, match="nothing to measure"):
            core.tune(wrong)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A machine of its own for a test: what would be measured is given and counted."""
    calls: list[str] = []

    def tune(kind, isa, n_threads, seconds):
        calls.append(kind)
        return {"best": "nta:4096" if kind == "q8_0" else "t0:4096", "gain": 1.2 if kind == "q8_0" else 1.0,
                "read_share": 0.9}  # fmt: skip

    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SLIMRT_ACCESS", raising=False)
    monkeypatch.setattr(core, "tune", tune)
    monkeypatch.setattr(machine, "_known", {})
    yield calls
    core.set_access("usual")


def test_a_kind_is_measured_once(kept):
    first = machine.tuned(["q8_0", "f16"], 2)
    assert kept == ["q8_0", "f16"] and first["q8_0"] == machine.Tuned("nta:4096", 1.2, 0.9)
    assert machine.tuned(["q8_0", "f16", "rows"], 2).keys() == {"q8_0", "f16", "rows"}
    assert kept == ["q8_0", "f16", "rows"]
    assert machine.tuned(["q8_0"], 2) == {"q8_0": first["q8_0"]} and machine.known_access(2).keys() > {"q8_0"}
    assert machine.known_access(1) == {}  # another number of threads is another measurement
    machine.tuned(["q8_0"], 1)
    machine.tuned(["f16"], 2, isa="portable")
    assert kept[3:] == ["q8_0", "f16"]
    machine.tuned(["f16"], 2, again=True)
    assert kept[5:] == ["f16"] and machine.known_access(2).keys() == {"q8_0", "f16", "rows"}
    (here,) = {machine.kept_in(isa) for isa in [core.cpu_info()["isa"]]}
    assert [path.name for path in here.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\x00\xff",
        lambda text: json.dumps(json.loads(text) | {"threads": []}),
        lambda text: json.dumps(json.loads(text) | {"cpu": "another"}),
        lambda text: json.dumps(json.loads(text) | {"format": 0}),
        lambda text: text.replace("nta:4096", "nta:40968888"),
        lambda text: text.replace("q8_0", "q8_9"),
        lambda text: text.replace('"gain"', '"pain"'),
        lambda text: text.replace("1.2", '"1.2"'),
    ],
)
def test_a_file_that_is_broken_or_foreign_is_measured_anew(kept, harm):
    machine.tuned(["q8_0"], 2)
    path = machine.kept_in(core.cpu_info()["isa"])
    whole = path.read_text()
    path.write_text(harm(whole))
    assert machine.known_access(2) == {}
    assert machine.tuned(["q8_0"], 2)["q8_0"].best == "nta:4096"
    assert kept == ["q8_0", "q8_0"] and path.read_text() == whole


def test_where_nothing_can_be_written_the_process_remembers(kept, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert machine.tuned(["q8_0"], 2)["q8_0"].gain == 1.2
    assert kept == ["q8_0"]


def test_large_models_follow_what_is_measured(kept, monkeypatch):
    cache = core.cpu_info()["cache_bytes"]
    assert cache > 1 << 16
    assert machine.follow({"q8_0": cache // 2}, 2) == {} and kept == []
    found = machine.follow({"q8_0": 2 * cache, "f32": 1000, "q2_k": 2 * cache}, 2)
    assert kept == ["q8_0", "float_rows", "rows"] and found.keys() == {"q8_0"}
    assert core.access() == core.access("q8_0=nta:4096")
    monkeypatch.setenv("SLIMRT_ACCESS", "usual")
    assert machine.follow({"f16": 2 * cache}, 2) == {} and len(kept) == 3
    assert core.access() == core.access("usual")


@pytest.mark.parametrize(
    ("stored", "held"), [("Q4_1", "q4_1_r16"), ("Q2_K", "q2_k_r16"), ("IQ2_XS", "iq2_n"), ("Q8_0", "q8_0")]
)
def test_what_is_followed_is_what_weights_are_held_as(stored, held, kept, tmp_path, monkeypatch):
    path = write_tiny(tmp_path / stored, d=256, d_ff=512, stored=stored)
    info = core.cpu_info()
    monkeypatch.setattr(core, "cpu_info", lambda: info | {"cache_bytes": 550_000})
    with slimrt.Model(path, n_ctx=64, progress=False):
        assert kept == [held, "float_rows", "rows"]


def test_a_load_says_what_it_measured(kept, run, tiny, monkeypatch):
    info = core.cpu_info()
    monkeypatch.setattr(core, "cpu_info", lambda: info | {"cache_bytes": 64, "access_kinds": ["q8_0", "rows"]})
    code, _, err = run("generate", tiny, "-p", PROMPT, "-n", 1, "-v")
    assert code == 0 and "access to memory" not in err and kept == ["rows"]
    monkeypatch.setattr(machine, "tuned", lambda kinds, n, isa="": {"rows": machine.Tuned("t1:64", 1.21, 0)})
    err = run("generate", tiny, "-p", PROMPT, "-n", 1, "-v")[2]
    assert "access to memory, measured here: rows t1:64 (1.21 times as fast)" in err


def test_a_file_is_read_from_huge_pages_at_the_same_place(tiny, tmp_path):
    large = tmp_path / "large.gguf"
    values = np.random.default_rng(3).normal(size=(10 << 10, 1 << 10)).astype(np.float32)
    write_gguf(large, ModelData(read_gguf(tiny).metadata, {"some": Tensor.of("some", values)}), show_progress=False)
    file = core.GgufFile(str(large))
    before, bytes_ = file.read("some").copy(), file.bytes()
    whole, size, page = bytes_.tobytes(), bytes_.size, 2 << 20
    assert 0 < core.huge_page_gain(file, 2) < 50
    moved = [file.move_to_huge_pages(4 * page, page), file.move_to_huge_pages(0, 4 * page)]
    assert bytes_.tobytes() == whole == large.read_bytes()
    moved.append(file.move_to_huge_pages(5 * page, size - 5 * page))
    assert moved == [sys.platform == "linux"] * 3
    assert bytes_.tobytes() == whole and np.array_equal(file.read("some"), before)
    for first, of_these in ((1, page), (0, page + 1), (0, size + page), (size // page * page + page, page), (0, 0)):
        with pytest.raises(ValueError, match="are not whole huge pages"):
            file.move_to_huge_pages(first, of_these)
    file.require_unchanged()
    large.write_bytes(b"")
    assert bytes_.tobytes() == whole  # a mapping would have died


class Moved:
    """A file of 1000 bytes, and what was moved of it."""

    def __init__(self):
        self.pieces = []

    def bytes(self):
        return np.zeros(1000, np.uint8)

    def move_to_huge_pages(self, first, bytes_):
        self.pieces.append((first, bytes_))
        return True


@pytest.fixture
def spacious(kept, monkeypatch):
    """A machine where huge pages pay, by attributes that a test may change."""
    of = SimpleNamespace(gain=1.2, free=2000, cache_bytes=999, measured=0)

    def gain(file, n_threads):
        of.measured += 1
        return of.gain

    info = core.cpu_info()
    monkeypatch.setattr(core, "cpu_info", lambda: info | {"cache_bytes": of.cache_bytes})
    monkeypatch.setattr(core, "huge_page_gain", gain)
    monkeypatch.setattr(core, "available_memory", lambda device="cpu": of.free)
    monkeypatch.setattr(huge_pages, "_PIECE", 400)
    return of


def test_weights_are_copied_where_that_pays_and_fits(spacious, monkeypatch):
    def finished():
        file = Moved()
        return HugePages(file, 2).finish(), file.pieces

    assert finished() == (1.2, [(0, 400), (400, 400), (800, 200)])
    spacious.free = 1999
    assert finished() == (0, [])
    spacious.free, spacious.gain = 2000, 1.05
    assert finished() == (0, [])
    spacious.gain, spacious.cache_bytes = 1.2, 1000
    assert finished() == (0, [])
    spacious.cache_bytes = 999
    monkeypatch.setenv("SLIMRT_ACCESS", "usual")
    assert finished() == (0, []) and spacious.measured == 2


def test_copying_stops_where_memory_ends(spacious):
    file = Moved()
    pages = HugePages(file, 2)
    pages.after(100)  # measures
    pages.after(0)
    spacious.free = 1199
    assert pages.finish() == 1.2 and file.pieces == [(0, 400)]


def test_measuring_and_copying_take_a_tenth_of_the_work_at_most(spacious, monkeypatch):
    looks, file = [], Moved()
    monkeypatch.setattr(huge_pages, "perf_counter", lambda: looks.append(1) or 0.25 * len(looks))
    pages, worked, begun = HugePages(file, 2), 0.0, []
    while len(file.pieces) < 3:
        pages.after(0.01)
        worked += 0.01
        assert 0.25 * (len(looks) / 2) <= 0.1 * worked + 0.2 + 1e-9  # each takes 0.25 s, where 0.05 were assumed once
        if len(begun) < spacious.measured + len(file.pieces):
            begun.append(round(worked, 1))
    assert begun == [5.0, 5.0, 7.5, 10.0] and file.pieces == [(0, 400), (400, 400), (800, 200)] and pages.gain == 1.2


def test_a_model_in_huge_pages_says_the_same(spacious, tiny, monkeypatch, caplog):
    spacious.free, spacious.cache_bytes = 1 << 40, 1 << 40
    with slimrt.Model(tiny, n_ctx=64, progress=False) as model:
        plain = model.generate(PROMPT, max_tokens=20, temperature=0).text
    spacious.cache_bytes = 0
    monkeypatch.setattr(huge_pages, "_PIECE", 2 << 20)
    monkeypatch.setattr(huge_pages, "_SHARE", 1e9)  # at once
    with caplog.at_level("INFO", "slimrt"), slimrt.Model(tiny, n_ctx=64, progress=False) as model:
        assert model.generate(PROMPT, max_tokens=20, temperature=0).text == plain
        moved = "100 % of the weights were moved into huge pages (1.20 times as fast)" in caplog.text
        assert moved == (sys.platform == "linux") and spacious.measured == 1
        assert model.generate(PROMPT, max_tokens=20, temperature=0).text == plain


def test_rates_are_measured_once(kept, monkeypatch):
    counted = []
    monkeypatch.setattr(core, "read_bandwidth", lambda n: counted.append(n) or 10.0 * n)
    first = machine.rates(3)
    assert first.read == 30 and first.read_one == 10 and first.threads == 3 and first.int8 > 0 and first.f32 > 0
    machine.tuned(["q8_0"], 3)
    assert machine.rates(3) == first and counted == [3, 1] and machine.known_access(3).keys() == {"q8_0"}
    machine.rates(3, again=True)
    assert counted == [3, 1, 3, 1]


def test_doctor_shows_it_and_measures_again(kept, run, monkeypatch):
    monkeypatch.setattr(core, "read_bandwidth", lambda n=0: 10.0)
    assert "nothing was measured yet" in run("doctor")[1] and kept == []
    code, out, err = run("doctor", "--tune", "-t", 2)
    assert (code, err) == (0, "") and kept == core.cpu_info()["access_kinds"]
    assert "q8_0 nta:4096 (x1.20, 90% of a read)" in out and str(machine.kept_in(core.cpu_info()["isa"])) in out
    report = json.loads(run("doctor", "-t", 2, "--json")[1])
    assert report["access"]["f16"].startswith("t0:4096 (x1.00") and len(kept) == len(set(kept))
    monkeypatch.setenv("SLIMRT_ACCESS", "t1:64")
    report = json.loads(run("doctor", "--json")[1])
    assert report["access"] == core.access("t1:64") and report["access_from"] == "SLIMRT_ACCESS=t1:64"


def test_a_file_that_is_laid_out_anew_is_not_copied(kept, tmp_path):
    """Its weights are in memory of their own by then, and what a copy of the file gains nobody reads."""
    for stored in ("Q4_1", "Q8_0"):
        path = write_tiny(tmp_path / stored, d=256, d_ff=512, stored=stored)
        with slimrt.Model(path, n_ctx=64, progress=False) as model:
            assert (model._runtime.huge_pages is not None) == (stored == "Q8_0")
