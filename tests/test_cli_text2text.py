# SPDX-License-Identifier: Apache-2.0
"""slimrt text2text and translate, with scripted engines."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager

import pytest

from scripted import scripted_model
from slimrt.cli import main
from test_text2text import INFO as T5_INFO
from test_text2text import path as t5_path  # noqa: F401  a fixture
from test_text2text import reversing
from test_transcribe import ScriptedEngine

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def test_text2text_and_translate(opened, t5_path, capsys, tmp_path, monkeypatch):  # noqa: F811
    model, seen = opened(t5_path, lambda n_seqs: ScriptedEngine(reversing, n_seqs=n_seqs, **T5_INFO))
    assert main(["text2text", model, "-p", "a b c"]) == 0
    assert capsys.readouterr().out == "c b a\n" and seen["n_seqs"] == 1
    (tmp_path / "lines.txt").write_text("a b\n\nc d\n")
    assert main(["translate", model, "-f", str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().out == "b a\n\nd c\n" and seen["n_seqs"] == 8  # 4 beams for each
    assert main(["translate", model, "-p", "a b", "-p", "c d"]) == 0  # several are a batch, as of generate
    assert capsys.readouterr().out == "b a\nd c\n" and seen["n_seqs"] == 8
    assert main(["text2text", model, "-p", "a b c", "--json", "-n", "1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"] == "c" and "cut off at 1 tokens" in captured.err
    (tmp_path / "lines.txt").write_text("\n")
    assert main(["text2text", model, "-f", str(tmp_path / "lines.txt")]) == 1
    assert "no text in it" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert main(["text2text", model, "-f", "-"]) == 1
    assert "stdin: no text in it" in capsys.readouterr().err


def test_lines_stay_beside_each_other(opened, t5_path, capsys, tmp_path):  # noqa: F811
    """A line for each, of a blank one too; only what ends a line in a text file does, whatever else Unicode has."""
    model, seen = opened(t5_path, lambda n_seqs: ScriptedEngine(reversing, n_seqs=n_seqs, **T5_INFO))
    (tmp_path / "lines.txt").write_bytes("\r\na b\r\n \n\nc\u2028d\x0ce\n\n".encode())
    languages = ["--source", "b", "--target", "c"]
    for verb, more in (("text2text", []), ("translate", []), ("translate", languages)):
        assert main([verb, model, "-f", str(tmp_path / "lines.txt"), *more]) == 0
        lines = capsys.readouterr().out.split("\n")
        assert len(lines) == 7 and [i for i, line in enumerate(lines) if line] == [1, 4]
    assert main(["text2text", model, "-f", str(tmp_path / "lines.txt"), "--json"]) == 0
    assert [one["source"] for one in json.loads(capsys.readouterr().out)] == ["a b", "c\u2028d\x0ce"]


@pytest.fixture
def texts(opened, t5_path, tmp_path):  # noqa: F811
    """Four texts, the first of them the longest, and, if wanted, a Ctrl-C just before the third is done."""
    state = {"interrupt": False}

    def script(source, tokens):
        if state["interrupt"] and source[0] == words["g"] and len(tokens) == 3:
            raise KeyboardInterrupt
        return reversing(source, tokens)

    path, _ = opened(t5_path, lambda n_seqs: ScriptedEngine(script, n_seqs=n_seqs, **T5_INFO))
    words = {"g": scripted_model(t5_path, ScriptedEngine(reversing, **T5_INFO)).tokenize("g")[0]}
    lines = tmp_path / "lines.txt"
    lines.write_text("a b c d e f\nc\ng h\nj\n")
    return ["-m", path, "-f", str(lines), "--num-beams", "1"], state


def test_texts_come_out_in_their_order(texts, capsys):
    call, _ = texts
    for verb in ("text2text", "translate"):
        for parallel in ("1", "2", "4"):
            assert main([verb, *call, "--parallel", parallel, "-q"]) == 0
            assert capsys.readouterr().out == "f e d c b a\nc\nh g\nj\n"
    assert main(["text2text", *call, "--json", "-q"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(one["source"], one["text"]) for one in records][1:3] == [("c", "c"), ("g h", "h g")]


def test_ctrl_c_keeps_the_texts_that_were_done(texts, capsys):
    """An empty line for each that is not and has one after it; records say themselves whose they are."""
    call, state = texts
    state["interrupt"] = True
    assert main(["text2text", *call, "--parallel", "1"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "f e d c b a\nc\n" and captured.err == "slimrt: interrupted: 2 of 4 texts are done\n"
    assert main(["translate", *call, "--parallel", "2"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "\nc\n"
    assert captured.err == "slimrt: interrupted: 1 of 4 texts are done; an empty line stands for one that is not\n"
    assert main(["text2text", *call, "--parallel", "2", "--json"]) == 130
    captured = capsys.readouterr()
    assert [one["text"] for one in json.loads(captured.out)] == ["c"] and "empty line" not in captured.err
    assert main(["text2text", *call, "--parallel", "4", "-q"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "\nc\n\nj\n" and captured.err == ""


def test_a_text_is_printed_before_the_next_is_made(texts, opened, t5_path, capsys, monkeypatch):  # noqa: F811
    """Else a reader of the pipe would wait for all of them."""
    call, _ = texts
    seen = []

    def script(source, tokens):
        if len(tokens) == 1:
            seen.append(capsys.readouterr().out)
        return reversing(source, tokens)

    opened(t5_path, lambda n_seqs: ScriptedEngine(script, n_seqs=n_seqs, **T5_INFO))
    assert main(["text2text", *call, "--parallel", "1", "-q"]) == 0
    assert seen == ["", "f e d c b a\n", "c\n", "h g\n"] and capsys.readouterr().out == "j\n"


def test_a_bar_counts_texts_on_a_terminal(texts, monkeypatch):
    call, _ = texts
    bars = []

    @contextmanager
    def bar(show, total, description, unit):
        bars.append([show, total])
        yield lambda done, of: bars[-1].append((done, of))

    monkeypatch.setattr("slimrt.plumbing.progress.bar", bar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for flags, shown in (([], True), (["--no-progress"], False), (["-q"], False)):
        assert main(["text2text", *call, "--parallel", "2", *flags]) == 0
        assert bars.pop() == [shown, 4, (1, 4), (2, 4), (3, 4), (4, 4)]
    assert main(["text2text", *call[:2], "-p", "a"]) == 0 and bars.pop()[0] is False  # a bar of one says nothing
