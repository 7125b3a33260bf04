"""Tasks other than text generation: speech recognition, text-to-text, embeddings, forecasts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from slimrt.forecast.options import PredictOptions
from slimrt.generation.embed import embed
from slimrt.generation.languages import first_ids, source_ids, translation
from slimrt.generation.text2text import Text2TextOptions, text2text, with_own
from slimrt.plumbing.keywords import named
from slimrt.results import Generation
from slimrt.runtime.kinds import require
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import TokenIds, as_ids, as_prompt, is_batch
from slimrt.speech.audio import SAMPLE_RATE, Audio
from slimrt.speech.options import DetectOptions, TranscribeOptions, Transcription
from slimrt.speech.records import Segment, TranscriptionInfo

if TYPE_CHECKING:
    import pandas as pd

Text = str | TokenIds
Texts = list[str] | list[list[int]] | list[tuple[int, ...]] | list[NDArray[np.integer[Any]]]


class Tasks:
    """Methods of slimrt.Model that run certain kinds of models; for any other kind they raise UnsupportedError."""

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
        """Transcribe audio of any length: (segments, information about the whole). For Whisper and Moonshine.

        Args: (numbers are defaults)
            audio: a file (WAV; with the extra `audio` FLAC, Ogg, MP3, M4A, MP4, MKV, ...), by its path or opened in
                binary mode, or an array (n,) or (n, channels) of samples in -1 ... 1; a list of these gives a list of
                results, decoded together as far as n_seqs allows.
            sample_rate: of arrays, Hz; files contain theirs.
            language: a code or name, "en" or "English"; None: detected in the first window.
            task: "transcribe", or "translate" to English.
            timestamps: let the model predict timestamps; without them each window is one segment.
            word_timestamps: start and end of each word, from the decoder's cross-attention.
            num_beams: 1: greedy. best_of: samples drawn at temperatures above 0, of which the most likely is taken.
                Each takes a sequence of the model's n_seqs. length_penalty: a score is divided by the text's length to
                this power. patience: beam search ends when patience * num_beams texts have ended.
            temperature: one, or several that are tried in turn while a text fails: compression_ratio_threshold 2.4 (a
                higher ratio means repetition), logprob_threshold -1.0 (a lower mean log-probability of its tokens
                means an unlikely text). None: no threshold.
            no_speech_threshold: 0.6; a window whose text is unlikely and whose probability of no speech is above this
                is silent.
            condition_on_previous_text: prompt the model with the text of the windows before.
            initial_prompt: text in front of the first window, for names and spelling. hotwords: the same for every
                window. prefix: what the text of the first window starts with.
            max_initial_timestamp: 1.0: the latest start of the first segment of a window, seconds into the window.
            suppress_blank: a text must not start with a blank or an end token. suppress_tokens: ids that are never
                generated; None, or -1 among them: those of the file.
            clip_timestamps: transcribe only these intervals: seconds start, end, start, end ..., the last end may be
                missing; or text such as "0,5".
            vad: voice activity detection: how silence is found, which is then skipped; times remain those of the whole
                audio. "none": nothing is skipped. "energy": by loudness. "silero": by a network that tells speech from
                noise (the extra `vad`). skip_silence: the same as "energy". vad_parameters: threshold 0.5 (with silero
                a probability), min_speech_duration_ms 0 (shorter speech is ignored), min_silence_duration_ms 2000
                (shorter silence is kept), speech_pad_ms 400 (kept on either side of speech).
            batch_size: decode this many windows of one audio together; needs n_seqs of batch_size * num_beams. Windows
                are cut beforehand, at skipped silence or at the quietest point of their last quarter. Each is prompted
                with initial_prompt, none with the text before it (condition_on_previous_text has no effect). None: one
                window after another, each starting where the last segment ended.
            max_seconds: longer audio is refused before it fills the memory; 4 hours.
            seed: for sampling at temperatures above 0; the i-th audio of a list uses seed + i.
            on_progress: called as f("transcribe", done, total) in hundredths of a second of audio.
            on_segment: called as f(i, segment) for each new segment of the i-th audio. on_result: called as
                f(i, segments, info) when the i-th is done. An exception from any of these ends the work.

        Moonshine transcribes English, has no timestamps but those of intervals of 30 s, and decodes greedily or with
        num_beams: timestamps, thresholds, condition_on_previous_text and max_initial_timestamp have no effect.

        A truncated file is read to its end, with a UserWarning that is also in info.warnings.

        Raises:
            AudioError: not audio, empty, longer than max_seconds, or with NaN in it. FileNotFoundError: no such file.
            ContextOverflowError: n_ctx is too small for any text, or the cache for num_beams or best_of texts.
            UnsupportedError: not a speech model, one that lacks what is requested, or an extra is not installed.
            ValueError, TypeError: an option out of its range, or of a wrong type.
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
        """The language spoken in the first window of audio, and the probability of each language that the model knows,
        most likely first. For multilingual Whisper models.

        Args:
            audio, sample_rate, vad, vad_parameters, max_seconds: as for transcribe; with a vad the first window is
                taken after skipping silence.

        Raises:
            UnsupportedError: not Whisper, an English-only model, or an extra is not installed. Others as transcribe.
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
        """Transform a text with T5, BART or their kin, such as "summarize: ..." with T5.

        What is left out here is as the model's own generation settings say: num_beams, length_penalty, early_stopping
        (unless an option is given that beam search does not go with), max_tokens, and those that generate names.

        Args: (numbers are defaults of models without such settings)
            text: text, or token ids including the end token; a list of either gives a list, decoded together as far as
                n_seqs allows.
            num_beams: 1; more: beam search, which takes num_beams of the model's n_seqs and needs temperature 0.
                length_penalty: 1.0, a score is divided by the text's length to this power.
                early_stopping: end the search as soon as num_beams texts have ended.
            max_tokens: 256. temperature: 0, greedy. Others as Model.generate.
            on_result: called as f(i, generation) as soon as the i-th text is done, in the order in which they end. An
                exception from it ends the work.

        Raises:
            UnsupportedError: not such a model, or text for one without a tokenizer.
            ContextOverflowError: the text is longer than the encoder takes, or the cache has too few rows for beams.
            ValueError, TypeError: an option out of its range, or of a wrong type; text for a model whose texts are in a
                language (mBART, M2M100, NLLB), which translate() names.
        """
        called = time.perf_counter()
        self._require_text2text()
        first, several = first_ids(self._runtime), is_batch(text)
        settings = with_own(self._runtime, options, len(first))
        sources = [self._source_ids(one) for one in (text if several else [text])]
        results = text2text(self._runtime, sources, settings, self._seed_of(settings.seed), called, first)
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
        """text2text() from one language to another, as the model is told so.

        T5 reads "translate English to German: " in front of the text, if source and target are given (English and
        German here); mBART, M2M100 and NLLB need both, by their own codes (en_XX, en, eng_Latn); Marian's models of
        several target languages need the target (fra), those of one and BART neither.

        Raises:
            ValueError: a language that the model needs is not given, or it knows none of that name.
            Others as text2text.
        """
        called = time.perf_counter()
        self._require_text2text()
        way = translation(self._runtime, source, target)
        settings = with_own(self._runtime, options, len(way.first))
        sources = [way.ids(one) for one in (text if isinstance(text, list) else [text])]
        results = text2text(self._runtime, sources, settings, self._seed_of(settings.seed), called, way.first)
        return results if isinstance(text, list) else results[0]

    @overload
    def embed(
        self, texts: Texts, *, pooling: Literal["auto", "mean", "last"] = "auto", normalize: bool = True
    ) -> NDArray[np.float32]: ...

    @overload
    def embed(self, texts: Texts, *, pooling: None, normalize: bool = True) -> list[NDArray[np.float32]]: ...

    @overload
    def embed(
        self, texts: Text, *, pooling: Literal["auto", "mean", "last"] | None = "auto", normalize: bool = True
    ) -> NDArray[np.float32]: ...

    @named
    def embed(
        self, texts: Text | Texts, *, pooling: Literal["auto", "mean", "last"] | None = "auto", normalize: bool = True
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Embed texts: float32 (n, d_model) for a list of n, computed n_seqs at a time; (d_model,) for one text.

        A token's vector is its hidden state after the last layer and norm; with an encoder, the encoder's output.

        Args:
            texts: a text, or its token ids; or a list of these.
            pooling: "mean": over a text's tokens, BOS included; "last": the last token's vector; "auto": which of these
                the model's files say, "mean" if they say nothing; None: no pooling, float32 (tokens, d_model) for each
                text.
            normalize: divide each vector by its Euclidean norm.

        Raises:
            ContextOverflowError: a text does not fit. ValueError: a text has no tokens.
            UnsupportedError: another pooling, here or in the model's files; or a model that does not read text.
        """
        several = is_batch(texts)
        given: list[Any] = list(texts) if several else [texts]
        ids = [self._read_ids(one) for one in given]
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
        """Quantile forecasts of time series: float32 (batch, prediction_length, q). For Chronos, Chronos-Bolt and
        Chronos-2.

        Args:
            series: numbers (n,), or several series: (batch, n), or a list of (n,) of any lengths. NaN: missing value.
                For Chronos-2 also series that are forecast together: (batch, variates, n), a list with (variates, n),
                or dicts as in chronos-forecasting, {"target": (n,) or (variates, n), "past_covariates": {name: (n,)},
                "future_covariates": {name: (prediction_length,)}}. All targets follow one another in the result.
            prediction_length: steps to forecast; None: what the model was trained for. Beyond that the forecast is
                continued from its own values.
            quantile_levels: from 0 to 1. Chronos-Bolt and Chronos-2 have only the levels that they were trained for,
                mostly 0.1 to 0.9, and 0.01 to 0.99: levels outside get the lowest or highest, with a warning.
            num_samples, temperature, top_k, top_p: for Chronos' sample paths; None: the model's own. Not for
                Chronos-Bolt and Chronos-2, which do not sample.
            seed: makes the sample paths reproducible; series i uses seed + i.
            cross_learning: for Chronos-2: all series are forecast together; their last values are of one time.

        Raises:
            UnsupportedError: not a Chronos model.
            ValueError, TypeError: values that are not numbers, infinite, or beyond 1e17, a series in which the model
                has nothing to read, covariates of another length, or an option out of its range.
            ContextOverflowError: series that are forecast together take more rows than n_source.
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
        """predict_quantiles() for a pandas DataFrame with one row per series and time step, like chronos-forecasting's
        predict_df (the extra `forecast`).

        Args:
            df: rows in any order. Only the three named columns are read; of others, which chronos-forecasting takes
                for covariates, a warning is given with Chronos-2.
            id_column: identifies the series of a row. timestamp_column: its time; all series have the same regular
                steps.
            target: the values; NaN: missing value.
            prediction_length, quantile_levels and the other options: as predict_quantiles.
            freq: the step as a pandas frequency ("D", "ME"); None: inferred from the series with at least 3 rows. If
                given it is not checked, and series may be irregular.

        Returns:
            One row per series, in the order of their first rows, and step: id_column, timestamp_column,
            "target_name", "predictions" (Chronos: the mean of the sample paths; others: the median), and a column
            for each quantile level, named str(level).

        Raises:
            UnsupportedError: not a Chronos model, or pandas is not installed.
            ValueError: no such column, ambiguous dates, without `freq` duplicate or irregular timestamps, or series of
                different ends with cross_learning.
            Others as predict_quantiles.
        """
        from slimrt.forecast.frame import Columns, predict_frame, warn_unread
        from slimrt.forecast.predict import predict, warn_beyond

        seed, columns = self._seed_of(options.get("seed")), Columns(id_column, timestamp_column, target)
        reads_groups = self._runtime.source.kind == "chronos-2"
        found = predict_frame(
            lambda series: predict(self._runtime, series, prediction_length, quantile_levels, seed, options),
            df, columns, quantile_levels, freq, reads_groups and options.get("cross_learning") is True,
        )  # fmt: skip
        if reads_groups:
            warn_unread(df, columns)
        warn_beyond(self._runtime.source, quantile_levels)
        return found

    def _require_text2text(self) -> None:
        require(self._runtime, "text2text", to="turn a text into another")

    def _read_ids(self, text: Text) -> list[int]:
        """The ids that the model reads: a prompt's, or its encoder's."""
        encodes = self._runtime.source.kind == "text2text"
        return self._source_ids(text) if encodes else as_prompt(self._runtime, text)

    def _source_ids(self, text: Text) -> list[int]:
        if isinstance(text, str):
            return source_ids(self._runtime, text)
        return as_ids(text, self._runtime.n_vocab)


def _several(given: Any) -> bool:
    """Whether an argument is a list of inputs rather than one input."""
    return isinstance(given, list)
