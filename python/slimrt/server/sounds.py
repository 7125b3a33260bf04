"""Routes for speech and forecasts: each runs a call of the library in a thread, batched with other requests."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from slimrt.cache.server_sizes import SOUND_SECONDS, forecast_bytes
from slimrt.errors import UnsupportedError
from slimrt.forecast.options import PredictOptions
from slimrt.forecast.predict import answered_levels, extent, predict, warn_beyond
from slimrt.generation.tickets import Call
from slimrt.model import Model
from slimrt.openai.responses import Json
from slimrt.runtime.kinds import require
from slimrt.server.errors import Refusal, refusal_of, wrong
from slimrt.server.exchange import ClientGone, Exchange
from slimrt.server.limits import PING_EVERY
from slimrt.server.protocol import read_object, take_fields
from slimrt.server.service import Service
from slimrt.speech.audio import TooLong, read_sound
from slimrt.speech.options import TranscribeOptions
from slimrt.speech.records import Segment, TranscriptionInfo
from slimrt.speech.subtitles import written

Result = TypeVar("Result")
_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
_UNTIMED = ("json", "text")
_FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]",
           "timestamp_granularities", "stream", "user")  # fmt: skip
_MOST_FIELDS = 32
_MOST_SERIES, _MOST_VALUES, _MOST_STEPS, _MOST_LEVELS = 1024, 1 << 20, 1 << 16, 99
_Forecast = tuple[Sequence[NDArray[np.float64]], int | None, list[float], PredictOptions]


@dataclass(frozen=True)
class SoundRequest:
    """A form sent to /v1/audio/transcriptions or translations. words: whether the times of words are wanted."""

    sound: bytes
    form: str
    options: TranscribeOptions
    words: bool
    stream: bool


class Sounds:
    """The routes of speech and forecasting models."""

    def __init__(self, service: Service):
        self._service = service

    async def transcriptions(self, exchange: Exchange) -> None:
        await self._respond(exchange, "transcribe")

    async def translations(self, exchange: Exchange) -> None:
        await self._respond(exchange, "translate")

    async def forecasts(self, exchange: Exchange) -> None:
        model, limits = self._service.model(), self._service.limits
        with self._service.places.take() as place:
            body, call = await exchange.body(), Call()

            def read() -> tuple[_Forecast, int]:
                asked = forecast_request(exchange.path, read_object(body, limits))
                series, length, levels, options = asked
                steps, paths = extent(model._runtime, length, options.get("num_samples"))
                return asked, forecast_bytes(len(series) * steps, len(levels), paths)

            try:
                (series, length, levels, options), n_bytes = await self._service.apart(read)
            except Exception as error:
                raise refusal_of(error, "series") from error
            self._service.places.hold(place, n_bytes, "series")

            def forecast(_: Callable[[], None]) -> Json:
                seed = model._seed_of(options.get("seed"))
                found = predict(model._runtime, series, length, levels, seed, options, call)[0]
                warn_beyond(model._runtime.source, levels)
                return _forecasts(model, found, levels)

            try:
                await exchange.answer(await self._run_call(exchange, forecast, "series"))
            finally:
                call.give_up(ClientGone())

    async def _respond(self, exchange: Exchange, task: str) -> None:
        model = self._service.model()
        try:  # before the body: plans of other models have no room for sounds
            require(model._runtime, "whisper", "moonshine", to="transcribe")
        except UnsupportedError as error:
            raise refusal_of(error, "file") from error
        with self._service.places.take():
            request = await sound_request(exchange, task)
            if request.stream:
                return await self._stream(exchange, model, request)
            segments, info = await self._run_call(exchange, partial(_transcribe, model, request, None), "file")
            if request.form in ("json", "verbose_json"):
                await exchange.answer(_whole(request, task, segments, info))
            else:
                form = "txt" if request.form == "text" else request.form
                kind = "text/vtt" if form == "vtt" else "text/plain"
                await exchange.answer_bytes(written(form, segments, request.words).encode(), f"{kind}; charset=utf-8")

    async def _stream(self, exchange: Exchange, model: Model, request: SoundRequest) -> None:
        """Stream segments as they are transcribed, as OpenAI's transcript.text events."""
        events, queue, begun = asyncio.get_running_loop(), asyncio.Queue[Segment | None](), asyncio.Event()

        def tell(segment: Segment) -> None:
            events.call_soon_threadsafe(queue.put_nowait, segment)

        silence = time.monotonic() + self._service.limits.silence

        async def heard() -> Segment | None:
            """The next segment; meanwhile pings, but in the queue none before proxies would give up."""
            while True:
                try:
                    async with asyncio.timeout(PING_EVERY):
                        return await queue.get()
                except TimeoutError:
                    if begun.is_set() or time.monotonic() >= silence:
                        await exchange.ping()

        work = asyncio.create_task(self._run_call(exchange, partial(_transcribe, model, request, tell), "file", begun))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (segment := await heard()) is not None:
                await exchange.begin_events()
                await exchange.event({"type": "transcript.text.delta", "delta": segment.text})
            segments, _ = await work
        finally:
            work.cancel()
        await exchange.begin_events()
        await exchange.event({"type": "transcript.text.done", "text": _text(segments)})
        await exchange.end_events()

    async def _run_call(
        self,
        exchange: Exchange,
        work: Callable[[Callable[[], None]], Result],
        param: str,
        begun: asyncio.Event | None = None,
    ) -> Result:
        """Run a call in a thread. It gets a function that raises ClientGone once nobody waits for the result.

        Args:
            param: the field at fault if the call refuses. begun: set when it is its turn.

        Raises:
            Refusal: 400, the call refuses; 503, as Service.wait. ClientGone.
        """
        gone, begun = threading.Event(), begun or asyncio.Event()

        def check() -> None:
            if gone.is_set():
                raise ClientGone

        def begin() -> None:
            begun.set()
            exchange.news.set()

        made = asyncio.ensure_future(self._service.calling(partial(work, check), begin))

        def tell(_: asyncio.Future[Result]) -> None:
            if not made.cancelled():
                made.exception()  # retrieved, so that asyncio does not log it if nobody awaits the future
            exchange.news.set()

        made.add_done_callback(tell)
        try:
            await self._service.wait(exchange, made.done, begun.is_set)
            return made.result()
        except ClientGone:
            raise
        except Exception as error:
            raise refusal_of(error, param) from error
        finally:
            gone.set()
            if not begun.is_set():
                made.cancel()


