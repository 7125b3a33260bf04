"""A server process for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAT = Path(__file__).parent.parent / "models" / "tale-chat.gguf"
ENDLESS = {"max_tokens": -1, "ignore_eos": True, "on_overflow": "shift", "stream": True}
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass
class Answer:
    """Of a request: status, headers with small names, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Served:
    """A server: its address, process, and a file with what it said."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> Answer:
        """A request; body: bytes as they are, anything else as JSON. Names of headers have "_" for "-"."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return Answer(answer.status, _small(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, _small(error.headers), error.read())

    def chat(self, **fields: Any) -> Answer:
        return self.ask("/v1/chat/completions", {"messages": MESSAGES, **fields})

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        """A raw connection."""
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def begin(self, body: Any, path: str = "/v1/chat/completions", receive_buffer: int = 0) -> socket.socket:
        """A connection that has sent a request."""
        connection, text = self.connect(receive_buffer), json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall(head.encode() + text)
        return connection

    def metric(self, name: str) -> float:
        """A value of /metrics; 0.0 of one that nothing was counted of."""
        text = self.ask("/metrics").body.decode()
        found = re.search(rf"^slimrt_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_until(self, name: str, value: float, seconds: float = 20.0) -> float:
        """Return after how many seconds a metric has a value."""
        began = time.monotonic()
        while self.metric(name) != value:
            assert time.monotonic() - began < seconds, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.01)
        return time.monotonic() - began

    def terminate(self, seconds: float = 60.0) -> int:
        """Send SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def served(
    folder: Path, *flags: str, model: Path = CHAT, before: str = "", ready: bool = True, **env: str
) -> Iterator[Served]:
    """A server of a model; it is killed in the end if it is still there.

    Args:
        folder: for what it says.
        before: Python that its process runs first.
        ready: wait until the model is loaded.
    """
    program = f"import sys\n{before}\nfrom slimrt.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "serve", str(model), *flags]
    port = None if "--port" in flags else free_port()
    words += [] if port is None else ["--port", str(port)]
    log = folder / f"server-{port}.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=os.environ | env)
    server = Served(port or int(flags[flags.index("--port") + 1]), process, log)
    try:
        if ready:
            wait_for(server)
        yield server
    finally:
        process.kill()
        process.wait()


def wait_for(server: Served, status: int = 200) -> None:
    """Return when /health says so."""
    end = time.monotonic() + 120
    while True:
        try:
            if server.ask("/health").status == status:
                return
        except OSError:
            pass
        assert server.process.poll() is None and time.monotonic() < end, server.log.read_text()
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def events(data: bytes) -> list[Any]:
    """What a stream of events says, "[DONE]" as a text."""
    found = [part[6:] for part in data.decode().split("\n\n") if part.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def dechunked(data: bytes) -> bytes:
    """The body of a raw answer with chunked encoding, as far as it goes."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size or b"0", 16)
        body, rest = body + rest[:n], rest[n + 2 :]
    return body


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the other side closes, or an answer in chunks ends."""
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n") and (part := connection.recv(65536)):
        data += part
    return data


def _small(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
