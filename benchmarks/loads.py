"""What serve.py does to a server: one coroutine a scenario, each giving the figures of one turn.

Prompts are lists of random ids, so nobody's tokenizer is measured. Times are seconds as the client sees them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import client
import numpy as np
from client import Answer, complete
from servers import Server

Figures = dict[str, Any]
BLOCKS = ("slimrt_blocks", "slimrt_blocks_free", "slimrt_blocks_left")  # left: held for texts that begin alike


class Prompts:
    """Random ids after the control tokens; a turn's seed makes them the same for every contestant."""

    def __init__(self, n_vocab: int, seed: int):
        self._rng, self._n_vocab = np.random.default_rng(seed), n_vocab

    def ids(self, n: int) -> list[int]:
        return [int(id) for id in self._rng.integers(3, self._n_vocab, n)]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p99 and max."""
    if not values:
        return None
    p50, p99, most = np.percentile(values, (50, 99, 100))
    return {"p50": float(p50), "p99": float(p99), "max": float(most)}


def summary(answers: Sequence[Answer], seconds: float) -> Figures:
    """Of requests that all had to be answered whole."""
    broken = [one for one in answers if not one.whole]
    if broken:
        raise RuntimeError(
            f"{len(broken)} of {len(answers)} requests failed; status {broken[0].status}: {broken[0].error}"
        )
    tokens = sum(one.tokens for one in answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "first": spread([one.first for one in answers]),
        "gap": spread([gap for one in answers for gap in one.gaps]),
        "whole": spread([one.ended - one.sent for one in answers]),
        "pieces_a_token": sum(len(one.times) for one in answers) / tokens,
    }


async def steady(server: Server, prompts: Prompts, *, streams: int, each: int, n_prompt: int, n_answer: int) -> Figures:
    """So many streams, each asking `each` times, the next request as soon as the last is answered; no prefix shared."""
    lists = [[prompts.ids(n_prompt) for _ in range(each)] for _ in range(streams)]

    async def stream(own: list[list[int]]) -> list[Answer]:
        return [await complete(server.port, prompt, n_answer) for prompt in own]

    start, cpu = time.perf_counter(), time.process_time()
    done = await asyncio.gather(*map(stream, lists))
    seconds = time.perf_counter() - start
    client_cpu = (time.process_time() - cpu) / seconds
    return summary([one for own in done for one in own], seconds) | {"client_cpu": client_cpu}


async def stall(server: Server, prompts: Prompts, *, streams: int, n_prompt: int) -> Figures:
    """A long prompt while others stream: what their largest gap is, and what it waits for its first token.

    Before, the long prompt alone, and the streams alone for as many tokens as they have when it arrives.
    """
    alone = await complete(server.port, prompts.ids(n_prompt), 1)
    if not alone.whole:
        raise RuntimeError(f"the long prompt alone was not answered: {alone}; {server.said()}"[:2000])
    room = server.setup.n_ctx - 64
    answers = [asyncio.create_task(complete(server.port, prompts.ids(64), room)) for _ in range(streams)]
    await asyncio.sleep(10 * alone.first / n_prompt * 64 * streams)  # their prompts, and steps to compare with
    sent = time.perf_counter()
    late = await complete(server.port, prompts.ids(n_prompt), 1)
    for one in answers:
        one.cancel()
    others = await asyncio.gather(*answers)
    if not (alone.whole and late.whole) or any(one.error or not one.left for one in others):
        raise RuntimeError(f"a request failed, or ended before the long prompt: {[alone, late, *others]}"[:2000])
    pairs = [pair for one in others for pair in zip(one.times, one.times[1:], strict=False)]
    return {
        "first_alone": alone.first,
        "first": late.first,
        "gap_before": spread([after - before for before, after in pairs if after < sent]),
        "gap": spread([after - before for before, after in pairs if after > sent and before < late.sent + late.first]),
        "tok_s_meanwhile": sum(after > sent for _, after in pairs) / late.first,
    }


async def conversations(
    server: Server,
    prompts: Prompts,
    *,
    people: int,
    turns: int,
    streams: int,
    n_system: int,
    n_said: int,
    n_answer: int,
) -> Figures:
    """People who talk in turns after one system prompt, so many at once; each prompt holds all that was said before.

    possible: the share of prompt tokens that had been computed before, had nothing been dropped.
    """
    places, system = asyncio.Semaphore(streams), prompts.ids(n_system)
    said = [[prompts.ids(n_said) for _ in range(turns)] for _ in range(people)]

    async def talk(own: list[list[int]]) -> list[Answer]:
        prompt, answers = list(system), []
        for words in own:
            prompt += words
            async with places:  # first come, first served: so they take turns
                answers.append(await complete(server.port, prompt, n_answer, reuse=True))
            prompt += ids_of(answers[-1].text)
        return answers

    start = time.perf_counter()
    done = await asyncio.gather(*map(talk, said))
    figures = summary([one for own in done for one in own], time.perf_counter() - start)
    total = sum(int(one.usage["prompt_tokens"]) for own in done for one in own)
    known = [int(one.usage["prompt_tokens"]) + n_answer - 1 for own in done for one in own[:-1]]
    return figures | {
        "reused": sum(one.cached for own in done for one in own) / total,
        "possible": (sum(known) + n_system * (people - 1)) / total,
        "first_later": spread([one.first for own in done for one in own[1:]]),
        "memory": server.memory(),
    }


def ids_of(text: str) -> list[int]:
    """The ids of an answer, models.word() read backwards; control tokens, which servers write in several ways, are not
    said again."""
    words = re.findall(r" ([a-z]{5})", text)
    return [sum((ord(letter) - ord("a")) * 26**place for place, letter in enumerate(word)) for word in words]


async def overload(
    server: Server, prompts: Prompts, *, clients: int, seconds: float, n_prompt: int, n_answer: int
) -> Figures:
    """So many clients that ask again as soon as they are answered, or a second after they are refused."""
    end, answers, peak = time.perf_counter() + seconds, [], server.memory()
    lists = [[prompts.ids(n_prompt) for _ in range(8)] for _ in range(clients)]

    async def ask(own: list[list[int]]) -> None:
        for i in range(1 << 30):
            if time.perf_counter() > end:
                return
            answers.append(await complete(server.port, own[i % len(own)], n_answer))
            if answers[-1].status != 200:
                await asyncio.sleep(1)

    async def watch() -> None:
        while True:
            for key, value in server.memory().items():
                peak[key] = max(peak[key], value)
            await asyncio.sleep(0.2)

    watcher = asyncio.create_task(watch())
    asked = await asyncio.wait_for(asyncio.gather(*map(ask, lists), return_exceptions=True), seconds + 900)
    watcher.cancel()
    served = [one for one in answers if one.whole]
    refused = [one for one in answers if one.status in (429, 503)]
    odd = [f"{one.status} {one.error}" for one in answers if not one.whole and one.status not in (429, 503)]
    return {
        "statuses": dict(Counter(str(one.status) for one in answers)),
        "odd": odd[:5] + [str(one) for one in asked if one is not None],  # neither whole nor refused
        "tok_s": sum(one.tokens for one in served) / (max(one.ended for one in answers) - end + seconds),
        "first": spread([one.first for one in served]),
        "refusal": spread([one.ended - one.sent for one in refused]),
        "retry_after": sorted({one.retry_after or "" for one in refused}),
        "memory": peak,
        "healthy_after": (await client.fetch(server.port, "/health"))[0] == 200,
    }


async def soak(server: Server, prompts: Prompts, *, requests: int, streams: int) -> Figures:
    """Short requests, a tenth of them broken off somewhere; memory as it goes, and whether every block comes back.

    Half of the prompts begin alike, so that prefixes are shared, dropped and evicted too. What a request leaves is
    counted over the second half; grown: bytes more than when a tenth of all was answered.
    """
    common, left, memory, cut = prompts.ids(40), requests, [], np.random.default_rng(0)
    counts: Counter[str] = Counter()

    async def stream() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            number = left
            prompt = common * (number // 2 % 2) + prompts.ids(16)
            leaving = int(cut.integers(0, 5)) if number % 9 == 0 else None  # some are whole before: a tenth is left
            answer = await complete(server.port, prompt, 8, reuse=True, leave_after=leaving)
            counts["left" if answer.left else "whole" if answer.whole else f"{answer.status} {answer.error}"] += 1
            if number % max(requests // 20, 1) == 0:
                memory.append({"after": requests - number} | server.memory())

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds = time.perf_counter() - start
    await asyncio.sleep(3)  # the last who left, and what the server counts each second
    memory.sort(key=lambda one: one["after"])
    if broken := set(counts) - {"left", "whole", *(one for one in counts if one.startswith(("429", "503")))}:
        raise RuntimeError(f"requests that were neither answered nor refused: {[(one, counts[one]) for one in broken]}")
    warm, settled = (next(one for one in memory if one["after"] >= part) for part in (requests // 10, requests // 2))
    last = memory[-1]["anonymous"]
    return {
        "outcomes": dict(counts),
        "requests_s": requests / seconds,
        "memory": memory,
        "grown": last - warm["anonymous"],
        "bytes_a_request": (last - settled["anonymous"]) / max(memory[-1]["after"] - settled["after"], 1),
        "blocks": await blocks(server),
    }


async def blocks(server: Server) -> dict[str, float]:
    """Those of the cache as /metrics has them, and those that are neither free nor left; empty: it says nothing."""
    status, text = await client.fetch(server.port, "/metrics")
    lines = (line.rpartition(" ") for line in text.splitlines() if status == 200)
    found = {name: float(value) for name, _, value in lines if name in BLOCKS}
    return found | ({"lost": 2 * found[BLOCKS[0]] - sum(found.values())} if len(found) == len(BLOCKS) else {})


def show(figures: Figures) -> str:
    return json.dumps(figures, default=str)[:400]
