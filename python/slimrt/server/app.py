"""The routes: OpenAI's, some of llama-server's, /health, /metrics and a web page."""

from __future__ import annotations

import base64
import difflib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slimrt import core
from slimrt.cache.config import kinds
from slimrt.cache.server_sizes import SCORE
from slimrt.generation.embed import embeddings as embedding_tasks
from slimrt.generation.scored import scored
from slimrt.model import Model
from slimrt.openai.responses import Head, Json, embeddings
from slimrt.plumbing.notes import LOG
from slimrt.runtime.session import as_prompt
from slimrt.server.errors import Refusal, refusal_of
from slimrt.server.exchange import ClientGone, Exchange
from slimrt.server.guard import Access, Guard
from slimrt.server.limits import Place
from slimrt.server.metrics import CONTENT_TYPE
from slimrt.server.protocol import (
    CompletionRequest,
    TextRequest,
    chat_request,
    completion_request,
    embedding_request,
    read_object,
    take_fields,
)
from slimrt.server.service import Service
from slimrt.server.sounds import Sounds
from slimrt.server.text import Plan, Scored, plan_chat, plan_completion
from slimrt.server.texts import Texts, runs_of, translation_of
from slimrt.tokenizer.tool_format import tool_format

Answer = Callable[[Exchange], Awaitable[None]]


def build_app(service: Service, access: Access) -> ASGIApp:
    """The ASGI application: guard and routes; the service starts and stops with it."""
    routes = Routes(service)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    listed = [
        Route(path, _Endpoint(service, path, answer), methods=[method]) for method, path, answer in routes.listed()
    ]
    app = Starlette(routes=listed, lifespan=lifespan, exception_handlers={HTTPException: _no_route})
    return Guard(app, access, service.limits)


class _Endpoint:
    """A route as an ASGI application; errors become responses in OpenAI's format."""

    def __init__(self, service: Service, path: str, answer: Answer):
        self._service, self._path, self._answer = service, path, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        called, metrics = time.perf_counter(), self._service.metrics
        async with Exchange(scope, receive, send, self._service.limits) as exchange:
            try:
                try:
                    await self._answer(exchange)
                except ClientGone:
                    raise
                except Exception as error:
                    refusal = refusal_of(error)
                    if refusal.status >= 500 and not isinstance(error, Refusal):
                        LOG.error("%s failed", self._path, exc_info=error)
                    metrics.refused.labels(refusal.code or "").inc()
                    await exchange.refuse(refusal)
            except ClientGone:
                exchange.status = exchange.status or 499
            metrics.requests.labels(self._path, str(exchange.status)).inc()
            metrics.whole.observe(time.perf_counter() - called)


