# SPDX-License-Identifier: Apache-2.0
"""slimrt transcribe, translate, text2text and forecast, with scripted engines."""

from __future__ import annotations

import csv
import io
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from scripted import at, said, scripted_model, whisper_file
from slimrt.cli import main
from slimrt.cli.forecast import read_series
from slimrt.speech.records import Segment
from slimrt.speech.subtitles import FORMATS
from test_forecast import CHRONOS, INFO, chronos_file, repeating
from test_text2text import INFO as T5_INFO
from test_text2text import path as t5_path  # noqa: F401  a fixture
from test_text2text import reversing
from test_transcribe import ScriptedEngine, Speaker, constant, sound

SHIPPED = Path(__file__).parent.parent / "models"
pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.fixture
def opened(monkeypatch):
    """Opens scripted models in place of real ones; notes how."""
    seen = {}

    def use(path, make):
        def open_model(args, source, n_ctx, n_seqs=1):
            seen["n_seqs"] = n_seqs
            return scripted_model(source.path, make(n_seqs))

        for verb in ("transcribe", "text2text", "forecast"):
            monkeypatch.setattr(f"slimrt.cli.{verb}.open_model", open_model)
        return str(path), seen

    return use


@pytest.fixture
def whisper(opened, tmp_path):
    text = constant([at(0.2), *said(" Hello there."), at(1.4), at(1.4), *said(" Bye"), at(2.0)])
    return opened(whisper_file(tmp_path / "whisper.gguf"), lambda n_seqs: Speaker(text, n_seqs=n_seqs))


@pytest.fixture
def wavs(tmp_path):
    paths = [tmp_path / "one.wav", tmp_path / "two.wav"]
    for i, path in enumerate(paths):
        soundfile.write(path, sound((2.0 + i, 0.3)), 16000)
    return [str(path) for path in paths]


def test_formats(whisper, wavs, capsys):
    model, _ = whisper
    outputs = {}
    for form in ("txt", "srt", "vtt", "json"):
        assert main(["transcribe", model, wavs[0], "--format", form, "-q"]) == 0
        outputs[form] = capsys.readouterr().out
    assert outputs["txt"] == "Hello there.\nBye\n"
    assert outputs["srt"].startswith("1\n00:00:00,200 --> 00:00:01,400\nHello there.\n\n2\n00:00:01,400 -->")
    assert outputs["vtt"].startswith("WEBVTT\n\n00:00:00.200 --> 00:00:01.400\nHello there.\n\n")
    record = json.loads(outputs["json"])
    assert (record["text"], record["language"], record["duration"]) == ("Hello there. Bye", "en", 2.0)
    assert [segment["end"] for segment in record["segments"]] == [pytest.approx(1.4), pytest.approx(2.0)]


