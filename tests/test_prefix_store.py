# SPDX-License-Identifier: Apache-2.0
"""Prefixes on disk: used after a restart, by the same model and cache alone, and never when they are damaged."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, relative
from slimrt.generation import store as stores
from slimrt.generation.prefix import PrefixTree
from slimrt.generation.store import PrefixStore
from slimrt.runtime.session import Session
from test_prefix import LLAMA, MODELS, SAME, begun, continued, exact_llama, free_blocks, give, n_blocks, text

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

SIZE = 1 << 30
PROMPT = 130  # tokens, of which four blocks are written


class Served(slimrt.Model):
    """A model with a tree and a store, as a server has them."""

    def __init__(self, directory: Path, path: Path | None = None, size: int = SIZE, **options):
        super().__init__(
            path or exact_llama(), **{"n_ctx": 256, "n_seqs": 3, "cache_type": "f32", "progress": False} | options
        )
        self.store = PrefixStore(self._runtime, directory, size)
        self.tree = PrefixTree(self._runtime, self.store)

    def close(self) -> None:
        self.store.close()
        super().close()

    def reused(self, ids: list[int], key: str = "") -> int:
        session, found = begun(self, self.tree, ids, key)
        session.close()
        return found


def written(directory: Path, n: int = PROMPT, **options) -> list[Path]:
    """The files of a text, block after block."""
    with Served(directory, **options) as model:
        give(model, model.tree, text()[:n])
        model.tree.write()
    return sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def test_a_restart(tmp_path):
    with Served(tmp_path) as model:
        give(model, model.tree, text()[:PROMPT])
        give(model, model.tree, text()[:PROMPT], "key")
        assert model.store.files == 0
        model.tree.write()
        assert model.store.files == 8 and model.store.written == 256
        model.tree.write()
        assert model.store.written == 256  # they are there
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0
    with Served(tmp_path) as model:
        ids = [*text()[:PROMPT], 7, 8, 9]
        session, reused = begun(model, model.tree, ids)
        assert reused == 128 == model.store.loaded
        with Session.new(model._runtime) as fresh:
            assert relative(continued(session, ids), continued(fresh, ids)) < SAME
        session.close()
        assert model.reused(text()[:128]) == 96  # one token is to be computed
        assert model.reused([*text()[:70], 7]) == 64
        assert model.reused(ids, "key") == 128
        assert model.reused(ids, "other") == 0 and model.reused(text()[1:]) == 0
        assert free_blocks(model) == n_blocks(model)


def test_what_is_evicted_comes_back(tmp_path):
    """Its beginning is still in memory: the file of its end goes behind it."""
    with Served(tmp_path) as model:
        give(model, model.tree, text()[:PROMPT])
        assert model.tree.evict(3) == 3
        assert model.tree.held == (2, 64) and model.store.files == 2  # of the third block a part was there: none
        assert model.reused(text()[:PROMPT]) == 128 and model.store.loaded == 64
        full = text()[300:540], text()[600:840], text()[900:1140]
        for ids in full:
            while free_blocks(model) < 8:
                model.tree.evict(1)
            give(model, model.tree, ids)
        assert model.reused(text()[:PROMPT]) == 128  # for whose rows others go
        assert free_blocks(model) >= 4


@pytest.mark.parametrize(
    ("name", "kind", "files"), [("tale-llama", "kv:q4", 4), ("tale-neox", "xr:q8", 4), ("tale-llama", "kivi:q4", 1)]
)
def test_modes(name, kind, files, tmp_path):
    """To the bit what it was; rows that age in one file of the whole text."""
    options = {"path": MODELS / f"{name}.gguf", "cache": kind, "cache_type": "auto"}
    with Served(tmp_path, **options) as model:
        ids = [5 + id % (model.n_vocab - 5) for id in text()[:PROMPT]]
        with Session.new(model._runtime) as own:
            own.append(ids, last_only=True)
            own.truncate(128)
            wanted = continued(own, ids)
            give(model, model.tree, ids)
        assert model.tree.evict(99) > 0 and model.tree.held == (0, 0)
        assert model.store.files == files
        session, reused = begun(model, model.tree, ids)
        assert reused == 128 and np.array_equal(continued(session, ids), wanted)
        session.close()
        assert model.reused(ids[:128]) == (96 if files > 1 else 0)


@contextmanager
def full(model: Served, n: int) -> Iterator[None]:
    """The cache is full: of n texts of 90 tokens in the tree, and of sessions."""
    for i in range(n):
        give(model, model.tree, text()[100 * i :][:90])
    with ExitStack() as others:
        while free := free_blocks(model):
            other = others.enter_context(Session.new(model._runtime))
            other.append(text()[: min(32 * free, 255)], last_only=True)
        yield


def test_rows_that_age_in_a_full_cache(tmp_path):
    """What is cut to whole blocks to be written takes a block then, which ended the server."""
    options = {"path": LLAMA, "cache": "lowrank:q8", "cache_type": "auto", "cache_tokens": 512, "n_seqs": 6}
    with Served(tmp_path, **options) as model:
        with full(model, 1):
            assert model.tree.evict(9) > 0 and model.store.files == 1
        assert model.reused(text()[:90]) == 64
        with full(model, 2):
            model.tree.write()
        assert model.store.files == 2


def test_behind_a_window(convert, tmp_path):
    options = {"path": convert(GOLDEN / "mistral_window"), "n_ctx": 240, "n_batch": 16}
    ids = [3 + id % 90 for id in text()[:220]]
    with Served(tmp_path, **options) as model:
        give(model, model.tree, ids[:200])
        model.tree.write()
    with Served(tmp_path, **options) as model:
        session, reused = begun(model, model.tree, ids)
        assert reused == 192
        with Session.new(model._runtime) as fresh:
            assert relative(continued(session, ids), continued(fresh, ids)) < SAME


# ---------------------------------------------------------------- what must not be used
def test_other_models_and_caches(tmp_path, convert, caplog):
    """They are named, and not used; the names of their files are of them."""
    n_files = len(written(tmp_path))
    foreign = [
        ({"path": MODELS / "tale-hard.gguf"}, "another model, tale-llama"),
        ({"cache_type": "q8"}, "another cache, kv:f32"),
        ({"cache_type_k": "f32", "cache_type_v": "f16"}, "another cache, kv:f32"),
    ]
    for options, words in foreign:
        with caplog.at_level("INFO", "slimrt"), Served(tmp_path, **options) as model:
            assert model.reused([*text()[:PROMPT]]) == 0
            assert model.store.files == n_files
        assert f"{n_files} files" in caplog.text and words in caplog.text
        caplog.clear()
    with Served(tmp_path, n_ctx=128, n_seqs=4) as model:
        assert model.reused(text()[:100]) == 96  # another context, but the same rows


def test_other_rotary_frequencies(tmp_path, convert, caplog):
    """longrope has short and long factors and chooses by n_ctx."""
    path, ids = convert(GOLDEN / "phi3"), [3 + id % 90 for id in text()[:40]]
    with Served(tmp_path, path=path, n_ctx=48) as model:
        give(model, model.tree, ids)
        model.tree.write()
        assert model.store.files == 1
    with caplog.at_level("INFO", "slimrt"), Served(tmp_path, path=path, n_ctx=96) as model:
        assert model.reused(ids) == 0
    assert "rotary frequencies" in caplog.text


def test_another_fold(tmp_path, caplog):
    with Served(tmp_path, cache="k+r:q8", cache_type="auto") as model:
        give(model, model.tree, text()[:PROMPT])
        model.tree.write()
        assert model.store.files == 4
    options = {"cache": "k+r:q8", "cache_type": "auto", "calibration": MODELS / "heldout.txt"}
    with caplog.at_level("INFO", "slimrt"), Served(tmp_path, **options) as model:
        assert model.reused(text()[:PROMPT]) == 0
    assert "folded otherwise" in caplog.text


def test_damaged_files(tmp_path, caplog):
    """A bit, a cut, an empty file, one that took another's name: told in a sentence, removed, and the rest is used."""
    blocks = written(tmp_path / "good")
    good = [path.read_bytes() for path in blocks]
    rng = np.random.default_rng(0)
    bits = [0, 3, 9, 13, 17, 40, len(good[1]) - 1, *rng.integers(0, len(good[1]), 12).tolist()]
    damages = [good[1][:at] + bytes([good[1][at] ^ 1 << int(rng.integers(8))]) + good[1][at + 1 :] for at in bits]
    damages += [b"", good[1][:10], good[1][:300], good[1][:-1], good[1] + b"x", good[0], good[2]]
    with Served(tmp_path / "good") as model:
        for bad in damages:
            (tmp_path / "good" / blocks[1].name).write_bytes(bad)
            before = model.store.damaged
            with caplog.at_level("WARNING", "slimrt"):
                assert model.reused(text()[:PROMPT]) == 32
            assert model.store.damaged == before + 1 and len(caplog.records) == 1
            assert blocks[1].name in caplog.text and not blocks[1].exists()
            caplog.clear()
            give(model, model.tree, text()[:PROMPT])
            model.tree.write()
            model.tree.clear()
            assert model.reused(text()[:PROMPT]) == 128
        assert free_blocks(model) == n_blocks(model)


