# SPDX-License-Identifier: Apache-2.0
"""slimrt transcribe, with scripted engines."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from scripted import at, said, whisper_file
from slimrt.cli import main
from slimrt.speech.records import Segment, Word
from slimrt.speech.subtitles import written
from test_transcribe import Speaker, constant, sound

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


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
    for form in ("txt", "srt", "vtt", "tsv", "csv", "lrc", "json"):
        assert main(["transcribe", model, wavs[0], "--format", form, "-q"]) == 0
        outputs[form] = capsys.readouterr().out
    assert outputs["txt"] == "Hello there.\nBye\n"
    assert outputs["srt"].startswith("1\n00:00:00,200 --> 00:00:01,400\nHello there.\n\n2\n00:00:01,400 -->")
    assert outputs["vtt"].startswith("WEBVTT\n\n00:00:00.200 --> 00:00:01.400\nHello there.\n\n")
    assert outputs["tsv"] == "start\tend\ttext\n200\t1400\tHello there.\n1400\t2000\tBye\n"
    assert outputs["csv"] == "start,end,text\n200,1400,Hello there.\n1400,2000,Bye\n"
    assert outputs["lrc"] == "[00:00.20]Hello there.\n[00:01.40]Bye\n"
    record = json.loads(outputs["json"])
    assert (record["text"], record["language"], record["duration"]) == ("Hello there. Bye", "en", 2.0)
    assert [segment["end"] for segment in record["segments"]] == [pytest.approx(1.4), pytest.approx(2.0)]


def test_times_of_words_in_subtitles(whisper, wavs, capsys, tmp_path):
    model, _ = whisper
    told = {}
    for form in ("srt", "vtt", "tsv", "csv", "lrc"):
        assert main(["transcribe", model, wavs[0], "--format", form, "--word-timestamps", "-q"]) == 0
        told[form] = capsys.readouterr().out
    assert main(["transcribe", model, wavs[0], "--format", "srt", "--word-timestamps", "-o", str(tmp_path)]) == 0
    assert (tmp_path / "one.srt").read_text() == told["srt"]
    assert told["srt"].startswith("1\n00:00:00,000 --> 00:00:01,200\nHello\n\n2\n00:00:01,200 --> ")
    assert "3\n" in told["srt"] and told["srt"].count(" --> ") == 3  # numbers go on from segment to segment
    assert told["vtt"].startswith("WEBVTT\n\n00:00:00.200 --> 00:00:01.400\nHello <00:00:01.200>there.\n\n")
    assert told["tsv"].splitlines()[1] == "0\t1200\tHello" and told["csv"].splitlines()[1] == "0,1200,Hello"
    assert told["lrc"].startswith("[00:00.20]Hello <00:01.20>there.")


def test_the_language_alone(whisper, wavs, capsys, tmp_path):
    model, seen = whisper
    assert main(["transcribe", model, wavs[0], "--detect-language"]) == 0
    assert capsys.readouterr().out == "en 1.000\n"
    assert main(["transcribe", model, *wavs, str(tmp_path / "absent.wav"), "--detect-language"]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{wavs[0]}: en 1.000\n{wavs[1]}: en 1.000\n" and "absent.wav: no such file" in captured.err
    assert main(["transcribe", model, wavs[0], "--detect-language", "--json", "--vad", "energy"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["language"] == "en" and list(record["probabilities"]) == ["en", "de"]


def test_silences_and_windows(whisper, wavs, capsys, tmp_path):
    model, seen = whisper
    long = str(tmp_path / "long.wav")
    soundfile.write(long, sound((25.5, 0.3), (1.0, 0.0), (20.0, 0.3), (5.0, 0.0), (5.0, 0.3)), 16000)
    assert main(["transcribe", model, long, "--windows", "2", "--num-beams", "2", "-q", "--format", "lrc"]) == 0
    assert seen["n_seqs"] == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[00:00.20]Hello there." and lines[2].startswith("[00:25.") and len(lines) == 6
    for flags, heard in [
        (["--vad", "energy"], 52.3), (["--skip-silence"], 52.3), ([], 56.5),
        (["--vad", "energy", "--vad-speech-pad-ms", "0", "--vad-min-silence-duration-ms", "900"], 50.5),
    ]:  # fmt: skip
        assert main(["transcribe", model, long, "--json", "-q", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["duration_heard"] == pytest.approx(heard, abs=0.1)
    for flags, code, why in [
        (["--vad-threshold", "0.3", "--vad-speech-pad-ms", "9"], 2, "--vad with --vad-threshold, --vad-speech-pad-ms"),
        (["--vad-threshold", "0.3", "--skip-silence"], 2, "--vad-threshold is a probability of --vad silero"),
        (["--detect-language", "--vad-threshold", "0.3"], 2, "give --vad with --vad-threshold"),
        (["--vad", "loud"], 2, "invalid choice"),
        (["--windows", "2", "--parallel", "2"], 2, "--parallel counts sounds"),
        (["--detect-language", "-o", str(tmp_path)], 2, "writes no files"),
        (["--detect-language", "--clip-timestamps", "1"], 2, "leave --clip-timestamps out"),
        (["--detect-language", "--format", "srt"], 2, "leave --format srt out"),
        (["--json", "--format", "srt"], 2, "--json and the format srt do not go together"),
        (["--patience", "2"], 2, "patience=2.0 is for beam search"),
    ]:  # fmt: skip
        try:
            assert main(["transcribe", model, long, *flags]) == code
        except SystemExit as error:
            assert error.code == code
        assert why in capsys.readouterr().err


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


def test_a_sound_that_is_cut_off_is_heard_and_one_too_long_is_not(whisper, wavs, capsys):
    model, _ = whisper
    content = Path(wavs[0]).read_bytes()
    Path(wavs[0]).write_bytes(content[: len(content) * 3 // 4])
    assert main(["transcribe", model, wavs[0], "--json"]) == 0
    captured = capsys.readouterr()
    warning = f"{wavs[0]}: cut off after 1.50 s of 2.00 s; what there is was read"
    record = json.loads(captured.out)
    assert (record["text"], record["warnings"], record["duration"]) == ("Hello there. Bye", [warning], 1.499625)
    assert captured.err.count(f"slimrt: warning: {warning}") == 1 and "UserWarning" not in captured.err
    assert main(["transcribe", model, *wavs, "--max-seconds", "2.5", "-q"]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{wavs[0]}:\nHello there.\nBye\n" and "two.wav: longer than 2.5 s" in captured.err


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
        (["--word-timestamps"], "txt has no times: give --format json"),
        (["--temp", "a"], "numbers separated by commas, got 'a'"),
        (["--suppress-tokens", "x"], "token ids"), (["--logprob-threshold", "x"], "a number or none"),
        (["--patience", "x"], "patience"), (["--patience", "nan"], "patience: must be a finite number"),
        (["--temp", "nan"], "temperature must be"), (["--clip-timestamps", "2,1"], "each later than the one before"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            main(["transcribe", model, wavs[0], *flags])
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
    (tmp_path / "taken" / "two.txt").mkdir(parents=True)
    assert main(["transcribe", model, *wavs, "-o", str(tmp_path / "taken")]) == 1
    assert "two.txt is a directory" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["two.txt"]  # before the work
    assert main(["transcribe", model, wavs[0], "-o", str(tmp_path / "absent" / "deeper")]) == 0
    assert (tmp_path / "absent" / "deeper" / "one.txt").read_text() == "Hello there.\nBye\n"
    assert main(["transcribe", model, wavs[0], "-l", "xx"]) == 1
    assert "language 'xx' is not supported" in capsys.readouterr().err


def test_a_file_to_write_to(whisper, wavs, capsys, tmp_path):
    """Its ending is the format."""
    model, _ = whisper
    assert main(["transcribe", model, wavs[0], "-o", str(tmp_path / "talk.vtt")]) == 0
    assert (tmp_path / "talk.vtt").read_text().startswith("WEBVTT\n\n00:00")
    capsys.readouterr()
    for arguments, why in (
        (["-o", "srt"], "a format is --format srt"),
        (["-o", "a.srt", wavs[1]], "a.srt is one file for several sounds"),
        (["-o", "a.srt", "--format", "vtt"], "a.srt and the format vtt do not go together"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["transcribe", "-m", model, "-f", wavs[0], *arguments])
        assert why in capsys.readouterr().err


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
    assert written("srt", [segment]) == "1\n01:00:00,000 --> 01:01:01,500\na -> b c\n\n"
    vtt = written("vtt", [replace(segment, text=" R&D <i> \n\n--> c")])
    assert vtt == "WEBVTT\n\n01:00:00.000 --> 01:01:01.500\nR&amp;D &lt;i&gt; --&gt; c\n\n"
    assert written("csv", [segment, replace(segment, text=' "so", he')]).endswith('3600000,3661500,"""so"", he"\n')
    assert written("tsv", [replace(segment, text=" a\tb")]).endswith("3600000\t3661500\ta b\n")
    assert written("lrc", [segment]) == "[60:00.00]a --> b c\n"
    words = (Word(" R&D", 3599.9, 3600.0, 1.0), Word(" is", 3600.5, 3601, 1.0), Word("n't", 3600.5, 3601, 1.0))
    tagged = written("vtt", [replace(segment, words=words)], words=True)
    assert tagged.endswith(" --> 01:01:01.500\nR&amp;D <01:00:00.500>isn't\n\n")  # none twice, none before the cue
    assert written("vtt", [replace(segment, words=words)]).endswith("\na --&gt; b c\n\n")
    assert written("vtt", []) == "WEBVTT\n\n" and written("txt", []) == written("srt", []) == ""
