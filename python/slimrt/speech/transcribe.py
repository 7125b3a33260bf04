"""Transcription with a loaded model; several sounds form a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.generation.loop import loop_of
from slimrt.generation.search import Task
from slimrt.generation.sequences import Sequences
from slimrt.info import encoder_of
from slimrt.plumbing.notes import tell, warn
from slimrt.runtime.kinds import places, require
from slimrt.runtime.runtime import Runtime
from slimrt.speech.audio import SAMPLE_RATE, Audio, Sound, read_sound, seconds
from slimrt.speech.batched import Make, ignored, in_batches
from slimrt.speech.listening import Progress, Source, Transcript
from slimrt.speech.mel import HOP
from slimrt.speech.moonshine import Moonshine
from slimrt.speech.options import Transcription
from slimrt.speech.records import Segment
from slimrt.speech.silence import Skipped
from slimrt.speech.vad import Vad
from slimrt.speech.vocabulary import WhisperTokens
from slimrt.speech.whisper import Heard, SpeechEngine, Told, Whisper, WhisperModel

_WHISPER_ONLY = ("best_of", "initial_prompt", "hotwords", "prefix", "suppress_blank", "suppress_tokens",
                 "clip_timestamps")  # fmt: skip
_LEAST_CONTEXT = 16  # half of it is for text: two timestamps and some words


def transcribe(
    runtime: Runtime, audios: Sequence[Audio], options: Transcription, seed: int, sample_rate: int = SAMPLE_RATE
) -> list[Transcript]:
    """The transcript of each sound. Arguments and errors as Model.transcribe."""
    kind = require(runtime, "whisper", "moonshine", to="transcribe")
    taken = _places(runtime, options)
    make = _whisper_maker(runtime, options) if kind == "whisper" else _moonshine_maker(runtime, options)
    sounds = _read(audios, sample_rate, options.max_seconds)
    progress = Progress(options, [seconds(one.samples) for one in sounds])
    sources = [
        Source(sound, _without_silence(sound, options.voice), seed + i, options, progress, i)
        for i, sound in enumerate(sounds)
    ]
    made, loop = partial(make, Sequences(runtime)), loop_of(runtime)
    if options.batch_size is not None:
        return in_batches(loop, made, sources, taken, options.batch_size)
    alone = len(sources) == 1
    return loop.run((taken, _one(made, source, alone)) for source in sources)


def detect_languages(
    runtime: Runtime, audios: Sequence[Audio], options: Transcription, sample_rate: int = SAMPLE_RATE
) -> list[dict[str, float]]:
    """Probabilities of languages in the first window of each sound. Arguments and errors as Model.detect_language."""
    require(runtime, "whisper", to="detect a language")
    model = whisper_model(runtime)
    if not model.tokens.languages:
        raise UnsupportedError("this model is for English only: there is no language to detect")
    window, heard = model.n_frames * HOP, []
    for sound in _read(audios, sample_rate, options.max_seconds):
        skipped = _without_silence(sound, options.voice)
        heard.append((sound.samples if skipped is None else skipped.samples)[:window])
    engine = Sequences(runtime)
    return loop_of(runtime).run((1, Whisper(engine, model, options, 0, ignored, ignored).detect(one)) for one in heard)


def _places(runtime: Runtime, options: Transcription) -> int:
    """How many of the loop's sequences a sound uses. ValueError: the model has too few; ContextOverflowError: its
    cache has too few rows."""
    taken = places(runtime, options.sequences, runtime.n_ctx)
    needed, there = (options.batch_size or 1) * options.sequences, int(runtime.info["n_seqs"])
    if needed > there:
        raise ValueError(
            f"batch_size {options.batch_size} needs {needed} sequences at once, the model has {there}: load it with "
            f"n_seqs={needed}"
        )
    return taken


def _read(audios: Sequence[Audio], sample_rate: int, max_seconds: float) -> list[Sound]:
    """Read the sounds. Warnings become UserWarnings, except for Sounds, whose warnings the caller already has."""
    sounds = []
    for audio in audios:
        sounds.append(read_sound(audio, sample_rate, max_seconds=max_seconds))
        for warning in () if isinstance(audio, Sound) else sounds[-1].warnings:
            warn(warning)
    return sounds


def _without_silence(sound: Sound, voice: Vad | None) -> Skipped | None:
    return None if voice is None else Skipped.all_but(sound.samples, voice.spans(sound.samples))


def _one(make: Make, source: Source, at_once: bool) -> Task[Transcript]:
    """A task for one sound, window after window. at_once: compute its spectrogram now, not within a step, where it
    would delay others; for many sounds that would take too much memory."""
    segments: list[Segment] = []

    def told(segment: Segment) -> None:
        segments.append(source.told(segment))

    model = make(source.options, source.seed, source.heard, told)
    prepared = model.prepare(source.samples) if at_once else None

    def hear() -> Task[Transcript]:
        yield from model.transcribe(source.samples, prepared)
        if isinstance(model, Whisper):
            return source.finished(segments, model.language, model.language_probability)
        return source.finished(segments, None, 0.0)

    return hear()


Maker = Callable[[SpeechEngine, Transcription, int, Heard, Told], Whisper | Moonshine]


def _whisper_maker(runtime: Runtime, options: Transcription) -> Maker:
    model = whisper_model(runtime, words=options.word_timestamps)
    model.tokens.check(options.language, options.task)
    for id in () if options.suppress_tokens is None else options.suppress_tokens:
        if not -1 <= id < model.n_vocab:
            raise ValueError(f"suppress_tokens: the model has no token {id}, only 0 to {model.n_vocab - 1}")
    if model.n_ctx < _LEAST_CONTEXT:
        raise ContextOverflowError(
            f"a context of {model.n_ctx} tokens leaves no room for a text beside what says how to write it: give n_ctx "
            f"{_LEAST_CONTEXT} or more"
        )
    return lambda engine, options, seed, heard, told: Whisper(engine, model, options, seed, heard, told)


def whisper_model(runtime: Runtime, *, words: bool = False) -> WhisperModel:
    """The decoding parameters in a model's file. words: word times are wanted, so warn if the file's list of alignment
    heads is wrong."""
    file = runtime.source.file
    keys = set(file.keys())

    def listed(name: str) -> tuple[int, ...] | None:
        key = f"slimrt.whisper.{name}"
        return tuple(int(id) for id in file.value(key)) if key in keys else None

    tokens = WhisperTokens.of(runtime.source.tokenizer, runtime.n_vocab)
    named = listed("alignment_heads") or ()
    encoder = encoder_of(runtime.info)
    return WhisperModel(
        tokens,
        n_mels=int(encoder["n_inputs"]),
        n_frames=2 * int(encoder["n_source"]),
        n_ctx=runtime.n_ctx,
        n_vocab=runtime.n_vocab,
        suppress=listed("suppress_tokens") or (),
        begin_suppress=listed("begin_suppress_tokens"),
        heads=_following_heads(runtime, tuple(zip(named[::2], named[1::2], strict=True)), words),
    )


def _following_heads(runtime: Runtime, named: tuple[tuple[int, int], ...], words: bool) -> tuple[tuple[int, int], ...]:
    """The decoder's alignment heads, (layer, head), as named in the file. If it names none, or some that do not exist
    (those of a larger model), all heads of the later half of the layers, as in openai/whisper."""
    layers, heads = int(runtime.info["n_layers"]), int(runtime.info["n_heads"])
    beyond = next((one for one in named if one[0] >= layers or one[1] >= heads), None)
    if named and beyond is None:
        return named
    if beyond is not None and words:
        tell(
            f"{runtime.source.name} names head {beyond[1]} of layer {beyond[0]} for the times of words, and has "
            f"{layers} layers of {heads} heads: those of its later half stand in"
        )
    return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))


def _moonshine_maker(runtime: Runtime, options: Transcription) -> Maker:
    if options.word_timestamps:
        raise UnsupportedError("Moonshine has no word times")
    if options.language not in (None, "en") or options.task != "transcribe":
        raise UnsupportedError("Moonshine transcribes English, and nothing else")
    for name in _WHISPER_ONLY:
        if getattr(options, name) != getattr(Transcription, name):
            raise UnsupportedError(f"{name} is for Whisper, not Moonshine")
    if 0.0 not in options.temperatures:
        raise UnsupportedError("Moonshine is greedy or takes num_beams: temperature must be 0, or have 0 among others")
    tokenizer, start = runtime.source.tokenizer, int(runtime.info["decoder_start_token_id"])
    n_ctx = runtime.n_ctx
    return lambda engine, options, _, heard, told: Moonshine(engine, tokenizer, start, n_ctx, options, heard, told)
