"""slimrt transcribe: speech to text, subtitles or JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slimrt import progress
from slimrt.cli.common import Flags, as_json, model_source, note, open_model, positive, print_json, show_progress
from slimrt.files import written_beside
from slimrt.speech.audio import load_audio, seconds
from slimrt.speech.options import TEMPERATURES, Transcription
from slimrt.speech.records import Segment, TranscriptionInfo
from slimrt.speech.subtitles import FORMATS

HELP = "speech to text, subtitles or JSON, with Whisper and Moonshine; several sounds are one batch"
_AT_ONCE = 8  # sounds decoded together where the user does not say


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument("audio", metavar="AUDIO", nargs="*", help="sound files: WAV, FLAC, Ogg, MP3, ...")
    flags.add("--format", choices=[*FORMATS, "json"], default="txt", help="default: %(default)s")
    flags.add("-o", "--output-dir", metavar="DIR", help="write a file for each sound there, named after it; default: "
              "stdout")  # fmt: skip
    flags.add("-l", "--language", metavar="CODE", help="such as en; default: detected")
    flags.add("--task", choices=["transcribe", "translate"], default="transcribe", help="translate: to English")
    flags.add("--word-timestamps", action="store_true", help="times of each word, in JSON")
    flags.add("--no-timestamps", action="store_true", help="do not let the model tell times")
    flags.add("--num-beams", type=positive, default=1, metavar="N", help="1: greedy (default: %(default)s)")
    flags.add("--best-of", type=positive, default=1, metavar="N", help="texts drawn at a temperature above 0 (default: "
              "%(default)s)")  # fmt: skip
    flags.add("--temp", type=_temperatures, default=TEMPERATURES, metavar="T[,T]", help="temperatures tried while a "
              "text fails (default: 0,0.2,0.4,0.6,0.8,1)")  # fmt: skip
    flags.add("--initial-prompt", metavar="TEXT", help="stands before the first window: names, spelling")
    flags.add("--no-previous-text", action="store_true", help="do not show the model the text of the windows before")
    flags.add("--skip-silence", action="store_true", help="leave silences longer than 2 s out")
    flags.add("--parallel", type=positive, metavar="N", help="sounds decoded together; default: all, at most "
              f"{_AT_ONCE}")  # fmt: skip
    flags.add("--seed", type=int, metavar="N", help="makes what is drawn reproducible")
    flags.engine()
    flags.output()


def run(args: argparse.Namespace) -> int:
    if args.model and args.positional:  # the flag names the model, so this is a sound
        args.audio, args.positional = [args.positional, *args.audio], None
    if not args.audio:
        args.usage_error("which sound? give AUDIO after the model")
    form = "json" if args.json else args.format
    if len(args.audio) > 1 and form in ("srt", "vtt") and not args.output_dir:
        args.usage_error(f"subtitles of several sounds do not go in one stream; give --output-dir or --format json, "
                         f"not {form} alone")  # fmt: skip
    options = _options(args)
    sequences = Transcription(**options).sequences
    targets = _targets(args, form)
    sounds = [load_audio(path) for path in args.audio]  # before the model: it is quick, and may fail
    source = model_source(args)
    at_once = args.parallel or min(len(sounds), _AT_ONCE)
    total = round(sum(seconds(sound) for sound in sounds))
    with open_model(args, source, args.ctx or 0, n_seqs=at_once * sequences) as model:
        shown = progress.wanted(show_progress(args))
        with progress.bar(shown, total, "transcribe", "s of sound") as update:
            results = model.transcribe(
                sounds, **options, on_progress=lambda _, done, of: update(done // 100, of // 100)
            )
    if targets:
        for target, path, (segments, info) in zip(targets, args.audio, results, strict=True):
            _write(target, form, path, segments, info)
            note(args, f"slimrt: {target}")
    else:
        _print(args, form, results)
    for path, (_, info) in zip(args.audio, results, strict=True):
        if args.verbose and info.language:
            note(args, f"slimrt: {path}: {info.duration:.1f} s, {info.language} ({info.language_probability:.0%})")
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "language": args.language,
        "task": args.task,
        "timestamps": not args.no_timestamps,
        "word_timestamps": args.word_timestamps,
        "num_beams": args.num_beams,
        "best_of": args.best_of,
        "temperature": args.temp,
        "initial_prompt": args.initial_prompt,
        "condition_on_previous_text": not args.no_previous_text,
        "skip_silence": args.skip_silence,
        "seed": args.seed,
    }


def _temperatures(text: str) -> tuple[float, ...]:
    """Numbers with commas between, for argparse."""
    return tuple(float(part) for part in text.split(","))


def _targets(args: argparse.Namespace, form: str) -> list[Path]:
    """The files to write, none for stdout; their directory made, and problems said, before the work."""
    if not args.output_dir:
        return []
    folder = Path(args.output_dir)
    targets = [folder / f"{Path(path).stem}.{form}" for path in args.audio]
    if len(set(targets)) < len(targets):
        raise ValueError("two of the sounds have the same name, and so would their files: do them one by one")
    folder.mkdir(exist_ok=True)
    return targets


def _write(target: Path, form: str, path: str, segments: list[Segment], info: TranscriptionInfo) -> None:
    text = as_json(_record(path, segments, info)) + "\n" if form == "json" else FORMATS[form](segments)
    with written_beside(target) as partial:
        partial.write_text(text, encoding="utf-8")


def _print(args: argparse.Namespace, form: str, results: list[tuple[list[Segment], TranscriptionInfo]]) -> None:
    if form == "json":
        records = [_record(path, *result) for path, result in zip(args.audio, results, strict=True)]
        print_json(records if len(records) > 1 else records[0])
        return
    for path, (segments, _) in zip(args.audio, results, strict=True):
        if len(results) > 1:
            print(f"{path}:")
        print(FORMATS[form](segments), end="")


def _record(path: str, segments: list[Segment], info: TranscriptionInfo) -> dict[str, Any]:
    text = "".join(segment.text for segment in segments).strip()
    return {"audio": path, "text": text, **info.to_dict(), "segments": [segment.to_dict() for segment in segments]}