def test_files_that_are_gone(tmp_path):
    blocks = written(tmp_path)
    with Served(tmp_path) as model:
        blocks[2].unlink()
        assert model.reused(text()[:PROMPT]) == 64
        assert model.store.files == 3 and model.store.damaged == 0


def test_a_directory_is_one_process_s(tmp_path):
    with Served(tmp_path) as model:
        with pytest.raises(OSError, match="another process"):
            PrefixStore(model._runtime, tmp_path, SIZE)
    with slimrt.Model(LLAMA, n_ctx=64) as model:
        PrefixStore(model._runtime, tmp_path, SIZE).close()
        with pytest.raises(ValueError, match="positive"):
            PrefixStore(model._runtime, tmp_path, 0)
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to("nowhere")
        for name in ("file", "link"):
            with pytest.raises(NotADirectoryError, match=rf"{name} is not a directory: name one to keep prefixes in"):
                PrefixStore(model._runtime, tmp_path / name, SIZE)


# ---------------------------------------------------------------- room
def sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_the_least_recently_used_files_go(tmp_path):
    size = written(tmp_path / "one", 64)[0].stat().st_size
    shutil.rmtree(tmp_path / "one")
    cap = 6 * size + size // 2
    with Served(tmp_path, size=cap) as model:
        for begin in (0, 300):
            give(model, model.tree, text()[begin : begin + 96])
            model.tree.evict(9)
        assert model.store.files == 6 and model.reused(text()[:97]) == 96
        give(model, model.tree, text()[600:664])
        model.tree.evict(9)
        assert model.store.bytes == sizes(tmp_path) <= cap
        # of the text that was not used since, its end
        assert [model.reused(text()[begin : begin + 97]) for begin in (0, 300, 600)] == [96, 32, 64]
    with Served(tmp_path, size=3 * size + 1) as model:  # the order is that of the files
        assert [model.reused(text()[begin : begin + 97]) for begin in (0, 300, 600)] == [0, 32, 64]
        assert model.store.bytes == sizes(tmp_path)
    with Served(tmp_path, size=100) as model:
        give(model, model.tree, text()[:96])
        model.tree.write()
        assert model.store.files == 0 and sizes(tmp_path) == 0


