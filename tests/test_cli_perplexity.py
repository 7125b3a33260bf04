# SPDX-License-Identifier: Apache-2.0
"""slimrt perplexity and inspect --spectrum: which text, which way of measuring, what is printed and drawn."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

import slimrt
from conftest import TESTS
from slimrt import _core
from slimrt.folding.spectrum import spectra
from slimrt.modelfile.gguf import read_gguf
from tiny_model import write_tiny

pytestmark = [pytest.mark.usefixtures("clean_environment"), pytest.mark.unsanitized]  # Python most of the time

TALE = TESTS.parent / "models" / "tale-llama.gguf"
HELDOUT = TESTS.parent / "models" / "heldout.txt"
TEXT = "the cat sat on the mat " * 3


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_plain_perplexity_is_the_models_own(run, tiny, file):
    with slimrt.Model(tiny, n_ctx=32, cache="k", cache_type="f32") as model:
        wanted = model.perplexity(TEXT, stride=8)
        n = len(model.tokenize(TEXT))
    cache = ("--cache", "k", "--cache-type", "f32")
    code, out, err = run("perplexity", tiny, file, "-c", 32, "--stride", 8, *cache)
    assert (code, out) == (0, f"perplexity {wanted:.4f}\n")
    assert "by prefill, which hides what a cache costs" in err and "windows of 32 that score their last 8" in err
    assert run("perplexity", tiny, file, "-c", 32, "--stride", 8, *cache, "-q")[1:] == (out, "")
    got = json.loads(run("perplexity", tiny, file, "-c", 32, "--stride", 8, *cache, "--json")[1])
    assert got == {"model": str(tiny), "perplexity": wanted, "tokens": n - 1, "window": 32, "stride": 8,
                   "cache": "k f32"}  # fmt: skip


@pytest.mark.parametrize("n", [1, 9])
def test_so_many_tokens_are_scored_as_asked_for(run, tiny, file, n):
    """With --compare and without, of a file and of a text. The first id has no probability and is not one of them."""
    for text in ((file,), ("-p", TEXT)):
        assert json.loads(run("perplexity", tiny, *text, "--tokens", n, "--json")[1])["tokens"] == n
        compared = run("perplexity", tiny, *text, "--tokens", n, "-c", 32, "--compare", "kv", "--json")[1]
        assert json.loads(compared)["tokens"] == n
    with slimrt.Model(tiny) as model:
        wanted = model.perplexity(model.tokenize(TEXT)[: n + 1])
    assert run("perplexity", tiny, file, "--tokens", n)[1] == f"perplexity {wanted:.4f}\n"


def test_every_way_to_give_a_text(run, tiny, file, monkeypatch):
    wanted = run("perplexity", tiny, file)[1]
    assert wanted.startswith("perplexity ")
    assert run("perplexity", tiny, "-f", file)[1] == wanted
    assert run("perplexity", tiny, TEXT)[1] == wanted
    assert run("perplexity", tiny, "-p", TEXT)[1] == wanted
    assert run("perplexity", "-m", tiny, file)[1] == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert run("perplexity", tiny)[1] == wanted
    monkeypatch.setenv("SLIMRT_MODEL", str(tiny))
    assert run("perplexity", file)[1] == wanted


def test_comparison_on_a_trained_model(run, tmp_path):
    """The tables and the picture say what compare_caches says, and rounding shows: naive k in q8 is of no use."""
    caches = ("kv:f16", "kv:q4", "k:q8")
    arguments = ("perplexity", TALE, HELDOUT, "-c", 64, "--tokens", 90, "--compare", *caches)
    code, out, _ = run(*arguments, "--json", "-t", 1)
    got = json.loads(out)
    assert (code, got["tokens"], got["window"], got["prefix"], got["chunk"]) == (0, 90, 64, 16, 1)
    rows = {row["cache"]: row for row in got["rows"]}
    assert list(rows) == ["kv f32", "kv f16", "kv q4", "k q8"]
    kl = {name: row["kl_mean"] for name, row in rows.items()}
    assert kl["kv f32"] == 0 < kl["kv f16"] < 1e-5 < kl["kv q4"] < 0.1 < kl["k q8"]
    assert got["front"] == ["kv q4", "kv f16", "kv f32"]  # k q8 is smaller, and no cache at all
    assert "loses more than 1 %" in rows["k q8"]["too_imprecise"] and not rows["kv q4"]["too_imprecise"]
    picture = tmp_path / "front.svg"
    pytest.importorskip("matplotlib")
    code, out, err = run(*arguments, "--plot", picture)
    assert code == 0 and len(out.splitlines()) == 5 and "after a prefix of 16" in err
    marks = {line[:6]: line.split()[-1] for line in out.splitlines()[1:]}
    assert marks["k q8  "] == "refused" and marks["kv q4 "] == "*" and "refused without --allow-lossy" in err
    drawn = [name for name in rows if f"<!-- {name}" in picture.read_text()]
    assert drawn == ["kv f16", "kv q4", "k q8"]  # a divergence of 0 has no place on a logarithmic axis


def test_caches_with_commas_and_their_types(run, tiny, file):
    out = run("perplexity", tiny, file, "-c", 32, "--compare", "kv,k:f16", "--cache-type", "q8", "--json", "-q")[1]
    assert [row["cache"] for row in json.loads(out)["rows"]] == ["kv f32", "kv q8", "k f16"]
    out = run("perplexity", tiny, file, "-c", 32, "--prefix", 4, "--chunk", 3, "--sequences", 1, "--compare", "kv",
              "--json", "-q")[1]  # fmt: skip
    assert {"prefix": 4, "chunk": 3}.items() <= json.loads(out).items()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("missing.txt",), 1, "missing.txt: No such file"),
        (("-p", ""), 1, "at least two tokens"),
        (("-p", "a", "--compare", "kv"), 1, "the text has 3 tokens"),
        (("-p", TEXT, "--compare", "kv", "kk"), 2, "did you mean"),
        (("-p", TEXT, "--compare", "KV:Q8_0", "KV:Q5_0"), 2, "q8_0 is q8 here"),
        (("-p", TEXT, "--compare", "kv", "x"), 1, "layer 0"),
        (("-p", TEXT, "--compare", "kv", "--plot", "picture.bmp"), 1, ".png, .svg, .pdf"),
        (("-p", TEXT, "--compare", "kv", "--plot", "/none/picture.png"), 1, "/none: no such directory"),
        (("-p", TEXT, "-f", "text.txt"), 2, "give one text"),
        (("my texts/held out.txt",), 1, "my texts/held out.txt: no such file (a text that ends so is given with -p)"),
        (("-p", TEXT, "--plot", "a.png"), 2, "--plot belongs to --compare"),
        (("-p", TEXT, "--chunk", 2), 2, "--chunk belongs to --compare"),
        (("-p", TEXT, "--compare", "kv", "--stride", 2), 2, "--stride belongs to the plain perplexity"),
        (("-p", TEXT, "--tokens", 0), 2, "at least 1"),
        (("-p", TEXT, "-c", 1), 1, "a context of at least 2 tokens (n_ctx, --ctx), got 1"),
    ],
)
def test_what_is_refused(run, tiny, arguments, code, said):
    got, out, err = run("perplexity", tiny, *arguments)
    assert (got, out) == (code, "") and said in err


def test_a_file_that_is_not_text(run, tiny, tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(b"a b \xff")
    for arguments in ((), ("--compare", "kv")):
        code, out, err = run("perplexity", tiny, file, *arguments)
        assert (code, out) == (1, "") and "bytes: not UTF-8 text: invalid start byte at byte 4" in err


def test_drawing_without_matplotlib(run, tiny, file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for arguments in (("perplexity", tiny, file, "--compare", "kv", "--plot"), ("inspect", tiny, "--spectrum")):
        code, out, err = run(*arguments, tmp_path / "picture.png")
        assert (code, out) == (1, "") and "pip install 'slimrt[plot]'" in err
    assert run("inspect", tiny, "--spectrum")[0] == 0  # the numbers need none


def test_spectra_are_those_of_the_weights(run, tiny, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = _core.GgufFile(str(tiny)), tmp_path / "spectrum.svg"
    code, out, err = run("inspect", tiny, "--spectrum", picture, "--json")
    assert (code, err) == (0, "")
    for layer, got in enumerate(json.loads(out)["spectrum"]):
        w_k = file.read(f"blk.{layer}.attn_k.weight").astype(np.float64)
        wanted = np.sqrt(np.linalg.eigvalsh(w_k @ w_k.T)[::-1])  # another way to the same numbers
        np.testing.assert_allclose(got["values"], wanted, rtol=1e-6)
        assert got["cond"] == pytest.approx(wanted[0] / wanted[-1], rel=1e-5)
        assert got["quantiles"]["0.5"] == pytest.approx(np.median(wanted) / wanted[0], rel=1e-6)
        assert (got["layer"], got["largest"], got["smallest"]) == (layer, got["values"][0], got["values"][-1])
    assert "layer 1" in picture.read_text()
    code, out, _ = run("inspect", tiny, "--spectrum")
    assert code == 0 and "cond" in out.splitlines()[-3] and len(out.splitlines()[-1].split()) == 9


def test_spectra_of_many_layers_and_of_grouped_heads(run, tmp_path):
    pytest.importorskip("matplotlib")
    model = write_tiny(tmp_path / "deep.gguf", n_layers=14, n_kv_heads=2)
    assert [len(one.values) for one in spectra(read_gguf(model))] == [16] * 14  # K is 16 wide
    assert run("inspect", model, "--spectrum", tmp_path / "a.svg")[0] == 0
    assert "layer 13" in (tmp_path / "a.svg").read_text() and "layer 5" not in (tmp_path / "a.svg").read_text()
