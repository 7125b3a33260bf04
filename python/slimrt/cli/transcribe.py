"""slimrt transcribe: speech to text, subtitles or JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from slimrt.cli.common import (
    Flags,
    as_item,
    as_json,
    beside_model,
    complain,
    from_flags,
    model_source,
    note,
    open_model,
    output_ending,
    output_format,
    print_json,
    show_progress,
)
from slimrt.cli.flags import Collect
from slimrt.cli.values import is_number, not_empty, parsed, positive, real, seed
from slimrt.errors import SlimrtError
from slimrt.plumbing import progress
from slimrt.plumbing.files import check_target, written_beside
from slimrt.speech.audio import MAX_SECONDS, Sound, read_sound, seconds
from slimrt.speech.options import TEMPERATURES, Transcription
from slimrt.speech.records import Segment, TranscriptionInfo
from slimrt.speech.subtitles import FORMATS, Subtitles, written
from slimrt.speech.vad import METHODS

_STDIN = "-"
_FORMATS = (*FORMATS, "json")
_AT_ONCE = 8  # sounds decoded together by default
_VAD_FLAGS = ("threshold", "min_speech_duration_ms", "min_silence_duration_ms", "speech_pad_ms")  # --vad-...


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.parser.add_argument(
        "audio", metavar="AUDIO", nargs="*", help="sound files: WAV, FLAC, Ogg, MP3, M4A, MP4, MKV, ...; -: stdin"
    )
    flags.add("-f", "--file", twin=False, action=Collect, type=not_empty, default=[], metavar="AUDIO",
              help="AUDIO as a flag")  # fmt: skip
    flags.add("--format", "--output-format", choices=_FORMATS, help="default: what -o ends in, else txt")
    flags.add("-o", "--output", "--output-dir", twin=False, type=not_empty, metavar="PATH", help="write there: a file "
              "such as talk.srt, or a folder for a file of each sound, named after it; default: stdout")  # fmt: skip
    flags.add("-l", "--language", metavar="NAME", help="such as en or English; default: detected")
    flags.add("--task", choices=["transcribe", "translate"], default="transcribe", help="translate: to English")
    flags.add("--detect-language", action="store_true", help="print only each sound's language and its probability")
    flags.add("--word-timestamps", action="store_true", help="times of each word: in JSON beside the text, in vtt and "
              "lrc as tags within a cue, in srt, tsv and csv as a cue a word")  # fmt: skip
    flags.add("--no-timestamps", action="store_true", help="decode without timestamps")
    flags.add("--clip-timestamps", twin=False, type=_numbers, goes_on=is_number, default=(), metavar="S,E[,S,E]",
              help="only from second S to E; the last E may be missing")  # fmt: skip
    _silence_flags(flags)
    flags.add("--max-seconds", type=real(0), default=MAX_SECONDS, metavar="S", help="refuse longer sounds (default: "
              "%(default)g)")  # fmt: skip
    flags.add("--parallel", type=positive, metavar="N", help="sounds decoded together; default: all, at most "
              f"{_AT_ONCE}")  # fmt: skip
    flags.add("--windows", type=positive, metavar="N", help="decode N windows of a sound together, cut beforehand "
              "and without the text of earlier ones")  # fmt: skip
    _search_flags(flags)
    _text_flags(flags)
    flags.engine(encoder=True, several=True)
    flags.output()


def _silence_flags(flags: Flags) -> None:
    flags.add("--vad", choices=METHODS, nargs="?", const="silero", default="none", help="voice activity detection, to "
              "leave silences out: by loudness (energy) or by the network Silero VAD (silero, or --vad alone; "
              "default: %(default)s)")  # fmt: skip
    flags.add("--skip-silence", action="store_true", help="the same as --vad energy")
    flags.add(
        "--vad-threshold", type=real(0, 1), metavar="P", help="silero: least probability of speech (default: 0.5)"
    )
    flags.add("--vad-min-speech-duration-ms", type=real(0), metavar="MS", help="ignore shorter speech (default: 0)")
    flags.add(
        "--vad-min-silence-duration-ms",
        type=real(0),
        metavar="MS",
        help="leave only longer silences out (default: 2000)",
    )
    flags.add(
        "--vad-speech-pad-ms", type=real(0), metavar="MS", help="audio kept on either side of speech (default: 400)"
    )


def _search_flags(flags: Flags) -> None:
    flags.add(
        "--num-beams",
        type=positive,
        default=1,
        metavar="N",
        help="beams of beam search; 1: greedy (default: %(default)s)",
    )
    flags.add("--patience", type=real(0), default=1.0, metavar="P", help="beam search stops with P times as many "
              "complete texts as beams (default: %(default)s)")  # fmt: skip
    flags.add("--length-penalty", type=real(), default=1.0, metavar="P", help="a text's score is divided by its length "
              "to this power (default: %(default)s)")  # fmt: skip
    flags.add("--best-of", type=positive, default=1, metavar="N", help="texts sampled at a temperature above 0, of "
              "which the best is taken (default: %(default)s)")  # fmt: skip
    flags.add("--temp", "--temperature", twin=False, type=_numbers, goes_on=is_number, default=TEMPERATURES,
              metavar="T[,T]", help="temperatures, tried in turn until a text passes the next two thresholds "
              "(default: 0,0.2,0.4,0.6,0.8,1)")  # fmt: skip
    flags.add("--compression-ratio-threshold", type=_or_none, default=2.4, metavar="R", help="reject a text that "
              "compresses better, since it repeats itself (default: %(default)s; none: off)")  # fmt: skip
    flags.add("--logprob-threshold", type=_or_none, default=-1.0, metavar="L", help="reject a text whose mean "
              "log probability is lower (default: %(default)s; none: off)")  # fmt: skip
    flags.add("--no-speech-threshold", type=_or_none, default=0.6, metavar="P", help="take such a text as "
              "silence if that is likelier than this (default: %(default)s; none: off)")  # fmt: skip
    flags.add("-s", "--seed", type=seed, metavar="N", help="seed of the random numbers; default: a new one")


def _text_flags(flags: Flags) -> None:
    flags.add("--initial-prompt", twin=False, metavar="TEXT", help="text before the first window: names, spelling")
    flags.add("--hotwords", twin=False, metavar="TEXT", help="text before every window")
    flags.add("--prefix", twin=False, metavar="TEXT", help="text that the first window's text begins with")
    flags.add("--no-previous-text", action="store_true", help="do not give the model the text of earlier windows")
    flags.add("--max-initial-timestamp", type=_or_none, default=1.0, metavar="S", help="a window's first segment "
              "begins within so many seconds (default: %(default)s; none: off)")  # fmt: skip
    flags.add("--suppress-tokens", twin=False, type=_ids, goes_on=is_number, metavar="ID[,ID]", help="tokens that "
              "are never chosen; -1: those that the file names (default)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    args.audio = [*beside_model(args, args.audio), *args.file]
    if not args.audio:
        args.usage_error("which sound? give AUDIO after the model")
    _check_vad(args)
    if args.detect_language:
        if args.output:
            args.usage_error("--detect-language prints a line for each sound and writes no files: leave -o out")
        if args.format not in (None, "txt", "json"):
            args.usage_error(f"--detect-language prints lines or, with --json, JSON: leave --format {args.format} out")
        if args.clip_timestamps:
            args.usage_error("--detect-language uses the beginning of a sound: leave --clip-timestamps out")
        return _detect_languages(args)
    form, several = output_format(args, _FORMATS), len(args.audio) > 1
    if several and output_ending(args, _FORMATS):
        args.usage_error(f"-o {args.output} is one file for several sounds; name a folder")
    if several and form not in ("txt", "json") and not args.output:
        args.usage_error(f"{form} of several sounds does not go in one stream; give -o FOLDER or --format json, "
                         f"not {form} alone")  # fmt: skip
    if args.word_timestamps and form == "txt":
        args.usage_error("txt has no times: give --format json, srt, vtt, tsv, csv or lrc with --word-timestamps")
    if args.windows and args.parallel:
        args.usage_error("--parallel counts sounds, --windows windows of all of them: give one of them")
    options = _options(args)
    sequences = from_flags(args, lambda: Transcription(**options)).sequences
    output = _Output(args, form, _targets(args, form))
    source = model_source(args)
    sounds = _sounds(args)  # read before the weights are loaded
    if not sounds:
        return 1
    at_once = args.windows or args.parallel or min(len(sounds), _AT_ONCE)
    total = round(sum(seconds(sound.samples) for _, sound in sounds))
    with open_model(args, source, args.ctx or 0, n_seqs=at_once * sequences) as model:
        output.begin([path for path, _ in sounds])
        shown = progress.wanted(show_progress(args))
        with progress.bar(shown, total, "transcribe", "s of sound") as update:
            model.transcribe(
                [sound for _, sound in sounds], **options, on_segment=output.segment, on_result=output.result,
                on_progress=lambda _, done, of: update(done // 100, of // 100),
            )  # fmt: skip
    return 0 if len(sounds) == len(args.audio) else 1


def _detect_languages(args: argparse.Namespace) -> int:
    """Print the language of each sound with its probability; as JSON the probabilities of all languages."""
    options = {name: _options(args)[name] for name in ("vad", "vad_parameters", "skip_silence", "max_seconds")}
    from_flags(args, lambda: Transcription(**options))
    sounds = _sounds(args)
    if not sounds:
        return 1
    with open_model(args, model_source(args), args.ctx or 0, n_seqs=min(len(sounds), _AT_ONCE)) as model:
        found = model.detect_language([sound for _, sound in sounds], **options)
    if args.json or args.format == "json":
        records = [
            {"audio": path, "language": language, "probabilities": likely}
            for (path, _), (language, likely) in zip(sounds, found, strict=True)
        ]
        print_json(records if len(args.audio) > 1 else records[0])
    else:
        for (path, _), (language, likely) in zip(sounds, found, strict=True):
            print(f"{f'{path}: ' if len(args.audio) > 1 else ''}{language} {likely[language]:.3f}")
    return 0 if len(sounds) == len(args.audio) else 1


def _check_vad(args: argparse.Namespace) -> None:
    """Refuse as wrong usage --vad-... flags without --vad, or with a method that does not use them."""
    given = [f"--vad-{name.replace('_', '-')}" for name in _VAD_FLAGS if getattr(args, f"vad_{name}") is not None]
    if given and args.vad == "none" and not args.skip_silence:
        args.usage_error(f"give --vad with {', '.join(given)}: without it no silence is detected")
    if args.vad_threshold is not None and args.vad != "silero":
        args.usage_error("--vad-threshold is a probability of --vad silero; energy has none")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    same = ("language", "task", "word_timestamps", "clip_timestamps", "skip_silence", "vad",
            "max_seconds", "num_beams", "patience", "length_penalty", "best_of", "compression_ratio_threshold",
            "logprob_threshold", "no_speech_threshold", "seed", "initial_prompt", "hotwords", "prefix",
            "max_initial_timestamp", "suppress_tokens")  # fmt: skip
    given = {name: getattr(args, f"vad_{name}") for name in _VAD_FLAGS}
    return {name: getattr(args, name) for name in same} | {
        "batch_size": args.windows,
        "timestamps": not args.no_timestamps,
        "temperature": args.temp,
        "condition_on_previous_text": not args.no_previous_text,
        "vad_parameters": {name: value for name, value in given.items() if value is not None},
    }


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas, for argparse."""
    return tuple(parsed(float, part, "numbers separated by commas") for part in text.split(","))


