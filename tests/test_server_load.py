# SPDX-License-Identifier: Apache-2.0
"""The server under ten times what it takes on: every request is answered once, and memory stays within the plan."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import slimrt
from slimrt.cache.server_sizes import ROWS_OF_A_TEXT, SCORE
from slimrt.generation.parts import FEW

pytest.importorskip("uvicorn")  # the extra `serve`

from served import CHAT, MESSAGES, Answer, Served, dechunked, events, read_all, served  # noqa: E402
from slimrt.server.errors import Refusal  # noqa: E402
from slimrt.server.limits import Places  # noqa: E402

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

PARALLEL, QUEUE, N_CTX, THREADS = 2, 2, 256, 2
SECONDS = 4.0


def planned(max_queue: int | None) -> slimrt.PlanResult:
    return slimrt.plan(CHAT, n_ctx=N_CTX, n_seqs=PARALLEL, n_threads=THREADS, max_queue=max_queue, cache="kv")


def status_of(server: Served, number: int) -> int:
    """The status of a request; every other one is streamed. Nothing may come but one whole answer."""
    stream = number % 2 == 0
    wish = {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "seed": number, "stream": stream}
    body = json.dumps(wish).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
    with server.connect() as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 ") == 1, data
    status = int(data.split()[1])
    if status == 200 and stream:
        told = events(dechunked(data))
        assert told.count("[DONE]") == 1 and told[-1] == "[DONE]", data
        assert [one["choices"][0]["finish_reason"] for one in told[:-1]].count("length") == 1
        return status
    answer = json.loads(data.partition(b"\r\n\r\n")[2])
    if status == 200:
        assert answer["usage"]["completion_tokens"] == 60
    else:
        assert answer["error"]["code"] in ("queue_full", "queue_timeout") and b"retry-after" in data.lower()
    return status


def test_ten_times_as_many_as_there_is_room_for(tmp_path: Path) -> None:
    flags = ("--parallel", PARALLEL, "--max-queue", QUEUE, "-c", N_CTX, "-t", THREADS, "--cache", "kv")
    flags += ("--queue-timeout", 0.05)
    with served(tmp_path, *map(str, flags)) as server:
        clients, end = 10 * (PARALLEL + QUEUE), time.monotonic() + SECONDS

        def ask(client: int) -> list[int]:
            statuses = []
            while time.monotonic() < end:
                statuses.append(status_of(server, client + len(statuses)))
            return statuses

        with ThreadPoolExecutor(clients) as threads:
            counts = Counter(status for some in threads.map(ask, range(clients)) for status in some)
        assert set(counts) <= {200, 429, 503} and counts[200] > PARALLEL and counts[429] > clients, counts
        server.wait_until("places_taken", 0)
        assert server.metric('refused_total{code="queue_full"}') == counts[429]
        assert server.metric('refused_total{code="queue_timeout"}') == counts[503]
        peak = peak_of(server)
        most = planned(QUEUE).asked.total + (64 << 20)
        assert peak < most, f"{peak / 2**20:.1f} MiB, not below {most / 2**20:.1f}"
        assert server.terminate() == 0


def test_a_server_is_part_of_the_plan() -> None:
    alone, beside = planned(None), planned(QUEUE)
    row, n_vocab = beside.asked, 1024
    with slimrt.Model(CHAT, n_ctx=64) as model:
        n_vocab = model.n_vocab
    assert alone.asked.logits == alone.asked.masks == alone.asked.queue == 0 and "with a server" not in str(alone)
    assert row.queue == (PARALLEL + QUEUE) * (4 << 20) and row.masks == 2 * PARALLEL * -(-n_vocab // 32) * 4
    assert row.logits >= PARALLEL * n_vocab * 4 and ROWS_OF_A_TEXT >= FEW
    assert row.total == alone.asked.total + row.logits + row.masks + row.queue
    assert "with a server" in str(beside) and "2 of which wait, 16.0 MiB" in str(beside)
    assert not slimrt.plan(CHAT, n_ctx=N_CTX, max_queue=100, memory_limit="100MiB").fits


def peak_of(server: Served) -> int:
    """Most bytes that the server's process has had resident."""
    said = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) * 1024


def test_an_answer_takes_the_places_of_bodies_that_are_as_large() -> None:
    places = Places(4)
    with places.take() as one, places.take() as other:
        places.hold(one, (8 << 20) + 1, "prompt")
        places.widen(one, 1)  # its one text is within them
        assert places.texts == 4
        with pytest.raises(Refusal, match="queue is full") as full:
            places.hold(other, (4 << 20) + 1, "prompt")
        with pytest.raises(Refusal, match="would take 17 MiB, and all requests have 16") as more:
            places.hold(other, 17 << 20, "prompt")
        assert (full.value.status, more.value.status, more.value.param) == (429, 400, "prompt")
    assert places.texts == 0


def test_scores_stay_within_the_plan(tmp_path: Path) -> None:
    flags = ("--parallel", PARALLEL, "--max-queue", QUEUE, "-c", N_CTX, "-t", THREADS, "--cache", "kv")
    with served(tmp_path, *map(str, flags)) as server:

        def score(n_prompts: int) -> Answer:
            prompts = [[20 + (i * 7 + j) % 100 for j in range(N_CTX)] for i in range(n_prompts)]
            return server.ask("/v1/completions", {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 20})

        answer, most = score(256), (PARALLEL + QUEUE) * (4 << 20) // (N_CTX * 21 * SCORE)
        assert (answer.status, answer.error["param"]) == (400, "prompt") and "--max-queue" in answer.error["message"]
        assert len(score(most).json["choices"]) == most
        assert peak_of(server) < planned(QUEUE).asked.total + (64 << 20)


def test_it_does_not_begin_where_requests_would_not_fit(tmp_path: Path) -> None:
    flags = ("--memory-limit", "50MiB", "--max-queue", "50", "-c", str(N_CTX))
    with served(tmp_path, *flags, ready=False) as server:
        assert server.process.wait(60) == 1
        said = server.log.read_text()
        assert "Of 50.0 MiB the server keeps" in said and "--max-queue" in said and "Traceback" not in said
    with served(tmp_path, *flags[:2], "--max-queue", "1", "-c", str(N_CTX), "--parallel", "1") as server:
        assert server.chat(max_tokens=1).status == 200
