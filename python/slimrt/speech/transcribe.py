"""Sounds to text with a loaded model: several are one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slimrt import core
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.generation.search import Task, run
from slimrt.plumbing.notes import warn
from slimrt.runtime.kinds import check_sequences, require
from slimrt.runtime.runtime import Runtime
from slimrt.speech.audio import SAMPLE_RATE, Audio, Sound, read_sound, seconds
from slimrt.speech.moonshine import Moonshine
from slimrt.speech.options import Transcription
from slimrt.speech.records import Segment, TranscriptionInfo, Word
from slimrt.speech.silence import Skipped
from slimrt.speech.vocabulary import WhisperTokens
from slimrt.speech.whisper import Heard, SpeechEngine, Told, Whisper, WhisperModel

_WHISPER_ONLY = ("best_of", "initial_prompt", "hotwords", "prefix", "suppress_blank", "suppress_tokens",
                 "clip_timestamps")  # fmt: skip
_LEAST_CONTEXT = 16  # half of it is for text: two times and some words
Transcript = tuple[list[Segment], TranscriptionInfo]


def transcribe(
    runtime: Runtime, audios: Sequence[Audio], options: Transcription, seed: int, sample_rate: int = SAMPLE_RATE
) -> list[Transcript]:
    """The segments of each sound, and about it. Arguments and errors as Model.transcribe."""
    kind = require(runtime, "whisper", "moonshine", to="transcribe")
    check_sequences(runtime, options.sequences)
    make = _whisper_maker(runtime, options) if kind == "whisper" else _moonshine_maker(runtime, options)
    sounds = _read(audios, sample_rate, options.max_seconds)
    heard = [Skipped.silences_of(one.samples) if options.skip_silence else None for one in sounds]
    progress = _Progress(options, [seconds(one.samples) for one in sounds])
    with runtime.use() as engine:
        tasks = [
            (options.sequences, _one(make, engine, sound, skipped, seed + i, _Listener(options, progress, i)))
            for i, (sound, skipped) in enumerate(zip(sounds, heard, strict=True))
        ]
        return run(engine, tasks, int(runtime.info["n_seqs"]))


def _read(audios: Sequence[Audio], sample_rate: int, max_seconds: float) -> list[Sound]:
    """The sounds; what their files warn of is a UserWarning too, unless who calls has read them and knows."""
    sounds = []
    for audio in audios:
        sounds.append(read_sound(audio, sample_rate, max_seconds=max_seconds))
        for warning in () if isinstance(audio, Sound) else sounds[-1].warnings:
            warn(warning)
    return sounds


Maker = Callable[[SpeechEngine, int, Heard, Told], Whisper | Moonshine]


def _one(
    make: Maker, engine: SpeechEngine, sound: Sound, skipped: Skipped | None, seed: int, listener: _Listener
) -> Task[Transcript]:
    """One sound of a batch."""
    samples, segments = sound.samples if skipped is None else skipped.samples, list[Segment]()

    def heard(time: float) -> None:
        listener.heard(time if skipped is None else skipped.original_time(time, ends=True))

    def told(segment: Segment) -> None:
        segments.append(segment if skipped is None else _moved(segment, skipped))
        listener.told(segments[-1])

    model = make(engine, seed, heard, told)
    yield from model.transcribe(samples)
    duration = seconds(sound.samples)
    listener.heard(duration)  # the silence at its end too, and what was not to be heard
    language, probability = None, 0.0
    if isinstance(model, Whisper):
        language, probability = model.language, model.language_probability
    clips = listener.options.clips(seconds(samples))
    spoken = sum(end - start for start, end in clips)
    info = TranscriptionInfo(language, probability, duration, spoken, seed, sound.warnings)
    listener.finished(segments, info)
    return segments, info


def _moved(segment: Segment, skipped: Skipped) -> Segment:
    """A segment at its time in the sound with its silences."""
    words = segment.words and tuple(
        Word(word.word, skipped.original_time(word.start), skipped.original_time(word.end, ends=True), word.probability)
        for word in segment.words
    )
    start, end = skipped.original_time(segment.start), skipped.original_time(segment.end, ends=True)
    return replace(segment, start=start, end=end, words=words)


def _whisper_maker(runtime: Runtime, options: Transcription) -> Maker:
    model = whisper_model(runtime)
    model.tokens.check(options.language, options.task, options.timestamps)
    for id in () if options.suppress_tokens is None else options.suppress_tokens:
        if not -1 <= id < model.n_vocab:
            raise ValueError(f"suppress_tokens: the model has no token {id}, only 0 to {model.n_vocab - 1}")
    if model.n_ctx < _LEAST_CONTEXT:
        raise ContextOverflowError(
            f"a context of {model.n_ctx} tokens leaves no room for a text beside what says how to write it: give n_ctx "
            f"{_LEAST_CONTEXT} or more"
        )
    return lambda engine, seed, heard, told: Whisper(engine, model, options, seed, heard, told)


def whisper_model(runtime: Runtime) -> WhisperModel:
    """What the model's file says that decoding needs."""
    file = runtime.source.file
    keys = set(file.keys())

    def listed(name: str) -> tuple[int, ...] | None:
        key = f"slimrt.whisper.{name}"
        return tuple(int(id) for id in file.value(key)) if key in keys else None

    tokens = WhisperTokens.of(runtime.source.tokenizer, runtime.n_vocab)
    named = listed("alignment_heads") or ()
    encoder = core.encoder_of(runtime.info)
    return WhisperModel(
        tokens,
        n_mels=int(encoder["n_inputs"]),
        n_frames=2 * int(encoder["n_source"]),
        n_ctx=runtime.n_ctx,
        n_vocab=runtime.n_vocab,
        suppress=listed("suppress_tokens") or (),
        begin_suppress=listed("begin_suppress_tokens"),
        heads=tuple(zip(named[::2], named[1::2], strict=True)) or _later_heads(runtime),
    )


