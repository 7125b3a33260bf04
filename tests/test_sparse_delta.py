# SPDX-License-Identifier: Apache-2.0
"""A budget of squared softmax weights in slim modes: close to reading every row, refused where it has nothing to skip,
and found by a conversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slimrt
from slimrt.measure.quality import compare_caches

MODELS = Path(__file__).parent.parent / "models"


def logits(name: str, n: int, **options) -> tuple[np.ndarray, float]:
    """Of the last 40 of n tokens of a text, one a step; and the share of rows skipped."""
    with slimrt.Model(MODELS / name, n_ctx=n, n_threads=1, **options) as model:
        ids = model.tokenize((MODELS / "heldout.txt").read_text(encoding="utf-8"))[:n]
        done = model.generate(ids[: n - 40], max_tokens=5, temperature=0, ignore_eos=True)
        with model.session() as session:
            session.append(ids[: n - 40])
            rows = np.concatenate([session.append([one]) for one in ids[n - 40 :]]).astype(np.float64)
    return rows - rows.max(axis=1, keepdims=True), done.cache.skipped


def divergence(exact: np.ndarray, other: np.ndarray) -> float:
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (exact, other))
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


@pytest.mark.unsanitized  # test_sparse_means and test_kernels_sparing are not
@pytest.mark.parametrize(
    ("name", "cache"),
    [("tale-llama", "k+r:q8"), ("tale-llama", "k:f16"), ("tale-gpt2", "x:q8"), ("tale-neox", "xr:q8")],
)
def test_little_changes_and_much_is_skipped(name, cache):
    path, n = f"{name}.gguf", 250
    exact, none = logits(path, n, cache=cache, allow_lossy=True)
    assert none == 0
    for delta, most in ((1e-6, 1e-4), (0.01, 2e-3)):
        spared, skipped = logits(path, n, cache=cache, allow_lossy=True, sparse_delta=delta)
        found = divergence(exact, spared)
        print(f"{name} {cache}: sparse_delta {delta}: {skipped:.1%} skipped, KL {found:.1e}")
        assert found < most
    assert skipped > 0.2
    spared, skipped = logits(path, n, cache=cache, allow_lossy=True, sparse_threshold=1e-3)
    assert skipped > 0.05 and divergence(exact, spared) < 1e-4


def test_refused_where_it_has_nothing_to_skip():
    path = MODELS / "tale-llama.gguf"
    with pytest.raises(slimrt.CacheUnsupportedError, match=r"which cache mode 'kv' of layer 0 does not have"):
        slimrt.Model(path, cache="kv", sparse_delta=0.01)
    with pytest.raises(ValueError, match=r"two budgets: give one of them"):
        slimrt.Model(path, cache="k+r:q8", sparse_delta=0.01, sparse_threshold=0.01)
    for wrong in (1.0, -0.5, -1):
        with pytest.raises(ValueError, match=r"sparse_delta must be at least 0 and below 1"):
            slimrt.Model(path, sparse_delta=wrong)
    with pytest.raises(ValueError, match=r"let `slimrt convert --sparse` find one"):
        slimrt.Model(path, sparse_delta="auto")
    with pytest.raises(ValueError, match=r"sparse is for cache k, k\+r, x, xr, latent and auto, not for 'kv'"):
        slimrt.convert(path, "nowhere.gguf", cache="kv", sparse=True)


@pytest.mark.unsanitized  # three minutes there; with deltas that are given it runs the same code above
def test_a_conversion_finds_a_delta(tmp_path, run):
    """And what it says is so, within twice as much on another text: the file, asked for it, diverges by no more."""
    out = tmp_path / "sparse.gguf"
    source = MODELS / "tale-llama.gguf"
    text = str(MODELS / "calibration.txt")
    found = slimrt.convert(source, out, cache="k+r", cache_type="q8", calibration=text, sparse=True, progress=False)
    assert found.sparse is not None and not found.sparse.reason
    assert 0 < found.sparse.delta <= 0.03 and found.sparse.tried[found.sparse.delta] <= 1e-4
    assert all(kl > 1e-4 for delta, kl in found.sparse.tried.items() if delta > found.sparse.delta)
    assert f"sparse_delta {found.sparse.delta}: adds" in found.table()
    with slimrt.Model(out, sparse_delta="auto") as model:
        assert model.generate(text[:1] * 300, max_tokens=5, ignore_eos=True).cache.skipped > 0.3
    with slimrt.Model(out) as model:  # off unless asked for
        assert model.generate("The baker", max_tokens=5).cache.skipped == 0
    choices = [slimrt.cache.config.CacheChoice.of(sparse_delta=one) for one in (0.0, found.sparse.delta)]
    _, whole, spared = compare_caches(out, MODELS / "heldout.txt", choices, window=1024, max_tokens=500).rows
    assert spared.kl_mean - whole.kl_mean < 2e-4
    assert run("generate", out, "-p", "Once", "-n", "4", "--sparse-delta", "auto")[0] == 0
    code, _, error = run("generate", source, "-p", "Once", "-n", "4", "--sparse-delta", "0.01")
    assert code == 1 and "does not have: use one that does, or sparse_delta 0" in error


@pytest.mark.unsanitized
def test_a_file_takes_its_place_with_the_delta_in_it(tmp_path, monkeypatch):
    """What was there stays until then, and where measuring fails."""
    from slimrt.converter import convert, sparse

    out, short, seen = tmp_path / "sparse.gguf", tmp_path / "short.txt", []
    short.write_text("The baker went to the mill. " * 20)
    find = sparse.find_delta

    def look(path, *arguments, **options):
        seen.append((path == out, out.exists() and out.read_bytes()))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return find(path, *arguments, **options)

    monkeypatch.setattr(convert, "find_delta", look)
    settings = {"cache": "k+r", "cache_type": "q8", "calibration": short, "sparse": True, "progress": False}
    slimrt.convert(MODELS / "tale-llama.gguf", out, **settings)
    first = out.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        slimrt.convert(MODELS / "tale-llama.gguf", out, **settings)
    assert seen == [(False, False), (False, first)] and out.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "sparse.gguf"]


def test_where_no_delta_is_found_the_report_says_why(tmp_path):
    """The file says 0 then, and is read whole."""
    out, short = tmp_path / "short.gguf", tmp_path / "short.txt"
    short.write_text("The baker went to the mill. " * 20)
    found = slimrt.convert(
        MODELS / "tale-llama.gguf", out, cache="k+r", calibration=str(short), sparse=True, progress=False
    )
    assert found.sparse.delta == 0 and found.sparse.reason == "no text is long enough to measure on"
    assert found.sparse.reason in found.table()
    with slimrt.Model(out, sparse_delta="auto") as model:
        assert model.generate("The baker", max_tokens=40, ignore_eos=True).cache.skipped == 0