def test_a_full_disk_is_told_of_once(tmp_path, monkeypatch, caplog):
    with Served(tmp_path) as model:
        give(model, model.tree, text()[:PROMPT])

        def full(source, target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched, caplog.at_level("WARNING", "slimrt"):
            patched.setattr(stores.os, "replace", full)
            assert model.tree.evict(3) == 3
            assert model.tree.evict(9) == 2
        assert len(caplog.records) == 1 and "the disk is full" in caplog.text and str(tmp_path) in caplog.text
        assert not list(tmp_path.iterdir()) and model.store.files == model.store.bytes == 0
        give(model, model.tree, text()[:PROMPT])
        model.tree.write()
        assert model.store.files == 4  # there is room again


def test_files_that_cannot_be_removed_stop_no_text(tmp_path, monkeypatch, caplog):
    """As in a directory that became another user's: no room is made then, which is told of once."""
    with Served(tmp_path) as model:
        give(model, model.tree, text()[:PROMPT])
        model.tree.write()
        model.store._size = model.store.bytes
        give(model, model.tree, text()[300 : 300 + PROMPT])

        def kept(path, missing_ok=False):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

        with monkeypatch.context() as patched, caplog.at_level("WARNING", "slimrt"):
            patched.setattr(Path, "unlink", kept)
            model.tree.write()
        assert len(caplog.records) == 1 and "not written there: Operation not permitted" in caplog.text
        assert model.store.files == len(list(tmp_path.iterdir())) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_disk_that_takes_a_part(tmp_path, monkeypatch):
    """The bytes themselves are refused, not the name."""
    with Served(tmp_path) as model:
        give(model, model.tree, text()[:PROMPT])
        really = os.open
        monkeypatch.setattr(
            stores.os, "open", lambda path, *rest: really("/dev/full" if "partial" in str(path) else path, *rest)
        )
        model.tree.write()
        assert model.store.files == 0 and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- whether it pays
def test_loaded_where_it_is_faster_than_to_compute(tmp_path):
    blocks = written(tmp_path)
    with Served(tmp_path) as model:
        model.store.prefill_rate = 1e12
        assert model.reused(text()[:PROMPT]) == 128  # the disk is not measured yet
        assert model.store.disk_rate > 0
        assert model.reused(text()[:PROMPT]) == 0
        model.store.prefill_rate = 1e-3
        assert model.reused(text()[:PROMPT]) == 128
        per_token = blocks[0].stat().st_size / 32
        model.store.disk_rate, model.store.prefill_rate = 100 * per_token, 101.0
        assert model.reused(text()[:PROMPT]) == 0
        assert model.reused(text()[:PROMPT]) == 128  # each refusal raises what the disk is thought to reach


# ---------------------------------------------------------------- killed
CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_prefix_store import Served, stores, text
from test_prefix import give
directory, renames = Path(sys.argv[1]), int(sys.argv[3])
with Served(directory, n_ctx=512, n_seqs=2) as model:
    give(model, model.tree, text()[:480])
    really, left = os.replace, [renames]
    def replace(partial, path):
        left[0] -= 1
        if left[0] == 0:
            os.truncate(partial, os.path.getsize(partial) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        really(partial, path)
    stores.os.replace = replace
    print("ready", flush=True)
    while True:
        model.tree.write()
        for path in directory.glob("*-*"):
            path.unlink()
            model.store._forget(path.name)
"""


@pytest.mark.parametrize("renames", [1, 4, 0])
def test_killed_while_it_writes(renames, tmp_path):
    """With a half of a file written, and wherever it was (0): the next start uses whole files alone, and leaves nothing
    behind."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent), str(renames)], stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        if renames == 0:
            time.sleep(0.03)
            child.kill()
    if renames:
        assert sum(path.name.endswith(".partial") for path in tmp_path.iterdir()) == 1
    with Served(tmp_path, n_ctx=512, n_seqs=2) as model:
        assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        ids = text()[:480]
        session, reused = begun(model, model.tree, ids)
        assert model.store.damaged == 0 and model.store.files == max(0, renames - 1) or renames == 0
        with Session.new(model._runtime) as fresh:
            assert relative(continued(session, ids, 0), continued(fresh, ids, 0)) < SAME