def _transcribe(
    model: Model, request: SoundRequest, tell: Callable[[Segment], object] | None, check: Callable[[], None]
) -> tuple[list[Segment], TranscriptionInfo]:
    """Transcribe; runs in a thread."""
    try:
        sound = read_sound(io.BytesIO(request.sound), max_seconds=SOUND_SECONDS, on_block=check)
    except TooLong:
        raise wrong("file", f"a sound may last {SOUND_SECONDS} s here: cut it, or use slimrt transcribe") from None
    options = request.options.copy()
    options["on_progress"] = lambda *_: check()
    if tell is not None:
        options["on_segment"] = lambda _, segment: tell(segment)
    return model.transcribe(sound, **options)


async def sound_request(exchange: Exchange, task: str) -> SoundRequest:
    """A multipart form with audio. File names in it are ignored.

    Raises:
        Refusal: 400, not a form, or a field that is missing, unknown or wrong; others as Exchange.body. ClientGone.
    """
    form = await _form(exchange)
    try:
        return await _read(form, task)
    finally:
        await form.close()


async def _form(exchange: Exchange) -> FormData:
    body = await exchange.body()

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    headers = Headers(dict(exchange.headers))
    if not headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refusal(400, "a sound comes as multipart/form-data, in the field file", "invalid_form")
    try:
        parser = MultiPartParser(headers, stream(), max_files=1, max_fields=_MOST_FIELDS)
        return await parser.parse()
    except (MultiPartException, FormParserError, KeyError, ValueError) as error:
        raise Refusal(400, f"the form cannot be read: {error}", "invalid_form") from None


async def _read(form: FormData, task: str) -> SoundRequest:
    for name in form:
        if name not in _FIELDS:
            raise wrong(name[:64], f"there is no field {name:.64}; there are {', '.join(_FIELDS)}", "unknown_field")
    sound = form.get("file")
    if not isinstance(sound, UploadFile):
        raise wrong("file", "the form has no sound in the field file", "missing_field")
    text = {name: value for name, value in form.items() if isinstance(value, str)}
    response, stream = text.get("response_format") or "json", text.get("stream", "false").lower()
    if response not in _FORMATS:
        raise wrong("response_format", f"response_format must be one of {', '.join(_FORMATS)}, got {response:.64}")
    if stream not in ("true", "false"):
        raise wrong("stream", f"stream must be true or false, got {stream:.64}")
    wanted = [*form.getlist("timestamp_granularities[]"), *form.getlist("timestamp_granularities")]
    if not {*wanted} <= {"word", "segment"}:
        raise wrong("timestamp_granularities", "timestamp_granularities[] are word and segment")
    if stream == "true" and response not in _UNTIMED:
        raise wrong(
            "response_format",
            f"a stream has no times, which {response} needs: leave out stream, or ask for {' or '.join(_UNTIMED)}",
        )
    if wanted and response in _UNTIMED:
        raise wrong(
            "timestamp_granularities",
            f"timestamp_granularities[] needs response_format verbose_json, srt or vtt: {response} has no times",
        )
    words = "word" in wanted
    return SoundRequest(await sound.read(), response, _options(text, task, words), words, stream == "true")


