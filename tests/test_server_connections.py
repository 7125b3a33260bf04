# SPDX-License-Identifier: Apache-2.0
"""The server's connections: how long they stay, and what of HTTP they pass over."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")  # the extra `serve`

from served import Served, read_all, served  # noqa: E402

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


def test_an_idle_one_stays_open(server: Served) -> None:
    """As long as a proxy keeps it for its next request, which would be lost as the server closes."""
    with server.connect() as connection:
        for pause in (0, 5.5):
            time.sleep(pause)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert _one_answer(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("size", "headers", "status"), [(16 << 20, {}, 413), (4 << 20, {"host": "evil.example"}, 403)])
def test_who_sends_what_is_refused_is_told_why(server: Served, size: int, headers: dict[str, str], status: int) -> None:
    """And not that the connection broke, as a client sees that still sends when it is closed."""
    answer = server.ask("/tokenize", b" " * size, **headers)
    assert answer.status == status and answer.headers["connection"] == "close"


class TestOffers:
    """Of another protocol: Java's client makes one with each request, and goes on in HTTP/1.1 if it is passed over."""

    BODY = json.dumps({"prompt": "Anna", "max_tokens": 2}).encode()

    @staticmethod
    def head(length: str, options: str = "Upgrade, HTTP2-Settings", version: str = "1.1") -> bytes:
        lines = [f"POST /v1/completions HTTP/{version}", f"Connection: {options}", length, "Host: localhost"]
        return "\r\n".join(
            [*lines, "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA", "Upgrade: h2c", "", ""]
        ).encode()

    def test_the_body_is_read(self, server: Served) -> None:
        whole = self.head(f"Content-Length: {len(self.BODY)}"), self.BODY
        chunked = self.head("Transfer-Encoding: chunked"), b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.BODY), self.BODY)
        with server.connect() as connection:
            for parts in (whole, chunked, [b"".join(whole)], [b"".join(chunked)]):
                for part in parts:
                    connection.sendall(part)
                    time.sleep(0.05)
                answer = _one_answer(connection)
                assert answer.startswith(b"HTTP/1.1 200") and b"text_completion" in answer

    @pytest.mark.parametrize("last", [("close, Upgrade", "1.1"), ("Upgrade", "1.0")])
    def test_of_the_last_request_too(self, server: Served, last: tuple[str, str]) -> None:
        with server.connect() as connection:
            connection.sendall(self.head(f"Content-Length: {len(self.BODY)}", *last) + self.BODY)
            answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer

    def test_of_many_requests_at_once(self, server: Served) -> None:
        """Within one part of what comes."""
        one = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(one * 800)
            told = b""
            while told.count(b"HTTP/1.1 200") < 800:
                told += _some(connection, 65536)


def _one_answer(connection: socket.socket) -> bytes:
    """An answer that says how long it is."""
    head, body = b"", b""
    while b"\r\n\r\n" not in head:
        head += _some(connection, 1)
    found = re.search(rb"content-length: (\d+)", head)
    assert found, head
    while len(body) < int(found[1]):
        body += _some(connection, int(found[1]) - len(body))
    return head + body


def _some(connection: socket.socket, most: int) -> bytes:
    """What comes next, which is not the end."""
    part = connection.recv(most)
    assert part
    return part
