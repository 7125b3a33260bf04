# SPDX-License-Identifier: Apache-2.0
"""compare_caches: against plain loops over the engine, its windows, what it holds, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import decode, open_engine
from slimrt.measure import quality
from slimrt.measure.quality import compare_caches
from slimrt.modelfile.text import file_ids, text_pieces
from slimrt.plumbing.numbers import surprise_and_divergence

pytestmark = pytest.mark.unsanitized  # NumPy most of the time; the core is tested by others

IDS = list(np.random.default_rng(5).integers(6, 289, 150))
BOS = 1


def plain(path, windows, prefix, mode, dtype):
    """(-log q of every scored token, logits) by one engine and one sequence, a token at a time."""
    nll, rows = [], []
    for ids in windows:
        logits = decode(open_engine(path, mode, dtype, n_ctx=64), np.array(ids[:-1]), prefix)[prefix:]
        logits = logits.astype(np.float64)
        log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll += [-row[id] for row, id in zip(log_q, ids[prefix + 1 :], strict=True)]
        rows.append(log_q)
    return np.array(nll), np.concatenate(rows)


def test_against_plain_loops(tiny):
    """Windows of 64, 64 and 22 ids, each decoded alone here and together there. Logits of a step do not depend on
    what else is in it but for the order of sums in float32: 1e-5 of a nat."""
    windows, prefix = [IDS[:64], IDS[64:128], IDS[128:]], 10
    got = compare_caches(tiny, IDS, ["kv:q4", "k:f32"], window=64, prefix=prefix)
    assert (got.tokens, got.windows, got.window, got.prefix, got.chunk) == (53 + 53 + 11, 3, 64, 10, 1)
    assert [row.cache for row in got.rows] == ["kv f32", "kv q4", "k f32"]
    reference, log_p = plain(tiny, windows, prefix, "kv", "f32")
    p = np.exp(log_p)
    for row, (mode, dtype) in zip(got.rows, [("kv", "f32"), ("kv", "q4"), ("k", "f32")], strict=True):
        nll, log_q = plain(tiny, windows, prefix, mode, dtype)
        kl = (p * (log_p - log_q)).sum(-1)
        assert row.perplexity == pytest.approx(np.exp(nll.mean()), rel=1e-5)
        assert row.kl_mean == pytest.approx(kl.mean(), abs=1e-5) and row.kl_max == pytest.approx(kl.max(), abs=1e-5)
        assert row.kl_p99 == pytest.approx(np.sort(kl)[-2], abs=1e-5)  # of 117 tokens one lies above the quantile
        same = (log_p.argmax(-1) == log_q.argmax(-1)).mean()
        assert row.same_top == pytest.approx(same, abs=1.01 / 117)
    assert got.rows[1].kl_mean > 1e-3 > 1e-6 > got.rows[2].kl_mean >= 0 == got.rows[0].kl_mean


def test_what_a_cache_costs_shows_only_in_what_was_stored(tiny):
    """One chunk after the prefix: its tokens see each other exactly, and only the prefix as it was rounded."""
    alone, together = (
        compare_caches(tiny, IDS[:64], ["kv:q4"], window=64, prefix=1, chunk=chunk).rows[1].kl_mean for chunk in (1, 62)
    )
    assert alone > 3 * together > 0


def test_chunks_sequences_and_kept_logits_change_nothing_else(tiny, monkeypatch):
    def rows(**options):
        result = compare_caches(tiny, IDS, ["kv:f32", "kv:bf16"], window=50, prefix=8, **options)
        assert (result.tokens, len(result.rows)) == (3 * 41, 2)  # kv:f32 is there already
        return result.rows

    wanted = rows(sequences=1)
    monkeypatch.setattr(quality, "_KEPT_BYTES", 1)  # the caches alternate at every step
    for got in (rows(sequences=1), rows(sequences=2), rows()):
        for one, other in zip(got, wanted, strict=True):
            assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
            assert one.kl_mean == pytest.approx(other.kl_mean, rel=0.02)


def test_limits(tiny):
    got = compare_caches(tiny, IDS, [], window=64, prefix=10, max_tokens=60)
    assert (got.tokens, got.windows) == (60, 2)  # 53 + 7
    assert compare_caches(tiny, IDS[:12], [], window=64, prefix=10).tokens == 1
    assert compare_caches(tiny, IDS[: 64 + 11], [], window=64, prefix=10).windows == 1  # the rest is too short
    assert compare_caches(tiny, IDS, []).window == 256  # what the model was trained on


def test_text_opens_every_window_with_bos(tiny):
    text = "the cat sat on the mat and " * 4
    with slimrt.Model(tiny) as model:
        ids = model.tokenize(text)
    assert ids[0] == BOS
    got = compare_caches(tiny, text, [], window=32, prefix=4)
    windows = [[BOS, *ids[at : at + 31]] for at in range(1, len(ids), 31)]
    nll, _ = plain(tiny, windows, 4, "kv", "f32")
    assert (got.tokens, got.rows[0].perplexity) == (len(nll), pytest.approx(np.exp(nll.mean()), rel=1e-5))


def test_bytes_are_the_planners(tiny):
    got = compare_caches(tiny, IDS, ["kv:q8", "k:f16"], window=40, prefix=4, sequences=3)
    for row in got.rows:
        plan = slimrt.plan(tiny, n_ctx=40, cache=row.modes[0], cache_type=row.types[0]).asked
        assert (row.bytes_per_token, row.cache_bytes) == (plan.bytes_per_token, plan.cache_bytes)
        assert row.cache_bytes == 64 * row.bytes_per_token  # two blocks
    assert [row.extra_weights for row in got.rows] == [0, 0, 2 * 32 * 32 * 4]  # W_KV of two layers, float32


def test_the_front():
    def row(cache, size, kl):
        return slimrt.CacheQuality(cache=cache, modes=(), types=(), ranks=(), residual_types=(), perplexity=1.0,
                                   kl_mean=kl, kl_p99=kl, kl_max=kl, same_top=1.0, bytes_per_token=size,
                                   cache_bytes=0, extra_weights=0)  # fmt: skip

    rows = (row("a", 8, 0.0), row("b", 4, 1e-8), row("c", 4, 1e-7), row("d", 5, 1e-8), row("e", 2, float("inf")))
    comparison = slimrt.CacheComparison("m", 1, 1, 8, 1, 1, rows)
    assert [one.cache for one in comparison.front()] == ["e", "b", "a"]
    assert comparison.to_dict()["front"] == ["e", "b", "a"] and comparison.to_dict()["rows"][4]["kl_mean"] is None


def test_divergence_keeps_its_digits():
    """Two classes with probabilities 1/2 +- e: KL from 1/2 is -log(1 - 4 e^2) / 2 = 2 e^2 + 4 e^4 + ..."""
    for e in (1e-1, 1e-2, 1e-3):
        odds = np.float32(np.log((0.5 + e) / (0.5 - e)))
        exact = 0.5 * np.tanh(np.float64(odds) / 2)  # the e that the rounded odds stand for
        nll, kl = surprise_and_divergence(np.array([[odds, 0]], np.float32), np.zeros((1, 2), np.float32), [0])
        assert kl[0] == pytest.approx(-0.5 * np.log1p(-4 * exact**2), rel=1e-9)
        assert nll[0] == pytest.approx(-np.log(0.5 + exact), rel=1e-12)


def test_divergence_far_apart_and_broken():
    far = np.array([[800, 0, -800]], np.float32)
    near = np.array([[0, 0, 0]], np.float32)
    assert surprise_and_divergence(near, far, [0])[1][0] == pytest.approx(np.log(3), rel=1e-12)
    assert surprise_and_divergence(far, near, [1])[1][0] == pytest.approx(800 - np.log(3), rel=1e-12)
    for value in (np.inf, -np.inf, np.nan):
        nll, kl = surprise_and_divergence(np.array([[0, value]], np.float32), np.zeros((1, 2), np.float32), [0])
        assert np.isinf(nll[0]) and np.isinf(kl[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": IDS[:11]}, "the text has 11 tokens; with a prefix of 10 it needs 12"),
        ({"text": ""}, "the text has 1 tokens"),
        ({"text": [999]}, "token id 999"),
        ({"window": 300}, "from 3 to the 256 tokens"),
        ({"prefix": 63}, "prefix must be from 1 to 62"),
        ({"prefix": 0}, "prefix must be from 1"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"sequences": 0}, "sequences must be at least 1"),
    ],
)
def test_what_is_refused(tiny, options, said):
    arguments = {"text": IDS, "window": 64, "prefix": 10} | options
    with pytest.raises(ValueError, match=said):
        compare_caches(tiny, arguments.pop("text"), [], **arguments)


def test_caches_that_are_refused(tiny):
    with pytest.raises(slimrt.CacheUnsupportedError, match="layer 0"):
        compare_caches(tiny, IDS, ["x"])
    with pytest.raises(slimrt.WontFitError, match="3 caches at once need"):
        compare_caches(tiny, IDS, ["kv:f16", "k"], memory_limit="1KiB")


def test_caches_that_were_loaded_are_closed_where_a_later_one_fails(tiny, monkeypatch):
    loaded, runtime_load = [], quality.load

    def load(*arguments, **options):
        if loaded:
            raise MemoryError
        loaded.append(runtime_load(*arguments, **options))
        return loaded[0]

    monkeypatch.setattr(quality, "load", load)
    with pytest.raises(MemoryError):
        compare_caches(tiny, IDS, ["k"])
    with pytest.raises(ValueError, match="the model is closed"), loaded[0].use():
        pass


# ---------------------------------------------------------------- text
def test_a_file_in_pieces(tiny, tmp_path, monkeypatch):
    """Characters of several bytes, lines and none: the pieces add up, and the seams are at lines where there are."""
    text = "a line\n" + "é€😀 words and words\n" * 5 + "x" * 100 + " y" * 20
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    source = slimrt.ModelSource(tiny)
    whole = file_ids(source.tokenizer, file)
    assert whole.tolist() == source.tokenizer.encode(text)
    for size in (1, 2, 7, 64):
        monkeypatch.setattr("slimrt.modelfile.text._PIECE", size)
        pieces = list(text_pieces(file))
        marked = tmp_path / "marked.txt"
        marked.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        assert "".join(text_pieces(marked)) == text
        assert "".join(pieces) == text and len(pieces) > 3
    first = next(text_pieces(file))
    assert first.endswith("\n")
    assert file_ids(source.tokenizer, file, 4).tolist() == whole[:4].tolist()
    assert compare_caches(tiny, file, [], window=16, prefix=2, max_tokens=20).tokens == 20


def test_only_as_much_is_read_as_is_needed(tiny, tmp_path, monkeypatch):
    """The text is broken further on, where nobody looks."""
    file = tmp_path / "text.txt"
    file.write_bytes(b"the cat sat\n" * 50 + b"\xff")
    monkeypatch.setattr("slimrt.modelfile.text._PIECE", 64)
    assert compare_caches(tiny, file, [], window=16, prefix=2, max_tokens=20).tokens == 20
    with pytest.raises(ValueError, match=r"text.txt: not UTF-8 text: invalid start byte at byte 600"):
        compare_caches(tiny, file, [], window=16, prefix=2)
    file.write_bytes("the cat sat €".encode()[:-1])
    with pytest.raises(ValueError, match="at byte 12"):
        compare_caches(tiny, file, [])