def _options(text: Mapping[str, str], task: str, words: bool) -> TranscribeOptions:
    options: TranscribeOptions = {"task": task, "word_timestamps": words}
    if text.get("language"):
        options["language"] = text["language"]
    if text.get("prompt"):
        options["initial_prompt"] = text["prompt"]
    if text.get("temperature"):
        try:
            temperature = float(text["temperature"])
        except ValueError:
            raise wrong("temperature", f"temperature must be a number, got {text['temperature']:.64}") from None
        if temperature != 0:  # OpenAI's 0 means the default here too: raised step by step where a result is poor
            options["temperature"] = temperature
    return options


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def _whole(request: SoundRequest, task: str, segments: Sequence[Segment], info: TranscriptionInfo) -> Json:
    answer: Json = {"text": _text(segments)}
    if request.form == "json":
        return answer
    answer |= {"task": task, "language": info.language, "duration": info.duration, "warnings": list(info.warnings)}
    if request.words:
        answer["words"] = [
            {"word": word.word, "start": word.start, "end": word.end} for one in segments for word in one.words or ()
        ]
    return answer | {"segments": [_segment(one) for one in segments]}


def _segment(one: Segment) -> Json:
    return {
        "id": one.id, "seek": round(one.start * 100), "start": one.start, "end": one.end, "text": one.text,
        "tokens": list(one.tokens), "temperature": one.temperature, "avg_logprob": one.avg_logprob,
        "compression_ratio": one.compression_ratio, "no_speech_prob": one.no_speech_prob,
    }  # fmt: skip


def forecast_request(path: str, given: Json) -> _Forecast:
    """(series, prediction_length, quantile levels, options); null among the values is a missing one.

    Raises:
        Refusal: 400, a field that is unknown, of a wrong type, or out of bounds.
    """
    kinds: dict[str, Any] = {"series": list, "prediction_length": int, "quantile_levels": list, "num_samples": int,
                             "temperature": object, "top_k": int, "top_p": object, "seed": int,
                             "cross_learning": bool}  # fmt: skip
    fields = take_fields(path, given, kinds, ("series",))
    series, levels = fields["series"], fields["quantile_levels"] or [0.1, 0.5, 0.9]
    several = [series] if series and not isinstance(series[0], list) else series
    n_values = sum(len(one) if isinstance(one, list) else 1 for one in several)
    if not several or len(several) > _MOST_SERIES or n_values > _MOST_VALUES:
        raise wrong("series", f"series are 1 to {_MOST_SERIES} lists of at most {_MOST_VALUES} numbers together")
    for i, one in enumerate(several):
        if not isinstance(one, list) or not all(x is None or type(x) in (int, float) for x in one):
            raise wrong("series", f"series[{i}] must be a list of numbers or null")
    if len(levels) > _MOST_LEVELS:
        raise wrong("quantile_levels", f"quantile_levels are at most {_MOST_LEVELS}, got {len(levels)}")
    if not all(type(level) in (int, float) for level in levels):
        raise wrong("quantile_levels", "quantile_levels are numbers from 0 to 1")
    length = fields["prediction_length"]
    if length is not None and not 1 <= length <= _MOST_STEPS:
        raise wrong("prediction_length", f"prediction_length must be from 1 to {_MOST_STEPS}")
    options: Any = {name: fields[name] for name in PredictOptions.__annotations__ if fields[name] is not None}
    try:
        rows = [np.array([np.nan if x is None else x for x in one], np.float64) for one in several]
    except OverflowError:
        raise wrong("series", "series has a number that is too large for a float") from None
    return rows, length, levels, options


def _forecasts(model: Model, quantiles: Any, levels: Sequence[float]) -> Json:
    """The answer, with the levels that the quantiles really are, as in the JSON of the command line."""
    source = model._runtime.source
    data = [
        {"object": "forecast", "index": i,
         "quantiles": {str(level): row[:, j].tolist() for j, level in enumerate(levels)}}
        for i, row in enumerate(quantiles)
    ]  # fmt: skip
    said = {"quantile_levels": list(levels), "answered_levels": answered_levels(source, levels)}
    return {"object": "list", "model": source.name, **said, "data": data}