def _ids(text: str) -> tuple[int, ...]:
    """Integers separated by commas, for argparse."""
    return tuple(parsed(int, part, "token ids separated by commas") for part in text.split(","))


def _or_none(text: str) -> float | None:
    """A number or "none", for argparse."""
    return None if text == "none" else parsed(float, text, "a number or none")


def _targets(args: argparse.Namespace, form: str) -> dict[str, Path]:
    """The file to write for each sound, empty for stdout. Directories are made and paths checked before the work."""
    if not args.output:
        return {}
    folder = Path(args.output)
    if output_ending(args, _FORMATS):
        check_target(folder)
        return {args.audio[0]: folder}
    targets = {path: folder / f"{'stdin' if path == _STDIN else Path(path).stem}.{form}" for path in args.audio}
    if len(set(targets.values())) < len(args.audio):
        names = [target.name for target in targets.values()]
        twice = next((name for name in names if names.count(name) > 1), names[0])
        raise ValueError(f"several sounds would be written to {folder / twice}: give each its own folder with -o")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a directory: name one to write the files to")
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets.values():
        check_target(target)
    return targets


def _sounds(args: argparse.Namespace) -> list[tuple[str, Sound]]:
    """The sounds with their paths; those that cannot be read are reported and left out."""
    sounds = []
    for path in args.audio:
        try:
            sound = read_sound(sys.stdin.buffer if path == _STDIN else path, max_seconds=args.max_seconds)
        except (SlimrtError, OSError) as error:
            complain(error)
            continue
        for warning in sound.warnings:
            note(args, f"slimrt: warning: {warning}")
        sounds.append((path, sound))
    return sounds


