"""What models are for besides continuing a text: sound to text, text to text, vectors, forecasts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.options import PredictOptions
from slimrt.generation.embed import embed
from slimrt.generation.text2text import Text2Text, Text2TextOptions, prefixed, text2text
from slimrt.plumbing.keywords import named
from slimrt.results import Generation
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import TokenIds, as_ids, as_prompt, is_batch
from slimrt.speech.audio import SAMPLE_RATE, Audio
from slimrt.speech.options import DetectOptions, TranscribeOptions, Transcription
from slimrt.speech.records import Segment, TranscriptionInfo

if TYPE_CHECKING:
    import pandas as pd

Text = str | TokenIds
Texts = list[str] | list[list[int]]


class Tasks:
    """Methods of slimrt.Model; each is for some kinds of models, and says so of the others."""

    _runtime: Runtime

    def _seed_of(self, seed: int | None) -> int:
        raise NotImplementedError

    @overload
    def transcribe(
        self, audio: list[Any], *, sample_rate: int = SAMPLE_RATE, **options: Unpack[TranscribeOptions]
    ) -> list[tuple[list[Segment], TranscriptionInfo]]: ...

    @overload
    def transcribe(
        self, audio: Audio, *, sample_rate: int = SAMPLE_RATE, **options: Unpack[TranscribeOptions]
    ) -> tuple[list[Segment], TranscriptionInfo]: ...

    @named
    def transcribe(
        self, audio: Any, *, sample_rate: int = SAMPLE_RATE, **options: Unpack[TranscribeOptions]
    ) -> tuple[list[Segment], TranscriptionInfo] | list[tuple[list[Segment], TranscriptionInfo]]:
        """What is said in a sound of any length: segments, and about the whole. For Whisper and Moonshine.

        Args:
            audio: a file (WAV; with the extra `audio` FLAC, Ogg, MP3, M4A, MP4, MKV, ...), by its path or opened in
                binary, or an array (n,) or (n, channels), full scale 1; a list of these gives a list of results,
                decoded together as far as n_seqs allows.
            sample_rate: of arrays, Hz; files know theirs.
            language: a code or name, "en" or "English"; None: detected in the first window.
            task: "transcribe", or "translate" to English.
            timestamps: let the model tell times; without, a segment is a window.
            word_timestamps: when each word was said, by the attention of the decoder.
            num_beams: 1: greedy. best_of: texts drawn at temperatures above 0, of which the likeliest is taken. Both
                take so many of the model's n_seqs. length_penalty: power of the length that a score is divided by.
                patience: beams end when there are so many times num_beams texts.
            temperature: or several, tried while a text fails: compression_ratio_threshold 2.4 (more repeats itself),
                logprob_threshold -1.0 (mean of the tokens', less is unlikely). None: no threshold.
            no_speech_threshold: 0.6; an unlikely text where silence is likelier than this is none.
            condition_on_previous_text: show the model what was said in the windows before.
            initial_prompt: text that stands before the first window: names, spelling. hotwords: the same before every
                window. prefix: what the text of the first window begins with.
            max_initial_timestamp: 1.0, seconds into a window by which its first segment begins.
            suppress_blank: no text begins with a space alone, or with its end. suppress_tokens: ids that never come;
                None: what the file says, and so does -1 among others.
            clip_timestamps: hear only these stretches: seconds start, end, start, end ..., the last end may be missing;
                text such as "0,5" too.
            vad: how silences are found that are left out; times are those of the sound with them. "none": they stay.
                "energy": by loudness. "silero": by a network that knows speech from noise (the extra `vad`).
                skip_silence: the same as "energy". vad_parameters: threshold 0.5 (of silero: a probability),
                min_speech_duration_ms 0 (what is shorter is none), min_silence_duration_ms 2000 (what is shorter
                stays), speech_pad_ms 400 (stays on either side).
            batch_size: decode so many windows of a sound together; needs so many n_seqs, times num_beams. Windows are
                cut beforehand, where silence was left out or where it is quietest in the last quarter; none is shown
                the text before it (condition_on_previous_text says nothing), all of them initial_prompt. None: one
                after the other, each from where the last one ended.
            max_seconds: a longer sound is refused before it fills the memory; 4 hours.
            seed: of what is drawn at temperatures above 0; the i-th sound of a list uses seed + i.
            on_progress: called as f("transcribe", done, total) in hundredths of a second of sound.
            on_segment: called as f(i, segment) as soon as there is another one of the i-th sound; on_result: as
                f(i, segments, info) when that is done. An exception from any of these ends the work.

        Moonshine transcribes English, tells no times but those of stretches of 30 s, and is greedy or takes num_beams:
        timestamps, thresholds, condition_on_previous_text and max_initial_timestamp say nothing to it.

        A file that is cut off is read to its end, with a UserWarning that info.warnings repeats.

        Raises:
            AudioError: not a sound, empty, longer than max_seconds, or with NaN in it. FileNotFoundError: no such file.
            ContextOverflowError: n_ctx is too small for any text, or the cache for num_beams or best_of of them.
            UnsupportedError: not a model of speech, one that lacks what is asked for, or an extra is missing.
            ValueError, TypeError: an option out of its range, or of a wrong kind.
        """
        from slimrt.speech.transcribe import transcribe

        settings = Transcription(**options)
        audios = audio if _several(audio) else [audio]
        results = transcribe(self._runtime, audios, settings, self._seed_of(settings.seed), sample_rate)
        return results if _several(audio) else results[0]

    @overload
    def detect_language(
        self, audio: list[Any], *, sample_rate: int = SAMPLE_RATE, **options: Unpack[DetectOptions]
    ) -> list[tuple[str, dict[str, float]]]: ...

    @overload
    def detect_language(
        self, audio: Audio, *, sample_rate: int = SAMPLE_RATE, **options: Unpack[DetectOptions]
    ) -> tuple[str, dict[str, float]]: ...

    @named
    def detect_language(
        self, audio: Any, *, sample_rate: int = SAMPLE_RATE, **options: Unpack[DetectOptions]
    ) -> tuple[str, dict[str, float]] | list[tuple[str, dict[str, float]]]:
        """The language spoken in the first window of a sound, and the probability of each that the model knows, the
        likeliest first. For Whisper models of several languages.

        Args:
            audio, sample_rate, vad, vad_parameters, max_seconds: as transcribe's; with a vad the first window is that
                of what is left.

        Raises:
            UnsupportedError: not Whisper, a model of English alone, or an extra is missing. Others as transcribe.
        """
        from slimrt.speech.transcribe import detect_languages

        settings = Transcription(**options)
        found = detect_languages(self._runtime, audio if _several(audio) else [audio], settings, sample_rate)
        results = [(next(iter(likely)), likely) for likely in found]
        return results if _several(audio) else results[0]

    @overload
    def text2text(self, text: Text, **options: Unpack[Text2TextOptions]) -> Generation: ...

    @overload
    def text2text(self, text: Texts, **options: Unpack[Text2TextOptions]) -> list[Generation]: ...

    @named
    def text2text(self, text: Any, **options: Unpack[Text2TextOptions]) -> Generation | list[Generation]:
        """The text a model of the T5 family makes of another one, such as "summarize: ...".

        Args:
            text: text, or token ids with their end token; a list of either gives a list, decoded together as far as
                n_seqs allows.
            num_beams: 1. More search for a likelier text, and take so many of the model's n_seqs; they go with
                temperature 0 only. length_penalty: 1.0, power of the length that a score is divided by.
                early_stopping: end the search with the first num_beams texts.
            max_tokens: 256. temperature: 0, greedy. Others as Model.generate.
            on_result: called as f(i, generation) as soon as the i-th text is done, in whatever order they are. An
                exception from it ends the work.

        Raises:
            UnsupportedError: not a model of the T5 family, or text for one without a tokenizer.
            ContextOverflowError: the text is longer than the encoder takes, or the cache has too few rows for beams.
            ValueError, TypeError: an option out of its range, or of a wrong kind.
        """
        settings, called = Text2Text(**options), time.perf_counter()
        several = is_batch(text)
        sources = [self._source_ids(one) for one in (text if several else [text])]
        results = text2text(self._runtime, sources, settings, self._seed_of(settings.seed), called)
        return results if several else results[0]

    @overload
    def translate(
        self, text: str, *, source: str | None = None, target: str | None = None, **options: Unpack[Text2TextOptions]
    ) -> Generation: ...

    @overload
    def translate(
        self, text: list[str], *, source: str | None = None, target: str | None = None,
        **options: Unpack[Text2TextOptions],
    ) -> list[Generation]: ...  # fmt: skip

    @named
    def translate(
        self, text: str | list[str], *, source: str | None = None, target: str | None = None,
        **options: Unpack[Text2TextOptions],
    ) -> Generation | list[Generation]:  # fmt: skip
        """text2text(), with "translate English to German: " in front where source and target are named so."""
        whole = [prefixed(one, source, target) for one in (text if isinstance(text, list) else [text])]
        return self.text2text(whole if isinstance(text, list) else whole[0], **options)

    @overload
    def embed(
        self, texts: Texts, *, pooling: Literal["mean", "last"] = "mean", normalize: bool = True
    ) -> NDArray[np.float32]: ...

    @overload
    def embed(self, texts: Texts, *, pooling: None, normalize: bool = True) -> list[NDArray[np.float32]]: ...

    @overload
    def embed(
        self, texts: Text, *, pooling: Literal["mean", "last"] | None = "mean", normalize: bool = True
    ) -> NDArray[np.float32]: ...

    @named
    def embed(
        self, texts: Text | Texts, *, pooling: Literal["mean", "last"] | None = "mean", normalize: bool = True
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Texts as vectors: float32 (n, d_model) of a list of n, computed n_seqs at a time; (d_model,) of one.

        A token's vector is its state after the last layer and norm; of a model of the T5 family, the encoder's output.

        Args:
            texts: a text, or its token ids; or a list of these.
            pooling: "mean" of a text's tokens, BOS among them; "last": its last token's; None: each token's, float32
                (tokens, d_model) of a text.
            normalize: divide each vector by its Euclidean norm.

        Raises:
            ContextOverflowError: a text does not fit. ValueError: one has no tokens.
            UnsupportedError: another pooling, or a model that reads no texts.
        """
        several = is_batch(texts)
        given: list[Any] = list(texts) if several else [texts]
        ids = [as_prompt(self._runtime, one) for one in given]
        vectors = embed(self._runtime, ids, pooling, normalize)
        if not several:
            return vectors[0]
        return vectors if pooling is None else np.array(vectors, np.float32).reshape(-1, self._runtime.info["d_model"])

    @named
    def predict_quantiles(
        self,
        series: Any,
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = (0.1, 0.5, 0.9),
        **options: Unpack[PredictOptions],
    ) -> NDArray[np.float32]:
        """Quantiles of the values that follow series: float32 (batch, prediction_length, q). For Chronos and Bolt.

        Args:
            series: numbers (n,), or several: (batch, n), or a list of (n,) of any lengths. NaN is a missing value.
            prediction_length: steps; None: what the model was trained for. Beyond that it goes on from its own
                forecast.
            quantile_levels: from 0 to 1. Chronos-Bolt has nothing outside those it was trained for, mostly 0.1 to 0.9:
                its lowest and highest stand for what is beyond, with a warning.
            num_samples, temperature, top_k, top_p: of Chronos' sample paths; None: what the model says. Chronos-Bolt
                draws none.
            seed: makes the paths reproducible; series i uses seed + i.

        Raises:
            UnsupportedError: not a Chronos model.
            ValueError, TypeError: no numbers, infinite ones or beyond 1e17, none that the model reads, or an option out
                of its range.
        """
        from slimrt.forecast.predict import predict, warn_beyond

        seed = self._seed_of(options.get("seed"))
        quantiles, _ = predict(self._runtime, series, prediction_length, quantile_levels, seed, options)
        warn_beyond(self._runtime.source, quantile_levels)
        return quantiles

    def predict_df(
        self,
        df: pd.DataFrame,
        *,
        id_column: str = "item_id",
        timestamp_column: str = "timestamp",
        target: str = "target",
        prediction_length: int | None = None,
        quantile_levels: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        freq: str | pd.DateOffset | None = None,
        **options: Unpack[PredictOptions],
    ) -> pd.DataFrame:
        """The same of a pandas DataFrame with a row a step, as chronos-forecasting's predict_df (the extra `forecast`).

        Args:
            df: rows in any order. Columns but the three named are not read.
            id_column: which series a row is of. timestamp_column: when it is; every series has the same regular steps.
            target: the values; NaN is a missing one.
            prediction_length, quantile_levels and the other options: as predict_quantiles.
            freq: steps, as pandas names them ("D", "ME"); None: what the timestamps of series of 3 rows or more tell.
                It is used as it is, for series that are not regular too.

        Returns:
            A row for each series, in the order of their first rows, and step: id_column, timestamp_column,
            "target_name", "predictions" (of Chronos the mean of its paths, of Chronos-Bolt the median), and a column
            for each quantile level, called str(level).

        Raises:
            UnsupportedError: not a Chronos model, or pandas is missing.
            ValueError: no such column, dates that are ambiguous, given twice or not regular, without `freq`.
            Others as predict_quantiles.
        """
        from slimrt.forecast.frame import Columns, predict_frame
        from slimrt.forecast.predict import predict, warn_beyond

        seed = self._seed_of(options.get("seed"))
        found = predict_frame(
            lambda series: predict(self._runtime, series, prediction_length, quantile_levels, seed, options),
            df, Columns(id_column, timestamp_column, target), quantile_levels, freq,
        )  # fmt: skip
        warn_beyond(self._runtime.source, quantile_levels)
        return found

    def _source_ids(self, text: Text) -> list[int]:
        if isinstance(text, str):
            return self._runtime.source.tokenizer.encode(text)
        return as_ids(text, self._runtime.n_vocab)


def _several(given: Any) -> bool:
    """Whether a list of inputs was given, not one."""
    return isinstance(given, list)
