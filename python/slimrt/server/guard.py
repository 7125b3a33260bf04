"""Access control: keys, hosts, origins and sizes of bodies, checked before anything of a request is read."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
import socket
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimrt.server.errors import Refusal
from slimrt.server.limits import Limits

KEY = "slimrt.key"  # key in the scope: the client's API key
_OPEN = ("/health",)  # routes that need no key
_ID = re.compile(r"[!-~]{1,128}")
_DRAIN_BYTES = 32 << 20  # bytes that are read of the body of a refused request, at most: more than a sound may have
_DRAIN_SECONDS, _DRAIN_PAUSE = 30.0, 2.0  # seconds for that, as a whole and between two parts
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    Attributes:
        host: the address that it listens on.
        keys: API keys, each valid for all routes; empty: no key is needed.
        origins: web origins other than its own that may use it from browsers, such as "https://example.org"; "*": all.
    """

    host: str = "127.0.0.1"
    keys: Sequence[str] = ()
    origins: Collection[str] = ()

    def check_host(self, host: str) -> None:
        """Refuse an unknown host name, against DNS rebinding: a web page may have its own name resolve to this machine.
        Checked on the loopback interface, and if there are no keys. Refusal 403."""
        if not is_loopback(self.host) and self.keys:
            return
        name = _name_of(host)
        known = {*_LOCAL, self.host.lower(), *(_name_of(one.partition("://")[2]) for one in self.origins)}
        if not is_loopback(self.host):
            known |= {socket.gethostname().lower(), socket.getfqdn().lower()}
            if _is_address(name):
                return
        if name not in known:
            raise Refusal(403, f"this server does not answer to the name '{host:.200}'", "host_not_allowed")

    def check_origin(self, origin: str, host: str) -> None:
        """Refuse requests of pages from other origins that are not allowed. Refusal 403."""
        if not self.allows(origin) and origin.lower().partition("://")[2] != host.lower():
            raise Refusal(
                403, f"pages of '{origin:.200}' may not use this server (--cors-origins lists those that may)",
                "origin_not_allowed",
            )  # fmt: skip

    def allows(self, origin: str) -> bool:
        """Whether pages of another origin may send requests and read the responses (CORS)."""
        return "*" in self.origins or origin.lower() in self.origins

    def check_key(self, authorization: str) -> str:
        """The key of a request, given as a Bearer token or as the password of Basic authentication; "" if none is
        needed. Refusal 401."""
        if not self.keys:
            return ""
        scheme, _, text = authorization.partition(" ")
        offered = b""
        if scheme.lower() == "basic":
            with suppress(binascii.Error, ValueError):
                offered = base64.b64decode(text.strip(), validate=True).partition(b":")[2]
        elif scheme.lower() == "bearer":
            offered = text.strip().encode("latin-1")  # headers were decoded as Latin-1
        if not any([hmac.compare_digest(offered, key.encode()) for key in self.keys]):  # a list: constant time
            raise Refusal(401, "this server requires a key: Authorization: Bearer KEY", "invalid_api_key")
        return offered.decode("utf-8", "replace")


class Guard:
    """ASGI middleware that passes on only permitted requests.

    Responses get x-request-id (the client's, or a new one) and CORS headers.

    Args:
        limits: bounds of body sizes.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits):
        self._app, self._access, self._limits = app, access, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        origin, given = headers.get(b"origin"), headers.get(b"x-request-id", "")
        more = [(b"x-request-id", (given if _ID.fullmatch(given) else uuid.uuid4().hex).encode())]
        more += [(b"x-content-type-options", b"nosniff")]
        if origin is not None and self._access.allows(origin):
            more += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            if b"host" in headers or scope["http_version"] != "1.0":  # in HTTP/1.0 it may be missing; browsers send it
                self._access.check_host(headers.get(b"host", ""))
            if origin is not None:
                self._access.check_origin(origin, headers.get(b"host", ""))
                if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                    return await _preflight(send_with, headers.get(b"access-control-request-headers", ""))
            key = "" if scope["path"] in _OPEN else self._access.check_key(headers.get(b"authorization", ""))
            self._check_length(scope["path"], headers.get(b"content-length", "0"))
        except Refusal as refusal:
            return await send_refusal(send_with, refusal, receive)
        await self._app({**scope, KEY: key}, receive, send_with)

    def _check_length(self, path: str, length: str) -> None:
        most = self._limits.body_of(path)
        if not length.isdecimal() or int(length[:20]) > most:
            raise Refusal(413, f"a request may have {most} bytes", "body_too_large")


async def send_refusal(send: Send, refusal: Refusal, receive: Receive | None = None) -> None:
    """Respond with an error, and close the connection.

    Args:
        receive: of a request whose body has not been read: the rest is read and dropped for a while. A client that is
            still sending when the connection closes sees a broken connection and mostly no response.
    """
    body = msgspec.json.encode(refusal.json)
    headers = refusal.headers | {"content-type": "application/json", "content-length": str(len(body))}
    headers |= {"connection": "close"}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if receive is not None:
        await _drain(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    """Read and drop the rest of a body, within limits."""
    left = _DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                async with asyncio.timeout(_DRAIN_PAUSE):
                    message = await receive()
                if not message.get("more_body"):  # the end of the body, or a disconnect
                    return
                left -= len(message["body"])


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


async def _preflight(send: Send, wanted: str) -> None:
    """Respond to a CORS preflight request; all requested headers are allowed, since clients send some of their own."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", wanted.encode("latin-1") or b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _name_of(host: str) -> str:
    """The name in a Host header, without the port."""
    found = re.fullmatch(r"\[?(.*?)\]?(:\d*)?", host.lower()) if host.startswith("[") or host.count(":") < 2 else None
    return found[1].rstrip(".") if found else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
