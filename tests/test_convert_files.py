# SPDX-License-Identifier: Apache-2.0
"""A conversion that fails leaves nothing and loses nothing; converted directories are kept and found again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import slimrt
from conftest import GOLDEN, values_of
from slimrt.converter import convert as tool
from slimrt.converter.quantize import weight_type
from slimrt.modelfile import reading
from slimrt.modelfile.gguf import ModelData, read_gguf, uint32
from slimrt.plumbing.files import writing
from tiny_model import write_tiny

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("cache", [None, "k"])
def test_nothing_is_left_and_nothing_is_lost(cache, error, convert, tmp_path, monkeypatch):
    source, out = convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf"
    out.write_text("the old target")
    before, written = source.read_bytes(), []

    def write(writer, tensor):
        written.append(tensor)
        if len(written) == 5:
            raise error
        return plain_write(writer, tensor)

    plain_write = gguf.GGUFWriter.write_tensor_data
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
    with pytest.raises(type(error)) as raised:
        tool.convert(source, out, cache=cache, progress=False)
    assert str(error) in str(raised.value) and len(written) == 5
    assert out.read_text() == "the old target" and source.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
    error.__traceback__ = None  # pytest keeps the error to the end, and it the model


@pytest.mark.parametrize("cache", [None, "k"])
def test_a_full_disk_is_seen_before_anything_is_written(cache, convert, tmp_path, monkeypatch):
    source, usage = convert(GOLDEN / "llama_mha"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(tool, "fold_model", lambda *arguments, **options: pytest.fail("folded for nothing"))
    with pytest.raises(OSError, match="KiB for the result, 1000 B free"):
        tool.convert(source, tmp_path / "out.gguf", cache=cache, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_to_calibrate_is_said_of_the_target(tmp_path, monkeypatch):
    source, usage = write_tiny(tmp_path / "tiny.gguf"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match="needs .* MiB for activations") as raised:
        tool.convert(source, tmp_path / "out.gguf", cache="k", progress=False)
    assert raised.value.filename == str(tmp_path / "out.gguf")  # not a folder that is gone by now


RUN = "import sys; from slimrt.converter.convert import convert; convert(sys.argv[1], sys.argv[2], cache='k')"


def test_a_write_that_fails_leaves_nothing(convert, tmp_path):
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-c", RUN, convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf"]
    done = subprocess.run(command, preexec_fn=limit_files, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and f"'{tmp_path / 'out.gguf'}'" in said and "make room (or raise ulimit -f" in said
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_names_the_file(convert, tmp_path, monkeypatch):
    def write(writer, tensor):
        raise OSError("589824 requested and 49968 written")  # what NumPy makes of a full disk

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
    with pytest.raises(OSError, match="not written completely: make room .*ulimit -f.*out.gguf"):
        tool.convert(convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf", progress=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PermissionError, match="^x: no permission$"), writing(tmp_path / "out.gguf"):
        raise PermissionError("x: no permission")


def test_what_is_no_plain_file_is_never_replaced(convert, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OSError, match="not a plain file"):
            tool.convert(convert(GOLDEN / "llama_mha"), target, progress=False)
        assert not target.is_file() and target.exists()


@pytest.mark.parametrize("cache", [None, "k"])
@pytest.mark.parametrize("exists", [False, True])
def test_what_a_link_leads_to_is_written(exists, cache, convert, tmp_path):
    """The link stays; everything is made where the file is, for another disk may be there."""
    there, link = tmp_path / "there", tmp_path / "link.gguf"
    there.mkdir()
    link.symlink_to("there/file.gguf")
    if exists:
        link.write_text("the old target")
        with pytest.raises(FileExistsError, match="link.gguf exists"):
            tool.convert(convert(GOLDEN / "llama_mha"), link, progress=False, overwrite=False)
    os.chmod(tmp_path, 0o555)
    try:
        assert tool.convert(convert(GOLDEN / "llama_mha"), link, cache=cache, progress=False).path == link
    finally:
        os.chmod(tmp_path, 0o755)
    assert os.readlink(link) == "there/file.gguf" and read_gguf(there / "file.gguf").tensors
    assert sorted(tmp_path.iterdir()) == [link, there] and list(there.iterdir()) == [there / "file.gguf"]


def test_links_that_lead_nowhere(convert, tmp_path):
    one, two, source = tmp_path / "one.gguf", tmp_path / "two.gguf", convert(GOLDEN / "llama_mha")
    one.symlink_to(two)
    two.symlink_to(one)
    with pytest.raises(OSError, match="symbolic links.*one.gguf"):
        tool.convert(source, one, progress=False)
    assert sorted(tmp_path.iterdir()) == [one, two] and one.is_symlink() and two.is_symlink()
    one.unlink()
    one.symlink_to("none/file.gguf")
    with pytest.raises(FileNotFoundError, match="none: no such directory"):
        tool.convert(source, one, progress=False)
    two.unlink()
    two.symlink_to(source)
    with pytest.raises(ValueError, match="two.gguf is the source itself"):
        tool.convert(source, two, progress=False)


def test_a_link_to_an_open_file_that_has_no_name_is_no_plain_file(convert, tmp_path):
    with (tmp_path / "gone").open("wb") as file:
        (tmp_path / "gone").unlink()
        with pytest.raises(OSError, match="is not a plain file"):
            tool.convert(convert(GOLDEN / "llama_mha"), f"/proc/self/fd/{file.fileno()}", progress=False)


def test_names_that_cannot_be_written(convert, tmp_path):
    """The engine reads the result, and has names in UTF-8; the file that stands in for it has a longer name."""
    with pytest.raises(ValueError, match="not UTF-8 here"):
        tool.convert(convert(GOLDEN / "llama_mha"), tmp_path / "a\udcff.gguf", progress=False)
    for cache, length in ((None, 245), ("k", 255), (None, 300)):
        name = "n" * length
        with pytest.raises(OSError, match="name too long") as raised:
            tool.convert(convert(GOLDEN / "llama_mha"), tmp_path / name, cache=cache, progress=False)
        assert raised.value.filename == str(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_would_fail_in_the_end_fails_at_once(convert, tmp_path, monkeypatch):
    source, out, binary = convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf", tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    monkeypatch.setattr(tool, "source_hash", lambda *arguments: pytest.fail("read the whole source"))
    for options, error, said in [
        ({"cache": "kk"}, ValueError, "unknown cache mode"),
        ({"cache": "e"}, ValueError, "'e' is a mode of cross-attention: give it as cross"),
        ({"cache": "v"}, slimrt.CacheUnsupportedError, "layer 0"),
        ({"verify": tmp_path / "none"}, FileNotFoundError, "none: no such text file"),
        ({"cache": "k", "calibration": tmp_path / "none"}, FileNotFoundError, "none: no such text file"),
        ({"cache": "kv", "calibration": binary}, ValueError, "this conversion has none"),
    ]:
        with pytest.raises(error, match=said):
            tool.convert(source, out, progress=False, **options)
        assert list(tmp_path.iterdir()) == [binary]


def test_a_named_text_is_used_or_refused(convert, tmp_path):
    source, text = convert(GOLDEN / "llama_mha"), tmp_path / "text"  # this model has no tokenizer
    text.write_text("abc")
    with pytest.raises(slimrt.UnsupportedError, match="calibration without a tokenizer.*the GGUF has no tokenizer"):
        tool.convert(source, tmp_path / "out.gguf", cache="k", calibration=text, progress=False)
    tiny = write_tiny(tmp_path / "tiny.gguf")
    text.write_bytes(b"\xff\xfe")
    for options in ({"cache": "k", "calibration": text}, {"verify": text}):
        with pytest.raises(ValueError, match="text: not UTF-8 text"):
            tool.convert(tiny, tmp_path / "out.gguf", progress=False, **options)
        assert not (tmp_path / "out.gguf").exists()


def test_no_more_is_read_to_verify_than_is_compared(tmp_path):
    tiny, text = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "text"
    text.write_bytes(b"a line of words\n" * 100_000 + b"\xff")
    report = tool.convert(tiny, tmp_path / "out.gguf", verify=text, progress=False)
    assert report.verify is not None and report.verify.tokens == 129


@pytest.mark.parametrize("name", ["calibration", "verify"])
def test_a_text_that_is_read_is_not_replaced(name, convert, tmp_path):
    text = tmp_path / "text"
    text.write_text("abc")
    with pytest.raises(ValueError, match="text is the text to read; write to another file"):
        tool.convert(convert(GOLDEN / "llama_mha"), text, cache="k", progress=False, **{name: text})
    assert text.read_text() == "abc"


def test_ctrl_c_leaves_nothing(convert, tmp_path):
    slow = "import gguf, time; w = gguf.GGUFWriter.write_tensor_data\n"
    slow += "gguf.GGUFWriter.write_tensor_data = lambda s, t: (print('writing', flush=True), time.sleep(9), w(s, t))\n"
    command = [sys.executable, "-c", slow + RUN, convert(GOLDEN / "llama_mha"), tmp_path / "out.gguf"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert "KeyboardInterrupt" in errors and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the cache of converted models
def test_a_directory_is_converted_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "cache"))
    directory = Path(shutil.copytree(GOLDEN / "llama_gqa_tied", tmp_path / "model"))
    first = reading.cached_gguf(directory)
    stamp = first.stat().st_mtime_ns
    assert first.parent == tmp_path / "cache" and first.name.startswith("model-")
    assert reading.cached_gguf(directory) == first and first.stat().st_mtime_ns == stamp
    (directory / "config.json").write_text((directory / "config.json").read_text() + "\n")
    second = reading.cached_gguf(directory)
    assert second != first and sorted((tmp_path / "cache").glob("*.gguf")) == sorted([first, second])
    one, two = values_of(first), values_of(second)
    assert all(np.array_equal(one[name], two[name]) for name in one)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert reading.cached_gguf(directory) not in (first, second)


def test_the_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SLIMRT_CACHE_DIR", "/a/b")
    assert reading.cache_directory() == Path("/a/b")
    monkeypatch.delenv("SLIMRT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert reading.cache_directory() == Path("/c/slimrt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert reading.cache_directory() == Path.home() / ".cache" / "slimrt"


def test_processes_may_convert_at_once(tmp_path):
    command = [
        sys.executable,
        "-c",
        "import sys; from slimrt.modelfile.reading import cached_gguf as f; print(f(sys.argv[1]))",
    ]
    environment = os.environ | {"SLIMRT_CACHE_DIR": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([*command, GOLDEN / "llama_mha"], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate()[0].strip() for process in running}
    assert len(paths) == 1 and sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".gguf", ".source"]
    assert slimrt._core.GgufFile(paths.pop()).tensors()["token_embd.weight"] == ("f32", (101, 48))


# ---------------------------------------------------------------- the command
def test_the_command_says_sizes_and_types_before_and_after(run, tiny, tmp_path):
    """And where the file is; the name of the model stays."""
    out = tmp_path / "out.gguf"
    code, said, err = run("convert", tiny, "-o", out, "--outtype", "q8_0")
    assert (code, err) == (0, "") and out.stat().st_size < tiny.stat().st_size / 2
    assert said.splitlines()[:2] == [str(out), f"f32 124.8 KiB -> q8_0 {out.stat().st_size / 1024:.1f} KiB"]
    report = json.loads(run("convert", GOLDEN / "llama_mha", "-o", out, "--force", "--outtype", "bf16", "--json")[1])
    files = [path for path in (GOLDEN / "llama_mha").iterdir() if path.suffix in (".json", ".safetensors")]
    assert report["before"] == {"type": "f32", "bytes": sum(path.stat().st_size for path in files)}
    assert report["after"] == {"type": "bf16", "bytes": out.stat().st_size}
    assert read_gguf(out).value("general.name") == "llama_mha"
    slimrt.convert(out, tmp_path / "again.gguf", outtype="q8_0", progress=False)
    assert read_gguf(tmp_path / "again.gguf").value("general.name") == "llama_mha"


def test_what_a_file_is_of_is_read_from_its_tensors_where_it_does_not_say(tiny):
    model = read_gguf(tiny)
    assert weight_type(ModelData({}, model.tensors)) == "f32"
    assert weight_type(model.with_metadata({"general.file_type": uint32(15)})) == "q4_k_m"
    assert weight_type(model.with_metadata({"general.file_type": uint32(1024)})) == "f32"  # guessed


def test_the_command_replaces_a_file_only_when_told_to(run, tiny, tmp_path):
    out = tmp_path / "README.md"
    out.write_text("mine")
    code, said, err = run("convert", tiny, "-o", out)
    assert (code, said) == (1, "") and "README.md exists: name another file, or replace it: --force" in err
    assert out.read_text() == "mine"
    assert run("convert", tiny, "-o", out, "--force")[0] == 0 and read_gguf(out).tensors


def test_a_session_replaces_sessions_alone(run, tiny, tmp_path):
    out = tmp_path / "README.md"
    out.write_text("mine")
    command = ("generate", tiny, "-p", "a", "-n", 1, "--save-session", out)
    code, said, err = run(*command)
    assert (code, said) == (1, "") and "would be replaced, and is no session: name another file" in err
    assert out.read_text() == "mine"
    assert run(*command, "--force")[0] == 0 and out.read_bytes().startswith(b"SLIMRTSE")
    assert run(*command)[0] == 0
    out.write_bytes(b"")  # as mktemp makes it
    assert run(*command)[0] == 0


def test_commands_write_what_a_link_leads_to(run, tiny, tmp_path):
    session, plot, link = tmp_path / "session", tmp_path / "plot.svg", tmp_path / "link.svg"
    link.symlink_to(session)
    assert run("generate", tiny, "-p", "a", "-n", 1, "--save-session", link)[0] == 0
    assert session.read_bytes().startswith(b"SLIMRTSE")
    link.unlink()
    link.symlink_to(plot)
    assert run("inspect", tiny, "--spectrum", link)[0] == 0
    assert plot.read_text().startswith("<?xml") and sorted(tmp_path.iterdir()) == [link, plot, session]
