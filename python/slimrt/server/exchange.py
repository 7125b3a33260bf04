"""One HTTP request and its response over ASGI: bounded body, detection of disconnects, server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from slimrt.server.errors import Refusal
from slimrt.server.guard import KEY, send_refusal
from slimrt.server.limits import Limits

ABORT = "slimrt.abort"  # key in scope["extensions"]: a function that closes the connection at once


class ClientGone(Exception):
    """The client has disconnected, or does not read."""


class Exchange:
    """A request and its response, as a handler sees it; an asynchronous context manager.

    Attributes:
        news: set when the client disconnects, and by others that have something for the handler that waits.
        status: of the response once it has begun; 0: not yet.
        key: the client's API key, checked; "": none is needed.
        client: identifies the client: the key, else its address.
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
        """Read the whole body; from then on disconnects are noticed.

        Raises:
            Refusal: 413, it is too large; 408, it took too long. ClientGone.
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
        """Wait until `news` is set. False: it was not within that time. Raises ClientGone."""
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
        """Respond with JSON."""
        await self.answer_bytes(msgspec.json.encode(value), "application/json", status=status)

    async def answer_bytes(
        self, body: bytes, kind: str, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Respond with these bytes and content type."""
        await self._begin(status, {"content-type": kind, "content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, refusal: Refusal) -> None:
        """Respond with an error; if events have begun, send it as the last event."""
        if self.status:
            await self.event(refusal.json)
            return await self.end_events()
        self.status = refusal.status
        await send_refusal(self._send, refusal, self._receive if self._watching is None else None)

    async def begin_events(self) -> None:
        """Begin a stream of server-sent events, unless one has begun."""
        if not self.status:
            await self._begin(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store",
                                    "x-accel-buffering": "no"})  # fmt: skip

    async def event(self, value: Any) -> None:
        """Send a JSON value as an event."""
        await self.send_part(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def ping(self) -> None:
        """Send a comment, which clients ignore; it begins the stream."""
        await self.begin_events()
        await self.send_part(b": ping\n\n")

    async def send_part(self, part: bytes) -> None:
        """Send raw bytes of the stream."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end_events(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send(self, message: Any) -> None:
        """Send a message; ClientGone: the client has not read for send_timeout."""
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