class Routes:
    """The handlers of the routes."""

    def __init__(self, service: Service):
        self._service, self._sounds = service, Sounds(service)

    def listed(self) -> list[tuple[str, str, Answer]]:
        """Method, path and handler of each route."""
        return [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/embeddings", self.embeddings),
            ("POST", "/v1/audio/transcriptions", self._sounds.transcriptions),
            ("POST", "/v1/audio/translations", self._sounds.translations),
            ("POST", "/v1/forecasts", self._sounds.forecasts),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.one_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("POST", "/apply-template", self.apply_template),
            ("GET", "/props", self.props),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/", self.page),
        ]

    async def chat(self, exchange: Exchange) -> None:
        async def plan(model: Model, body: bytes, _: Place) -> tuple[TextRequest, Plan]:
            def planned() -> tuple[TextRequest, Plan]:
                limits = self._service.limits
                request = chat_request(exchange.path, read_object(body, limits), limits)
                return request, plan_chat(model, request)

            return await self._service.apart(planned)

        await self._texts(exchange, "chatcmpl", plan)

    async def completions(self, exchange: Exchange) -> None:
        async def plan(model: Model, body: bytes, place: Place) -> tuple[TextRequest, Plan]:
            request, prompts, first = await self._service.apart(lambda: self._prompts(model, body))
            if request.echo and request.logprobs is not None:
                count = max(request.logprobs, 1)
                scores = sum(len(one.ids) for one in prompts) * (1 + count) * request.n
                self._service.places.hold(place, scores * SCORE, "prompt")
                prompts = await self._scored(exchange, model, prompts, count)
            return request, plan_completion(model, request, prompts, first)

        await self._texts(exchange, "cmpl", plan)

    async def embeddings(self, exchange: Exchange) -> None:
        model, limits = self._service.model(), self._service.limits
        with self._service.places.take():
            body = await exchange.body()

            def read() -> tuple[list[list[int]], str]:
                request = embedding_request(exchange.path, read_object(body, limits), limits)
                return [model._read_ids(one) for one in request.inputs], request.encoding_format

            try:
                ids, encoding = await self._service.apart(read)
                tasks = embedding_tasks(model._runtime, ids, "auto", True)
                vectors = await self._service.computed(exchange, tasks)
            except ClientGone:
                raise
            except Exception as error:
                raise refusal_of(error, "input") from error
            name = model._runtime.source.name
            await exchange.answer(embeddings(np.array(vectors), sum(map(len, ids)), name, encoding))

    async def models(self, exchange: Exchange) -> None:
        await exchange.answer({"object": "list", "data": [self._model_card(self._service.model())]})

    async def one_model(self, exchange: Exchange) -> None:
        card = self._model_card(self._service.model())
        if exchange.path_params["name"] != card["id"]:
            raise Refusal(404, f"there is no model of that name here; there is {card['id']}", "model_not_found",
                          param="model")  # fmt: skip
        await exchange.answer(card)

    async def tokenize(self, exchange: Exchange) -> None:
        def ids(model: Model, given: Json) -> Json:
            kinds = {"content": str, "add_special": bool, "parse_special": bool}
            fields = take_fields(exchange.path, given, kinds, ("content",))
            special = {"add_special_tokens": bool(fields["add_special"]),
                       "parse_special": fields["parse_special"] is not False}  # fmt: skip
            return {"tokens": model.tokenize(fields["content"], **special)}

        await self._at_once(exchange, ids)

    async def detokenize(self, exchange: Exchange) -> None:
        def text(model: Model, given: Json) -> Json:
            tokens = take_fields(exchange.path, given, {"tokens": list}, ("tokens",))["tokens"]
            return {"content": model.detokenize(as_prompt(model._runtime, tokens), skip_special_tokens=False)}

        await self._at_once(exchange, text)

    async def apply_template(self, exchange: Exchange) -> None:
        def prompt(model: Model, given: Json) -> Json:
            planned = plan_chat(model, chat_request(exchange.path, given, self._service.limits))
            return {"prompt": model.detokenize(planned.prompts[0], skip_special_tokens=False)}

        await self._at_once(exchange, prompt)

    async def props(self, exchange: Exchange) -> None:
        model, limits = self._service.model(), self._service.limits
        info = model.info()
        await exchange.answer(
            {
                "model": model._runtime.source.name,
                "architecture": info["architecture"],
                "n_ctx": model.n_ctx,
                "n_vocab": model.n_vocab,
                "parallel": limits.parallel,
                "max_queue": limits.places - limits.parallel,
                "cache": kinds(info["layers"]),
                "cache_bytes_per_token": sum(layer["bytes_per_token"] for layer in info["layers"]),
                "device": info["device"],
                "chats": _chats(model),
                "tools": await self._service.apart(lambda: _tools(model)),
                "version": core.__version__,
            }
        )

    async def health(self, exchange: Exchange) -> None:
        state = self._service.state
        await exchange.answer({"status": state}, status=200 if state == "ok" else 503)

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.answer_bytes(self._service.metrics.text(), CONTENT_TYPE)

    async def page(self, exchange: Exchange) -> None:
        await exchange.answer_bytes(_PAGE, "text/html; charset=utf-8", headers=_PAGE_HEADERS)

    async def _texts(
        self,
        exchange: Exchange,
        prefix: str,
        plan: Callable[[Model, bytes, Place], Awaitable[tuple[TextRequest, Plan]]],
    ) -> None:
        """Respond with generated texts."""
        service, called = self._service, time.perf_counter()
        model = service.model()
        with service.places.take() as place:
            request, planned = await plan(model, await exchange.body(), place)
            service.places.widen(place, len(planned.prompts) * request.n)
            runs = await service.apart(lambda: runs_of(model, request, planned, called, exchange.key))
            head = Head.new(prefix, model._runtime.source.name)
            texts = Texts(request, planned, runs, exchange, head, called, place, service.places, service.metrics,
                          service.limits)  # fmt: skip
            service.texts.add(texts)
            try:
                await texts.answer(service.thread, exchange.client, exchange.headers.get("x-slimrt") == "1")
            finally:
                service.texts.remove(texts)

    async def _at_once(self, exchange: Exchange, make: Callable[[Model, Json], Json]) -> None:
        """Respond with a function of the body that needs no engine."""
        model, limits = self._service.model(), self._service.limits
        with self._service.places.take():
            body = await exchange.body()
            await exchange.answer(await self._service.apart(lambda: make(model, read_object(body, limits))))

    def _prompts(self, model: Model, body: bytes) -> tuple[CompletionRequest, list[Scored], Sequence[int] | None]:
        """A request, its prompts, with their texts if they are echoed, and Plan.first."""
        limits = self._service.limits
        request = completion_request("/v1/completions", read_object(body, limits), limits)
        way, prompts = translation_of(model, request), []
        for one in request.prompts:
            try:
                ids = way.ids(one) if way and isinstance(one, str) else model._read_ids(one)
            except Exception as error:
                raise refusal_of(error, "prompt") from error
            text = one if isinstance(one, str) else model.detokenize(ids) if request.echo else ""
            prompts.append(Scored(ids, text if request.echo else ""))
        return request, prompts, None if way is None else way.first

    async def _scored(self, exchange: Exchange, model: Model, prompts: Sequence[Scored], count: int) -> list[Scored]:
        """The prompts with the log probabilities of their tokens."""
        try:
            tasks = [scored(model._runtime, one.ids, count) for one in prompts]
            found = await self._service.computed(exchange, tasks)
        except ClientGone:
            raise
        except Exception as error:
            raise refusal_of(error, "prompt") from error
        return [Scored(one.ids, one.text, *told) for one, told in zip(prompts, found, strict=True)]

    def _model_card(self, model: Model) -> Json:
        name = model._runtime.source.name
        return {"id": name, "object": "model", "created": self._service.created, "owned_by": "slimrt"}


def _chats(model: Model) -> bool:
    tokenizer = model._runtime.source.tokenizer_if_any
    return tokenizer is not None and tokenizer.chat_template is not None


def _tools(model: Model) -> str | None:
    """Where the format of tool calls comes from (ToolFormat.origin); None: the model has no chat template."""
    return tool_format(model.tokenizer).origin if _chats(model) else None


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = f"{request.url.path:.100}"
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.7)
    hint = f" (it takes {error.headers['Allow']})" if error.headers else f" (did you mean {near[0]}?)" if near else ""
    said = f"{request.method} {path} is no route here{hint}"
    return JSONResponse(Refusal(error.status_code, said, "no_route").json, error.status_code, error.headers)


def _page() -> tuple[bytes, dict[str, str]]:
    """The web page, and headers that allow it to run its own script and style only (Content-Security-Policy)."""
    text = files("slimrt.server").joinpath("page.html").read_text("utf-8")

    def allowed(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found is not None
        return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), {"content-security-policy": policy, "referrer-policy": "no-referrer"}


_PAGE, _PAGE_HEADERS = _page()
