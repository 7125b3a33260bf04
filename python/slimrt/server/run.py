"""The server's process: socket, uvicorn, and a shutdown that lets running texts finish."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from types import FrameType
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slimrt.model import Model
from slimrt.server.app import build_app
from slimrt.server.exchange import ABORT
from slimrt.server.guard import Access
from slimrt.server.limits import Limits
from slimrt.server.service import Service

DEAD = 70  # exit code if the model is stuck (EX_SOFTWARE)
_HEAD_SECONDS = 30.0
_HEAD_BYTES = 64 << 10
_IDLE_SECONDS = 75  # keep-alive: longer than proxies' (mostly 60 s), which else may send a request as we close
_SWITCH = 0.0005  # Python's thread switch interval in seconds: each step passes the GIL between threads a few times


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. port 0: any free port. OSError: it cannot be bound."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid domain name
        raise OSError(f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listener


def serve(
    listener: socket.socket, load: Callable[[], Model], access: Access, limits: Limits, *, log_requests: bool
) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C; returns the exit code. The model is loaded while the server listens.

    Raises:
        Exception: what loading raised.
    """
    sys.setswitchinterval(_SWITCH)
    failures = list[BaseException]()

    def fail(what: str, error: BaseException | None) -> None:
        """Stop the server: regularly if loading failed, else at once, since the engine's thread may never return."""
        if what == "loading the model" and error is not None:
            failures.append(error)
            server.should_exit = True
            return
        print(f"slimrt: error: the server ends, it cannot go on: {what}{': ' if error else ''}{error or ''}",
              file=sys.stderr, flush=True)  # fmt: skip
        os._exit(DEAD)

    service = Service(load, limits, fail)
    config = uvicorn.Config(
        build_app(service, access),
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=log_requests,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=5,
    )
    _log(log_requests)
    server = Server(config, service)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets; uvicorn takes SIGTERM and SIGINT
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[listener])
    if failures:
        raise failures[0]
    if service.state == "loading":  # the loading thread cannot be interrupted
        os._exit(0)
    return 0


def _log(requests: bool) -> None:
    """Log errors to stderr, and a line for each request if wanted."""
    said = logging.StreamHandler()
    said.setFormatter(logging.Formatter("slimrt: %(message)s"))
    for name, level in (("slimrt", logging.ERROR), ("uvicorn.error", logging.ERROR), ("uvicorn.access", logging.INFO)):
        if requests or name != "uvicorn.access":
            logger = logging.getLogger(name)
            logger.addHandler(said)
            logger.setLevel(level)
            logger.propagate = False


class Server(uvicorn.Server):
    """Uvicorn's server, which keeps listening while it drains, so that new requests get a response (503)."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._events = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second, or while loading: exit at once."""
        if self._service.draining or self._service.state == "loading":
            os._exit(0 if self._service.state == "loading" else 128 + sig)
        self._service.draining = True
        self._events.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        async def drain() -> None:
            await self._service.drain()
            self.should_exit = True

        self._drain = asyncio.create_task(drain())


class Connection(HttpToolsProtocol):
    """Uvicorn's connection with limits of time and size for a request's head, and a way to abort it.

    Clients may offer another protocol (Upgrade: h2c), as Java's does with each request. The offer is ignored, which
    RFC 9110, section 7.8 allows; httptools would take the body for the other protocol, and uvicorn would drop it.
    """

    _timer: TimerHandle | None = None
    _head = 0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._head += len(data)
            if self._head > _HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: Any = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions
        self._await_head()

    def on_headers_complete(self) -> None:
        if not self._offers_another():
            self._stop_waiting()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers_another():
            super().on_message_complete()

    def plain_head(self) -> bytes | None:
        """The request's head without its Upgrade header; None: it has none."""
        if not self._offers_another():
            return None
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"\r\n".join([line, *kept, b"", b""])

    def _offers_another(self) -> bool:
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _await_head(self) -> None:
        if self._timer is None:
            self._head = 0
            self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Parser(httptools.HttpRequestParser):
    """Parses a request with an Upgrade header again, without that header."""

    def __init__(self, connection: Connection):
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn's setting
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        parser, rest = self, memoryview(data)
        while True:
            try:
                return super(_Parser, parser).feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                head = self._connection.plain_head()
                if head is None:  # CONNECT, which is not supported
                    raise
                parser = self._connection.parser = _Parser(self._connection)  # the old one may expect nothing more
                super(_Parser, parser).feed_data(head)
                rest = rest[offer.args[0] :]
