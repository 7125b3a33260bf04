# SPDX-License-Identifier: Apache-2.0
"""The server and clients that leave, wait, stall or are too many; its end; an engine that dies."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")  # the extra `serve`

from served import CHAT, ENDLESS, MESSAGES, Served, dechunked, events, read_all, served, wait_for  # noqa: E402
from slimrt.server.limits import Places  # noqa: E402
from slimrt.server.run import bind  # noqa: E402

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others


def test_places_of_the_same_size_are_not_the_same() -> None:
    places = Places(4)
    with places.take() as wide:
        with places.take():
            pass
        places.widen(wide, 3)
        assert places.texts == 3
    assert places.texts == 0


ENDLESS_CHAT = {"messages": MESSAGES, **ENDLESS}
SOME_TEXT = {"messages": MESSAGES, "max_tokens": 300, "ignore_eos": True}


def bounded(**limits: float) -> str:
    """Python that gives the server other limits than its flags can."""
    given = ", ".join(f"{name}={value}" for name, value in limits.items())
    return f"import functools, slimrt.server.limits as l; l.Limits = functools.partial(l.Limits, {given})"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One text at a time, and two that wait."""
    flags = ("--parallel", "1", "--max-queue", "2", "--queue-timeout", "1.5")
    with served(tmp_path_factory.mktemp("served"), *flags) as running:
        yield running


@pytest.fixture
def busy(server: Served) -> Iterator[Served]:
    """The same, whose place is taken by a text that does not end."""
    server.wait_until("places_taken", 0)
    connection = server.begin(ENDLESS_CHAT)
    assert b"200 OK" in connection.recv(65536)
    yield server
    connection.close()
    server.wait_until("places_taken", 0)


def test_too_few_threads_are_said_before_it_serves(tmp_path: Path) -> None:
    """With three of its seven; a system's limit of processes does not bind root."""
    before = "import threading; left, start = [None] * 3, threading.Thread.start\n"
    before += 'def fail(): raise RuntimeError("can\'t start new thread")\n'
    before += "threading.Thread.start = lambda one: (left.pop(), start(one)) if left else fail()"
    with served(tmp_path, "--parallel", "3", before=before, ready=False) as server:
        assert server.process.wait(60) == 1
    said = server.log.read_text()
    assert said.startswith("slimrt: error: can't start new thread, and the server needs 7") and said.count("\n") == 1


class TestLeaving:
    def test_the_place_of_a_stream_is_free_at_once(self, server: Served) -> None:
        gone = server.metric('cancelled_total{reason="gone"}')
        for _ in range(8):
            connection = server.begin(ENDLESS_CHAT)
            connection.recv(65536)
            assert server.metric("texts_running") == 1
            connection.close()
            server.wait_until("texts_running", 0)  # they would never end by themselves
        assert server.metric('cancelled_total{reason="gone"}') == gone + 8

    def test_without_a_stream_too(self, server: Served) -> None:
        connection = server.begin(ENDLESS_CHAT | {"stream": False})
        server.wait_until("texts_running", 1)
        connection.close()
        server.wait_until("texts_running", 0)  # they would never end by themselves

    def test_who_waits_and_leaves_takes_nobody_with_him(self, busy: Served) -> None:
        before = busy.metric('tokens_total{kind="generated"}')
        waiting = busy.begin(SOME_TEXT)
        busy.wait_until("places_taken", 2)
        waiting.close()
        busy.wait_until("places_taken", 1)
        time.sleep(0.2)
        assert busy.metric("texts_running") == 1 and busy.metric('tokens_total{kind="generated"}') > before

    def test_all_answers_of_a_request_end_with_it(self, server: Served) -> None:
        connection = server.begin(ENDLESS_CHAT | {"n": 3})
        connection.recv(65536)
        connection.close()
        server.wait_until("places_taken", 0)
        server.wait_until("texts_running", 0)  # at the next step
        server.wait_until("texts_waiting", 0, seconds=5.0)