def _later_heads(runtime: Runtime) -> tuple[tuple[int, int], ...]:
    """What stands for the heads that follow the sound where a file names none: the later half, as in openai/whisper."""
    layers, heads = int(runtime.info["n_layers"]), int(runtime.info["n_heads"])
    return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))


def _moonshine_maker(runtime: Runtime, options: Transcription) -> Maker:
    if options.word_timestamps:
        raise UnsupportedError("Moonshine tells no times of words")
    if options.language not in (None, "en") or options.task != "transcribe":
        raise UnsupportedError("Moonshine transcribes English, and nothing else")
    for name in _WHISPER_ONLY:
        if getattr(options, name) != getattr(Transcription, name):
            raise UnsupportedError(f"{name} is for Whisper, not Moonshine")
    if 0.0 not in options.temperatures:
        raise UnsupportedError("Moonshine is greedy or takes num_beams: temperature must be 0, or have 0 among others")
    tokenizer, start = runtime.source.tokenizer, int(runtime.info["decoder_start_token_id"])
    return lambda engine, seed, heard, told: Moonshine(engine, tokenizer, start, runtime.n_ctx, options, heard, told)


class _Progress:
    """Adds up what the sounds of a batch have come to, in hundredths of a second."""

    def __init__(self, options: Transcription, durations: Sequence[float]):
        self._report = options.on_progress
        self._done = [0.0] * len(durations)
        self._total = sum(durations)

    def heard(self, index: int, time: float) -> None:
        if time <= self._done[index]:
            return
        self._done[index] = time
        if self._report is not None:
            self._report("transcribe", round(100 * sum(self._done)), round(100 * self._total))


@dataclass(frozen=True)
class _Listener:
    """Passes what becomes of the i-th sound on to who wants to know."""

    options: Transcription
    progress: _Progress
    index: int

    def heard(self, time: float) -> None:
        self.progress.heard(self.index, time)

    def told(self, segment: Segment) -> None:
        if self.options.on_segment is not None:
            self.options.on_segment(self.index, segment)

    def finished(self, segments: list[Segment], info: TranscriptionInfo) -> None:
        if self.options.on_result is not None:
            self.options.on_result(self.index, segments, info)
