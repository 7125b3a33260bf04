"""One request and its answer over ASGI: a bounded body, a client that may leave, events as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from slimrt.server.errors import Refusal
from slimrt.server.guard import KEY, send_refusal
from slimrt.server.limits import Limits

ABORT = "slimrt.abort"  # of a scope's extensions: closes the connection without waiting for the reader


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """A request, as its handler sees it; use it as an asynchronous context manager.

    Attributes:
        news: set when the client leaves; others may set it too, and whoever waits looks what there is.
        status: of the answer that is under way, which cannot change any more; 0: none is.
        key: the client's, which was checked; "": there is no need of one.
        client: by what one client is told from another.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits):
        self.path: str = scope["path"]
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.news = asyncio.Event()
        self.status = 0
        self.key: str = scope[KEY]
        self.client = self.key or str((scope.get("client") or ("",))[0])
        self._scope, self._receive, self._send_raw, self._limits = scope, receive, send, limits
        self._gone = False
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def body(self) -> bytes:
        """The whole body; from then on it is noticed when the client leaves.

        Raises:
            Refusal: 413, it is too large; 408, it does not come. ClientGone.
        """
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > (most := self._limits.body_of(self.path)):
                        raise Refusal(413, f"a request may have {most} bytes", "body_too_large")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self._limits.body_timeout:g} s", "timeout") from None
        self._watching = asyncio.create_task(self._watch())
        return b"".join(parts)

    async def wait(self, seconds: float) -> bool:
        """Wait for news; False: there were none for so long. Raises ClientGone."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        if self._gone:
            raise ClientGone
        return True

    async def answer(self, value: Any, *, status: int = 200) -> None:
        """Answer with JSON."""
        await self.answer_bytes(msgspec.json.encode(value), "application/json", status=status)

    async def answer_bytes(
        self, body: bytes, kind: str, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with these bytes, of that content type."""
        await self._begin(status, {"content-type": kind, "content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal, or say in the middle of events why they end."""
        if self.status:
            await self.event(refusal.json)
            return await self.end_events()
        self.status = refusal.status
        await send_refusal(self._send, refusal, self._receive if self._watching is None else None)

    async def begin_events(self) -> None:
        """Begin a stream of server-sent events."""
        if not self.status:
            await self._begin(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store",
                                    "x-accel-buffering": "no"})  # fmt: skip

    async def event(self, value: Any) -> None:
        """Send JSON as an event."""
        await self.send_part(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def send_part(self, part: bytes) -> None:
        """Send a part of the stream as it is."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end_events(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send(self, message: Any) -> None:
        """Send, as fast as the client reads; one that reads nothing for too long is gone."""
        if self._gone:
            raise ClientGone
        try:
            async with asyncio.timeout(self._limits.send_timeout):
                await self._send_raw(message)
        except TimeoutError:
            self._scope["extensions"][ABORT]()
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.news.set()