class _Output:
    """Writes results as soon as they are known, so that finished ones are not lost if a later one fails.

    Args:
        targets: the file for each sound; empty: all go to stdout, in the order of the sounds.
    """

    def __init__(self, args: argparse.Namespace, form: str, targets: dict[str, Path]):
        self._args, self._form, self._targets = args, form, targets
        self._paths: list[str] = []
        self._cues: list[Subtitles] = []
        self._waiting: dict[int, list[str]] = {}  # output of sounds whose turn has not come
        self._done: set[int] = set()
        self._turn = 0

    def begin(self, paths: list[str]) -> None:
        """Start, with the paths of the sounds that could be read."""
        self._paths = paths
        self._waiting = {i: [] for i in range(len(paths))}
        if self._form != "json":
            self._cues = [Subtitles(self._form, self._args.word_timestamps) for _ in paths]
        if not self._targets:
            self._write(self._head(0))

    def segment(self, index: int, segment: Segment) -> None:
        if not self._targets and self._form != "json":
            self._waiting[index].append(self._cues[index].add(segment))
            self._flush()

    def result(self, index: int, segments: list[Segment], info: TranscriptionInfo) -> None:
        path = self._paths[index]
        record = as_json(_record(path, segments, info)) if self._form == "json" else ""
        if self._targets:
            target = self._targets[path]
            with written_beside(target) as partial:
                words = self._args.word_timestamps
                partial.write_text(f"{record}\n" if record else written(self._form, segments, words), encoding="utf-8")
            with progress.aside():
                note(self._args, f"slimrt: {target}")
        else:
            self._waiting[index].append(as_item(record) if record and self._several else record)
            self._done.add(index)
            self._flush()
        if not info.duration_heard:
            with progress.aside():
                note(self._args, f"slimrt: {path}: nothing of its {info.duration:.1f} s was heard: "
                     f"{'clips begin later' if self._args.clip_timestamps else 'all is silence'}")  # fmt: skip
        if self._args.verbose and info.language:
            with progress.aside():
                note(self._args, f"slimrt: {path}: {info.duration:.1f} s, {info.language} "
                     f"({info.language_probability:.0%})")  # fmt: skip

    @property
    def _several(self) -> bool:
        return len(self._args.audio) > 1

    def _head(self, index: int) -> str:
        """The text before a sound's output on stdout."""
        if self._form == "json":
            return ("[\n" if index == 0 else ",\n") if self._several else ""
        return f"{self._paths[index]}:\n" if self._several else FORMATS[self._form].head

    def _flush(self) -> None:
        """Print the output of the sound whose turn it is, and go on with the next ones if it is done."""
        while self._turn < len(self._paths):
            self._write("".join(self._waiting[self._turn]))
            self._waiting[self._turn] = []
            if self._turn not in self._done:
                return
            self._turn += 1
            if self._turn < len(self._paths):
                self._write(self._head(self._turn))
            elif self._form == "json":
                self._write("\n]\n" if self._several else "\n")

    def _write(self, text: str) -> None:
        if text:
            with progress.aside():
                sys.stdout.write(text)
                sys.stdout.flush()


def _record(path: str, segments: list[Segment], info: TranscriptionInfo) -> dict[str, Any]:
    text = "".join(segment.text for segment in segments).strip()
    return {"audio": path, "text": text, **info.to_dict(), "segments": [segment.to_dict() for segment in segments]}
