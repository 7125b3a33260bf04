"""Requests to a server of OpenAI's /v1/completions, streamed, with the time of every piece that came.

Sockets and JSON alone, one connection a request: what it takes itself is told by serve.py (`client_cpu`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What came back for one request. Times: seconds of time.perf_counter."""

    sent: float
    status: int = 0  # of HTTP; 0: none came
    times: list[float] = field(default_factory=list)  # of the pieces with text
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    retry_after: str | None = None
    error: str = ""  # what broke, or the body of a refusal
    left: bool = False  # the client went away before the end, as it was told
    ended: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end, with what was counted."""
        return self.status == 200 and not self.error and bool(self.usage)

    @property
    def first(self) -> float:
        """Seconds to the first token, or to the end of an answer that shows none."""
        return (self.times[0] if self.times else self.ended) - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


async def complete(
    port: int, prompt: Sequence[int], n: int, *, reuse: bool = False, leave_after: int | None = None
) -> Answer:
    """Ask for exactly n tokens after the ids of a prompt; leave after so many pieces (0: once the request is sent), or
    when cancelled. reuse: of what is cached of prompts that begin alike.

    Never raises: what broke is in the answer.
    """
    wish = {"prompt": list(prompt), "max_tokens": n, "temperature": 0, "ignore_eos": True}
    wish |= {"stream": True, "stream_options": {"include_usage": True}}
    wish |= {"cache_prompt": True} if reuse else {}
    answer = Answer(time.perf_counter())
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST", "/v1/completions", wish))
        await writer.drain()
        if leave_after == 0:
            await asyncio.sleep(0.01)
        await _read(reader, answer, leave_after)
    except asyncio.CancelledError:
        answer.left = True
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        if writer:
            writer.close()
    answer.ended = time.perf_counter()
    if answer.status == 200 and not (answer.left or answer.usage or answer.error):
        answer.error = "the stream ended without its usage"
    return answer


async def fetch(port: int, path: str) -> tuple[int, str]:
    """(status, body) of a GET; status 0 if nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET", path))
        status, headers = await _head(reader)
        body = b"".join([part async for part in _body(reader, headers)])
        writer.close()
        return status, body.decode(errors="replace")
    except (OSError, EOFError, ValueError):
        return 0, ""


def request(method: str, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def _read(reader: asyncio.StreamReader, answer: Answer, leave_after: int | None) -> None:
    if leave_after == 0:
        answer.left = True
        return
    answer.status, headers = await _head(reader)
    answer.retry_after = headers.get("retry-after")
    if answer.status != 200:
        answer.error = b"".join([part async for part in _body(reader, headers)]).decode(errors="replace")[:200]
        return
    async for event in _events(reader, headers):
        if "error" in event:
            answer.error = str(event["error"])[:200]
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if choice["text"]:
                answer.times.append(time.perf_counter())
                answer.text += choice["text"]
        if leave_after is not None and len(answer.times) >= leave_after:
            answer.left = True
            return
    if await reader.read():
        raise ValueError("something followed the answer")


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in headers}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        yield await (
            reader.readexactly(int(headers["content-length"])) if "content-length" in headers else reader.read()
        )
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def _events(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE], after which nothing may come."""
    rest, done = b"", False
    async for part in _body(reader, headers):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if done:
                    raise ValueError(f"an event after [DONE]: {data[:80]!r}")
                done = data == b"[DONE]"
                if not done:
                    yield json.loads(data)
