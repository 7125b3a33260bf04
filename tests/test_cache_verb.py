"""slimrt cache: what slimrt keeps on the disk, and removing it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import slimrt
from conftest import GOLDEN
from slimrt.modelfile.kept import kept
from slimrt.plumbing.files import cache_directory, state_directory

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.fixture
def cache(tmp_path, monkeypatch, clean_environment):
    """An empty cache."""
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(cache, tmp_path):
    """A cache with a model made from tmp_path/model, measurements, what a killed conversion left, and a stranger's."""
    slimrt.ModelSource(shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "model"), show_progress=False)
    for name in ("machine-cpu-1234abcd-avx2.json", ".gone-0123456789abcdef.gguf.89abcdef.partial", "notes.txt"):
        (cache / name).write_text("12345")
    two_days_ago = time.time() - 2 * 86400 - 5
    os.utime(cache / "machine-cpu-1234abcd-avx2.json", (two_days_ago, two_days_ago))
    return cache


def test_where_files_are_kept(tmp_path, monkeypatch, clean_environment):
    """XDG's variables count if they are absolute. A user without a home keeps nothing and is told of no fault."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for said, folder in (("", ".cache"), ("odd/place", ".cache"), (str(tmp_path / "own"), "own")):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert cache_directory() == tmp_path / folder / "slimrt"
    monkeypatch.setenv("XDG_STATE_HOME", "odd")
    assert state_directory() == tmp_path / ".local/state/slimrt"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert kept() == [] and not cache_directory().exists()
    with pytest.raises(OSError, match="SLIMRT_CACHE_DIR names another place"):
        slimrt.ModelSource(GOLDEN / "llama_gqa_tied", show_progress=False)


def names(cache: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in cache.iterdir()}


def test_list(filled, run, tmp_path):
    code, out, err = run("cache", "list")
    assert (code, err) == (0, "")
    assert out.startswith(f"{filled}: 3 files, 174.7 KiB\n") and "notes.txt" not in out
    model = next(line for line in out.splitlines() if line.startswith("model-"))
    assert "174.7 KiB" in model and " second" in model and model.endswith(str(tmp_path / "model"))
    machine = next(line for line in out.splitlines() if line.startswith("machine-"))
    assert machine.endswith("5 B     2 days  measurements")
    assert "Hugging Face are in its own cache" in out.splitlines()[-1]
    data = json.loads(run("cache", "list", "model", "--json")[1])
    assert data["folder"] == str(filled) and [one["source"] for one in data["files"]] == [str(tmp_path / "model")]


def test_a_cache_that_cannot_be_made(cache, run, tmp_path):
    """The way out is named, and so is what verbs there are."""
    cache.write_text("no folder")
    code, _, err = run("plan", shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "model"))
    assert code == 1 and "SLIMRT_CACHE_DIR names another place" in err and str(cache) in err
    assert run("cache", "--help")[1].startswith("usage: slimrt cache list|clear [NAME] [flags]\n")
    code, _, err = run("cache")
    assert code == 2 and "are required: list|clear (" in err


def test_an_empty_cache(cache, run):
    assert run("cache", "list")[1].startswith(f"{cache}: 0 files, 0 B\n")
    assert run("cache", "clear") == (0, "removed 0 files, 0 B\n", "")
    code, _, err = run("cache", "clear", "none", "--yes")
    assert code == 1 and f"none is not in {cache}; there is nothing" in err


def test_clear_takes_what_is_named(filled, run, tmp_path):
    for name in ("model", str(tmp_path / "model"), kept()[-1].path.name):
        slimrt.ModelSource(tmp_path / "model", show_progress=False)
        assert run("cache", "clear", name, "--yes") == (0, "removed 1 file, 174.7 KiB\n", "")
        assert names(filled) == {"machine", ".gone", "notes.txt"}
    code, _, err = run("cache", "clear", "model", "--yes")
    assert code == 1 and "there is .gone" in err


def test_clear_asks(filled, run, monkeypatch, capsys):
    before = names(filled)
    code, out, err = run("cache", "clear")
    assert code == 2 and "--yes removes 3 files" in err and names(filled) == before
    answers = iter(["\n", "no\n", "y\n"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: next(answers))
    for _ in range(2):
        code, out, err = run("cache", "clear")
        assert (code, out) == (1, "") and "remove 3 files, 174.7 KiB from" in err and names(filled) == before
    assert run("cache", "clear")[:2] == (0, "removed 3 files, 174.7 KiB\n")
    assert names(filled) == {"notes.txt"}


def test_what_a_conversion_is_writing_stays(filled, run):
    partial = filled / ".gone-0123456789abcdef.gguf.89abcdef.partial"
    with partial.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, out, err = run("cache", "clear", "--yes")
        assert code == 0 and "removed 2 files" in out and f"{partial.name} is being written and was not removed" in err
    assert partial.exists()
    assert "removed 1 file" in run("cache", "clear", "--yes")[1] and not partial.exists()


def test_a_directory_is_told_before_it_is_converted(cache, run, tmp_path):
    directory = shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "model")
    code, out, err = run("inspect", directory)
    assert code == 0 and out.startswith(f"{directory}: ")
    assert f"slimrt: converting model once, 172.9 KiB into {cache} (slimrt cache list shows it, SLIMRT_CACHE_DIR" in err
    assert "converting" not in run("inspect", directory)[2]
    shutil.rmtree(cache)
    assert run("inspect", directory, "-q")[2] == ""


def test_the_library_tells_the_log_alone(cache, capsys, caplog):
    caplog.set_level("INFO", logger="slimrt")
    slimrt.ModelSource(GOLDEN / "llama_gqa_tied", show_progress=False)
    assert capsys.readouterr() == ("", "") and "converting llama_gqa_tied once" in caplog.text


def test_room_is_looked_for_first(cache, run, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000}))
    code, _, err = run("inspect", GOLDEN / "llama_gqa_tied")
    assert code == 1 and "needs 172.9 KiB for the result, 1000 B free" in err and "converting" not in err