def test_several_sounds(whisper, wavs, capsys, tmp_path):
    model, seen = whisper
    assert main(["transcribe", "-m", model, *wavs, "--num-beams", "3", "-q"]) == 0
    assert capsys.readouterr().out == "".join(f"{path}:\nHello there.\nBye\n" for path in wavs)
    assert seen["n_seqs"] == 6
    folder = tmp_path / "out"
    folder.mkdir()
    assert main(["transcribe", model, *wavs, "--format", "srt", "-o", str(folder), "-q"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["one.srt", "two.srt"]
    assert main(["transcribe", model, *wavs, "--json", "--word-timestamps", "-q"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["audio"] for record in records] == wavs
    assert records[0]["segments"][0]["words"][0]["word"] == " Hello"


def test_a_sound_that_cannot_be_used_does_not_hold_the_others_up(whisper, wavs, capsys, tmp_path):
    model, _ = whisper
    (tmp_path / "bad.wav").write_text("no sound")
    bad, absent = str(tmp_path / "bad.wav"), str(tmp_path / "absent.wav")
    assert main(["transcribe", model, wavs[0], bad, absent, wavs[1]]) == 1
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{path}:\nHello there.\nBye\n" for path in wavs)
    assert "bad.wav: not a sound that can be read" in captured.err and "absent.wav: no such file" in captured.err
    assert main(["transcribe", model, bad, wavs[0], "--format", "srt", "-o", str(tmp_path / "out")]) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one.srt"]
    assert main(["transcribe", model, bad, wavs[0], "--json"]) == 1
    assert [record["audio"] for record in json.loads(capsys.readouterr().out)] == [wavs[0]]
    assert main(["transcribe", model, bad, absent]) == 1 and capsys.readouterr().out == ""


@pytest.fixture
def interrupted(opened, tmp_path):
    """A model that says one thing in each of two windows, and is interrupted in the third."""

    def script(window):
        if window == 2:
            raise KeyboardInterrupt
        return [at(0.2), *said(f" window {window}"), at(1.4)]

    return opened(whisper_file(tmp_path / "whisper.gguf"), lambda n_seqs: Speaker(script, n_seqs=n_seqs))


def test_ctrl_c_keeps_what_was_done(interrupted, wavs, capsys, tmp_path):
    model, _ = interrupted
    soundfile.write(wavs[1], sound((70.0, 0.3)), 16000)
    one_by_one = ["transcribe", model, *wavs, "--parallel", "1", "-q"]
    assert main([*one_by_one, "-o", str(tmp_path / "out")]) == 130
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"one.txt": "window 0\n"}
    assert main(one_by_one) == 130
    assert capsys.readouterr().out == f"{wavs[0]}:\nwindow 0\n{wavs[1]}:\nwindow 1\n"
    assert main(["transcribe", model, wavs[1], "--format", "vtt", "-q"]) == 130
    cues = ["00:00:00.200 --> 00:00:01.400\nwindow 0", "00:00:30.200 --> 00:00:31.400\nwindow 1"]
    assert capsys.readouterr().out == "WEBVTT\n\n" + "".join(f"{cue}\n\n" for cue in cues)


def test_sounds_come_out_in_their_order(opened, tmp_path, wavs, capsys):
    """The first of them is the last to be done."""
    text = constant([at(0.2), *said(" Hello there."), at(1.4)])
    model, _ = opened(whisper_file(tmp_path / "w.gguf"), lambda n_seqs: Speaker(text, n_seqs=n_seqs))
    soundfile.write(wavs[0], sound((40.0, 0.3)), 16000)
    assert main(["transcribe", model, *wavs, "-q"]) == 0
    assert capsys.readouterr().out == f"{wavs[0]}:\nHello there.\nHello there.\n{wavs[1]}:\nHello there.\n"
    assert main(["transcribe", model, *wavs, "-q", "--json"]) == 0
    assert [len(record["segments"]) for record in json.loads(capsys.readouterr().out)] == [2, 1]


def test_every_flag_says_something(whisper, wavs, capsys):
    model, seen = whisper

    def text(*flags):
        assert main(["transcribe", model, wavs[0], "-q", *flags]) == 0
        return capsys.readouterr().out

    assert text("--prefix", "Hello", "--hotwords", "names") == "Hello there.\nBye\n"
    assert text("--clip-timestamps", "0,0.5", "-l", "english", "--initial-prompt", "x") == "Hello there.\nBye\n"
    assert text("--clip-timestamps", "5") == ""
    assert "H" not in text(f"--suppress-tokens=-1,{ord('H')}", "--temp", "0", "--logprob-threshold", "none")
    assert text("--num-beams", "3", "--patience", "2", "--length-penalty", "0.5") and seen["n_seqs"] == 3
    assert text("--best-of", "2", "--temp", "0.2,0.4", "--seed", "1") and seen["n_seqs"] == 2
    free = ["--max-initial-timestamp", "none", "--compression-ratio-threshold", "none"]
    assert text("--no-speech-threshold", "none", *free, "--no-previous-text") == "Hello there.\nBye\n"
    record = json.loads(text("--format", "json", "--word-timestamps", "--task", "translate"))
    assert record["segments"][0]["words"][0]["word"] == " Hello"
    for flags, why in [
        (["--word-timestamps"], "give --format json"), (["--temp", "a"], "numbers with commas between, got 'a'"),
        (["--suppress-tokens", "x"], "token ids"), (["--logprob-threshold", "x"], "a number or none"),
        (["--patience", "x"], "patience"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            main(["transcribe", model, wavs[0], *flags])
        assert why in capsys.readouterr().err
    for flags, why in [
        (["--patience", "nan"], "patience must be a number, got nan"), (["--temp", "nan"], "temperature must be"),
        (["--clip-timestamps", "2,1"], "each later than the one before"),
    ]:  # fmt: skip
        assert main(["transcribe", model, wavs[0], *flags]) == 1
        assert why in capsys.readouterr().err


def test_a_directory_to_write_to_is_made(whisper, wavs, tmp_path):
    model, _ = whisper
    assert main(["transcribe", model, wavs[0], "-o", str(tmp_path / "subtitles"), "--format", "srt"]) == 0
    assert [path.suffix for path in (tmp_path / "subtitles").iterdir()] == [".srt"]


def test_wrong_usage_and_errors(whisper, wavs, capsys, tmp_path):
    model, _ = whisper
    for wrong in (["transcribe", model], ["transcribe", model, *wavs, "--format", "srt"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    (tmp_path / "bad.wav").write_text("no sound")
    capsys.readouterr()
    assert main(["transcribe", model, wavs[0], "-o", str(tmp_path / "bad.wav")]) == 1
    assert "bad.wav is not a directory" in capsys.readouterr().err
    assert main(["transcribe", model, str(tmp_path / "bad.wav")]) == 1
    assert "bad.wav: not a sound that can be read" in capsys.readouterr().err
    assert main(["transcribe", model, wavs[0], wavs[0], "-o", str(tmp_path / "out")]) == 1
    assert "several sounds would be written to" in capsys.readouterr().err
    assert main(["transcribe", model, wavs[0], "-o", str(tmp_path / "absent" / "deeper")]) == 0
    assert (tmp_path / "absent" / "deeper" / "one.txt").read_text() == "Hello there.\nBye\n"
    assert main(["transcribe", model, wavs[0], "-l", "xx"]) == 1
    assert "language 'xx' is not supported" in capsys.readouterr().err


def test_standard_input_is_a_sound(whisper, wavs, capsys, tmp_path, monkeypatch):
    model, _ = whisper
    for extra in ([], ["-o", str(tmp_path)]):
        with open(wavs[0], "rb") as file:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
            assert main(["transcribe", model, "-", *extra]) == 0
    assert capsys.readouterr().out == (tmp_path / "stdin.txt").read_text() == "Hello there.\nBye\n"


def test_it_is_said_when_nothing_was_heard(whisper, wavs, capsys, tmp_path):
    model, _ = whisper
    assert main(["transcribe", model, wavs[0], "--clip-timestamps", "9,10"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "nothing of its 2.0 s was heard: clips begin later" in captured.err
    soundfile.write(tmp_path / "silence.wav", np.zeros(16000), 16000)
    assert main(["transcribe", model, str(tmp_path / "silence.wav"), "--skip-silence"]) == 0
    assert "nothing of its 1.0 s was heard: all is silence" in capsys.readouterr().err


def test_cues_cannot_break_their_file():
    segment = Segment(0, 3599.9996, 3661.5, " a --> b\n\n c", (), 0.0, 0.0, 0.0, 0.0)
    assert FORMATS["srt"].whole([segment]) == "1\n01:00:00,000 --> 01:01:01,500\na -> b c\n\n"
    vtt = FORMATS["vtt"].whole([replace(segment, text=" R&D <i> \n\n--> c")])
    assert vtt == "WEBVTT\n\n01:00:00.000 --> 01:01:01.500\nR&amp;D &lt;i&gt; --&gt; c\n\n"
    assert FORMATS["vtt"].whole([]) == "WEBVTT\n\n" and FORMATS["txt"].whole([]) == FORMATS["srt"].whole([]) == ""


def test_text2text_and_translate(opened, t5_path, capsys, tmp_path):  # noqa: F811
    model, seen = opened(t5_path, lambda n_seqs: ScriptedEngine(reversing, n_seqs=n_seqs, **T5_INFO))
    assert main(["text2text", model, "-p", "a b c"]) == 0
    assert capsys.readouterr().out == "c b a\n" and seen["n_seqs"] == 1
    (tmp_path / "lines.txt").write_text("a b\n\nc d\n")
    assert main(["translate", model, "-f", str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().out == "b a\nd c\n" and seen["n_seqs"] == 8  # 4 beams for each
    assert main(["text2text", model, "-p", "a b c", "--json", "-n", "1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"] == "c" and "cut off at 1 tokens" in captured.err
    (tmp_path / "lines.txt").write_text("\n")
    assert main(["text2text", model, "-f", str(tmp_path / "lines.txt")]) == 1
    assert "no text in it" in capsys.readouterr().err


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


@pytest.fixture
def chronos(opened, tmp_path):
    path = chronos_file(tmp_path / "chronos.gguf", CHRONOS | {"kind": "t5"})
    return opened(path, lambda n_seqs: ScriptedEngine(repeating, n_seqs=n_seqs, **INFO))


def test_forecast(chronos, capsys, tmp_path, monkeypatch):
    model, _ = chronos
    table = tmp_path / "series.csv"
    table.write_text("day,a,b\n2020-01-01,1,10\n2020-01-02,2,\n2020-01-03,3,30\n".replace(",\n", ",20\n"))
    assert main(["forecast", model, str(table), "-n", "3", "--quantiles", "0.1,0.9", "--seed", "1"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["step", "0.1", "0.9"] and [row[0] for row in rows[1:]] == ["1", "2", "3"]
    both = ["forecast", model, str(table), "--column", "a", "--column", "3", "--seed", "1"]
    assert main([*both, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["series"]) == ["a", "b"] and record["horizon"] == 6
    assert np.array(record["series"]["b"]).shape == (6, 3)
    assert main([*both, "-o", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text().startswith("series,step,0.1,0.5,0.9\na,1,")
    assert main(["forecast", model, str(table), "--column", "day"]) == 1
    assert "column day is not numbers: row 2 says '2020-01-01'" in capsys.readouterr().err


def test_levels_that_were_not_trained_are_named(capsys, tmp_path):
    (tmp_path / "s.csv").write_text("1\n2\n3\n")
    asked = ["forecast", str(SHIPPED / "tale-chronos.gguf"), str(tmp_path / "s.csv"), "-n", "1", "--quantiles"]
    assert main([*asked, "0.02,0.1,0.5,0.99"]) == 0
    captured = capsys.readouterr()
    row = captured.out.splitlines()[1].split(",")
    assert row[1] == row[2] != row[3] and "trained for quantiles 0.1 to 0.9" in captured.err
    assert "the nearest: 0.02, 0.99" in captured.err
    assert main([*asked, "0.1,0.5"]) == 0
    assert capsys.readouterr().err == ""


def test_forecast_plot(chronos, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    model, _ = chronos
    (tmp_path / "s.csv").write_text("1\n2\n3\n")
    assert main(["forecast", model, str(tmp_path / "s.csv"), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_columns_of_a_table():
    text = "time,x,note,y\n1,1.5,a,\n2,nan,b,4\n"
    assert list(read_series(text, "t", None)) == ["y"]
    x = read_series(text, "t", ["x"])["x"]
    assert x[0] == 1.5 and np.isnan(x[1])
    assert read_series("1\n2\n", "t", None)["1"].tolist() == [1.0, 2.0]
    for columns, why in [
        (["z"], "no column z; there are time, x, note, y"),
        (["note"], "column note is not numbers: row 2 says 'a'"),
    ]:
        with pytest.raises(ValueError, match=why):
            read_series(text, "t", columns)
    for empty in ("", "a,b\n", "a\nx\n"):
        with pytest.raises(ValueError, match="no rows|no column of numbers"):
            read_series(empty, "t", None)
    assert list(read_series("a,\n1,\n2,\n", "t", None)) == ["a"]
    with pytest.raises(ValueError, match="column 2 is not numbers: nothing in it"):
        read_series("a,\n1,\n2,\n", "t", ["2"])
    for text, why in (
        ("y\n1,000\n", "row 2 has 2 cells, the first has 1: is there a comma in a number"),
        ("d;y\nx;1,5\n", "y: row 2 says '1,5' .decimals take a point"),
    ):
        with pytest.raises(ValueError, match=why):
            read_series(text, "t", None)
    with pytest.raises(ValueError, match="no column of numbers in it; day: row 2 says 'Mon'; y: row 3 says 'inf'"):
        read_series("day,y\nMon,1\nTue,inf\n", "t", None)


def test_stacked_series():
    """Rows of an id are a series, wherever they are; without --id a column that looks like one is named."""
    text = "item_id,day,a,y\nB,1,1,10\nB,2,2,20\nA,1,3,30\nA,2,4,40\n"
    told: list[str] = []
    assert read_series(text, "t", None, tell=told.append)["y"].tolist() == [10, 20, 30, 40]
    assert len(told) == 1 and "--id item_id" in told[0]
    mixed = text + "B,3,,50\n"
    series = read_series(mixed, "t", None, "item_id", told.append)
    assert {name: values.tolist() for name, values in series.items()} == {"B": [10, 20, 50], "A": [30, 40]}
    assert list(read_series(mixed, "t", ["y", "a"], "1")) == ["B y", "B a", "A y", "A a"]
    assert len(told) == 1
    for plain in ("season,y\nwet,1\nwet,2\ndry,3\nwet,4\n", "day,y\nMon,1\nTue,2\n", "year,y\n1,1\n1,2\n2,3\n2,4\n"):
        read_series(plain, "t", None, tell=told.append)
    assert len(told) == 1
    for columns, ids, why in (
        (None, "x", "no column x; there are item_id, day, a, y"),
        (["a"], "a", "column a is not numbers: it tells series apart"),
    ):
        with pytest.raises(ValueError, match=why):
            read_series(text, "t", columns, ids)
    with pytest.raises(ValueError, match="row 6 has nothing in column item_id"):
        read_series(text + ",3,5,50\n", "t", None, "item_id")


@pytest.mark.parametrize("between, end", [(",", "\r"), (";", "\r\n"), ("\t", "\n")])
def test_tables_of_other_programs(between, end):
    """Any ends of lines, a byte order mark, columns called by a year, by nothing or alike."""
    lines = ["\ufeffmonth,2020,,a,a", "2019-01,1,2,3,4", "2019-02,5,6,7", ""]
    text = end.join(line.replace(",", between) for line in lines)
    assert {name: values[0] for name, values in read_series(text, "t", ["2020", "3", "4", "5"]).items()} == {
        "2020": 1.0, "3": 2.0, "4": 3.0, "5": 4.0,
    }  # fmt: skip
    assert np.isnan(read_series(text, "t", None)["5"][1])
    assert read_series(text.replace(f"month{between}2020", f"2018-12{between}9"), "t", ["2"])["2"].tolist() == [9, 1, 5]