class TestTooMany:
    def test_who_finds_no_place_is_told_when_to_come_back(self, busy: Served) -> None:
        with busy.begin(SOME_TEXT), busy.begin(SOME_TEXT):
            busy.wait_until("places_taken", 3)
            answer = busy.chat()
            assert answer.status == 429 and answer.error["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 600
            assert busy.ask("/health").status == 200
        busy.wait_until("places_taken", 1)

    def test_a_place_is_taken_before_the_body_is_read(self, busy: Served) -> None:
        halves = [busy.connect() for _ in range(2)]
        for one in halves:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        busy.wait_until("places_taken", 3)
        assert busy.chat().status == 429
        for one in halves:
            one.close()
        busy.wait_until("places_taken", 1)

    def test_several_texts_are_several_places(self, busy: Served) -> None:
        assert busy.chat(n=3).status == 429
        assert busy.ask("/v1/completions", {"prompt": ["a", "b", "c"]}).status == 429

    def test_more_texts_than_places_are_made_one_after_the_other(self, server: Served) -> None:
        answer = server.ask("/v1/completions", {"prompt": ["a"] * 7, "max_tokens": 3, "ignore_eos": True})
        assert [len(one["text"]) > 0 for one in answer.json["choices"]] == [True] * 7

    @pytest.mark.parametrize("stream", [False, True])
    def test_who_waits_too_long_is_told_so(self, busy: Served, stream: bool) -> None:
        began = time.monotonic()
        answer = busy.chat(stream=stream)
        assert answer.status == 503 and answer.error["code"] == "queue_timeout"
        assert 1.3 < time.monotonic() - began < 10

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/embeddings", {"input": "Anna"}),
            ("/v1/completions", {"prompt": "Anna was", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ],
    )
    def test_what_is_read_waits_as_texts_do(self, busy: Served, path: str, body: dict[str, Any]) -> None:
        answer = busy.ask(path, body)
        assert answer.status == 503 and answer.error["code"] == "queue_timeout"
        waiting = busy.begin(body, path)
        busy.wait_until("texts_waiting", 1)
        waiting.close()
        busy.wait_until("texts_waiting", 0, seconds=1.0)
        assert busy.metric("texts_running") == 1  # the one that was there


class TestSlowness:
    @pytest.fixture(scope="class")
    @staticmethod
    def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        before = bounded(send_timeout=1.0, body_timeout=1.0) + "; import slimrt.server.run as r; r._HEAD_SECONDS = 1.0"
        flags = ("--parallel", "2", "--request-timeout", "2")
        with served(tmp_path_factory.mktemp("served"), *flags, before=before) as running:
            yield running

    def test_a_request_that_takes_too_long_ends_with_what_there_is(self, hasty: Served) -> None:
        whole = hasty.chat(**ENDLESS | {"stream": False}).json
        assert whole["choices"][0]["finish_reason"] == "length" and whole["choices"][0]["timeout"] is True
        assert whole["choices"][0]["message"]["content"] and whole["usage"]["completion_tokens"] > 10
        *chunks, done = events(hasty.chat(**ENDLESS).body)
        last = chunks[-1]["choices"][0]
        assert done == "[DONE]" and last["finish_reason"] == "length" and last["timeout"] is True
        assert hasty.metric("texts_running") == 0

    def test_who_does_not_read_is_left(self, tmp_path: Path) -> None:
        flags = ("--parallel", "1", "--request-timeout", "600")
        with served(tmp_path, *flags, before=bounded(send_timeout=1.0)) as patient:
            connection = patient.begin(ENDLESS_CHAT | {"logprobs": True, "top_logprobs": 20}, receive_buffer=4096)
            patient.wait_until("texts_running", 1)
            patient.wait_until("places_taken", 0, seconds=60)
            patient.wait_until("texts_running", 0)  # at the next step
            assert b"[DONE]" not in _until_closed(connection)

    def test_half_requests_end(self, hasty: Served) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        body = hasty.connect()
        body.sendall(head + b"\r\n{")
        assert b"408" in read_all(body).partition(b"\r\n")[0]
        for half in (b"", b"POST", head):
            connection = hasty.connect()
            connection.sendall(half)
            assert _until_closed(connection) == b""
        hasty.wait_until("places_taken", 0)

    def test_endless_heads_end(self, hasty: Served) -> None:
        connection = hasty.connect()
        with pytest.raises(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
            for _ in range(1000):
                connection.sendall(b"x" * 65536)
        assert hasty.ask("/health").status == 200

    def test_a_connection_is_used_again(self, hasty: Served) -> None:
        with hasty.connect() as connection:
            for _ in range(3):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = b""
                while not answer.endswith(b'{"status":"ok"}'):
                    answer += connection.recv(65536)


def _until_closed(connection: socket.socket) -> bytes:
    """All that comes until the other side closes, in whatever way."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


class TestPings:
    """Before the first text."""

    SLOW = (
        "import slimrt.server.texts as t, slimrt.generation.loop as l, time; t.PING_EVERY = 0.2; "
        "step = l.Loop._compute; l.Loop._compute = lambda *a: (time.sleep(0.5), step(*a))"
    )
    FAILS = (
        "import slimrt.generation.sequences as s; s.Sequences.append = lambda *a: exec('raise MemoryError(\"full\")')"
    )

    def test_a_stream_is_alive_while_its_prompt_is_computed(self, tmp_path: Path) -> None:
        wish = {"prompt": "a green valley " * 30, "max_tokens": 2, "ignore_eos": True, "stream": True}
        with served(tmp_path, "--batch-size", "32", before=self.SLOW) as server:
            with server.begin(wish, "/v1/completions") as connection:
                told = dechunked(read_all(connection))
        before, *_ = told.split(b"data: ")
        assert before.count(b": ping") >= 2 and events(told.replace(b": ping\n\n", b""))[-1] == "[DONE]"

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_fails_before_a_text_has_its_status(self, tmp_path: Path, stream: bool) -> None:
        with served(tmp_path, before=self.FAILS) as server:
            answer = server.chat(stream=stream)
            assert answer.status == 500 and answer.error["type"] == "server_error"

    def test_a_queue_longer_than_proxies_wait(self, tmp_path: Path) -> None:
        """Then a stream begins before they give up, and its refusal is an event; others keep their status."""
        before = (
            "import slimrt.server.limits as m, slimrt.server.texts as t\n"
            "m._PROXY, m.PING_EVERY, t.PING_EVERY = 0.6, 0.3, 0.3"
        )
        with served(tmp_path, "--parallel", "1", "--queue-timeout", "1.5", before=before) as server:
            with server.begin(ENDLESS_CHAT) as endless:
                assert b"200 OK" in endless.recv(65536)
                with server.begin(SOME_TEXT | {"stream": True}) as waiting:
                    told = dechunked(read_all(waiting))
                assert told.count(b": ping") >= 3 and b"queue_timeout" in told and b"[DONE]" not in told
                assert server.chat().status == 503


class TestEnd:
    def test_texts_under_way_end_whole_and_new_ones_are_refused(self, tmp_path: Path) -> None:
        with served(tmp_path, "--parallel", "16") as server:
            streams = [server.begin(SOME_TEXT | {"stream": True, "seed": seed}) for seed in range(16)]
            starts = [one.recv(10) for one in streams]
            late = server.connect()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            late.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            refused = read_all(late)
            with ThreadPoolExecutor(16) as threads:
                rests = list(threads.map(read_all, streams))
            for start, rest in zip(starts, rests, strict=True):
                *chunks, done = events(dechunked(start + rest))
                assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert b"503" in refused.partition(b"\r\n")[0] and b"retry-after" in refused and b"draining" in refused
            assert server.process.wait(30) == 0, server.log.read_text()

    def test_what_takes_too_long_is_ended_with_what_there_is(self, tmp_path: Path) -> None:
        with served(tmp_path, "--parallel", "1", before=bounded(drain_timeout=0.5)) as server:
            stream = server.begin(ENDLESS_CHAT)
            start = stream.recv(10)
            waiting = server.begin(SOME_TEXT)
            server.wait_until("places_taken", 2)
            server.process.send_signal(signal.SIGTERM)
            *chunks, done = events(dechunked(start + read_all(stream)))
            assert done == "[DONE]" and chunks[-1]["choices"][0]["timeout"] is True
            assert b"HTTP/1.1 " in read_all(waiting)
            assert server.process.wait(30) == 0

    def test_nothing_to_do(self, tmp_path: Path) -> None:
        with served(tmp_path) as server:
            assert server.terminate(10) == 0 and b"Traceback" not in server.log.read_bytes()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "a closed terminal"])
    def test_other_signals(self, number: signal.Signals, tmp_path: Path) -> None:
        if signal.getsignal(number) == signal.SIG_IGN:
            pytest.skip("under nohup the server does not end either")
        with served(tmp_path) as server:
            stream = server.begin(SOME_TEXT | {"stream": True})
            start = stream.recv(10)
            server.process.send_signal(number)
            assert events(dechunked(start + read_all(stream)))[-1] == "[DONE]"
            assert server.process.wait(10) == 0 and b"leaked" not in server.log.read_bytes()


class TestModel:
    SLOW = "import slimrt.cli.serve as s, time; load = s._loaded; s._loaded = lambda *a: time.sleep(2) or load(*a)"

    def test_while_it_is_loaded(self, tmp_path: Path) -> None:
        with served(tmp_path, before=self.SLOW, ready=False) as server:
            wait_for(server, 503)
            assert server.ask("/health").json == {"status": "loading"}
            answer = server.chat()
            assert (answer.status, answer.error["code"]) == (503, "loading") and answer.headers["retry-after"]
            wait_for(server)
            assert server.chat(max_tokens=1).status == 200

    def test_an_end_while_it_is_loaded(self, tmp_path: Path) -> None:
        with served(tmp_path, before=self.SLOW.replace("(2)", "(30)"), ready=False) as server:
            wait_for(server, 503)
            assert server.terminate(10) == 0

    def test_one_that_cannot_be_loaded(self, tmp_path: Path) -> None:
        with served(tmp_path, "--memory-limit", "1MiB", ready=False) as server:
            assert server.process.wait(60) == 1
            told = server.log.read_text()
            assert "1.0 MiB" in told and "Traceback" not in told and "nanobind" not in told  # it tells of leaks

    def test_a_loop_that_dies_ends_the_process(self, tmp_path: Path) -> None:
        dies = "import slimrt.generation.loop as l; l.Loop._compute = lambda *_: exec('raise SystemError(\"broken\")')"
        with served(tmp_path, before=dies) as server:
            with pytest.raises(OSError):
                server.chat()
            assert server.process.wait(20) == 70
            assert "the thread that computes: broken" in server.log.read_text()

    def test_a_step_that_hangs_ends_the_process(self, tmp_path: Path) -> None:
        hangs = (
            "import slimrt.generation.loop as l, slimrt.server.engine_thread as e, time; e._STUCK = 1.0; "
            "l.Loop._compute = lambda *_: time.sleep(60)"
        )
        with served(tmp_path, before=hangs) as server:
            with pytest.raises(OSError):
                server.chat()
            assert server.process.wait(20) == 70 and re.search(r"takes \d+ s already", server.log.read_text())

    def test_a_process_that_stood_still_has_no_step_that_hangs(self, tmp_path: Path) -> None:
        """A container that is paused, say: the step goes on afterwards."""
        slow = (
            "import slimrt.generation.loop as l, slimrt.server.engine_thread as e, time; e._STUCK = 3.0; "
            "f = l.Loop._compute; l.Loop._compute = lambda *a: ([time.sleep(0.02) for _ in range(75)], f(*a))[1]"
        )
        with served(tmp_path, before=slow) as server, server.begin({"messages": MESSAGES, "max_tokens": 1}) as stream:
            time.sleep(0.7)
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(5)
            server.process.send_signal(signal.SIGCONT)
            assert stream.recv(4096).startswith(b"HTTP/1.1 200")

    def test_our_own_faults_are_told_to_the_log_alone(self, tmp_path: Path) -> None:
        fails = "import slimrt.server.app as a; a.plan_chat = lambda *_: exec('raise RuntimeError(\"inner thing\")')"
        with served(tmp_path, before=fails) as server:
            answer = server.chat()
            assert answer.status == 500 and answer.error["type"] == "server_error"
            assert b"inner thing" not in answer.body and "inner thing" in server.log.read_text()
            assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200

    def test_a_port_that_is_taken(self, server: Served) -> None:
        words = [sys.executable, "-m", "slimrt", "serve", str(CHAT), "--port", str(server.port)]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert told.returncode == 1 and f"127.0.0.1:{server.port}" in told.stderr

    @pytest.mark.parametrize("host", ["nonexistent.invalid", ".."])
    def test_a_host_that_is_none(self, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        if host != "..":  # no name server is asked
            monkeypatch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(OSError, match=rf"^cannot listen at {re.escape(host)}:8080: \w"):
            bind(host, 8080)
