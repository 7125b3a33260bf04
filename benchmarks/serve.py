"""slimrt serve beside llama-server under load, interleaved in one run.

    LLAMA_SERVER=build/bin/llama-server python benchmarks/serve.py steady --streams 1 8 32 --json out.json
    python benchmarks/serve.py stall | conversations | overload | soak --requests 10000
    python benchmarks/serve.py soak --requests 10000 --model models/tale-chat.gguf --turns 1 --no-rival

Both servers hold the same file and take turns, the idle one stopped; the pure-read control is measured after each.
llama-server has the best of its settings, found by a short run of the same kind (`--rival` names one instead).
README.md here says how it is built.

steady: streams of prompts of 512 tokens and answers of 128. stall: four streams while a prompt of 4096 arrives.
conversations: 20 people, 10 turns each, after one system prompt. overload: ten times the clients that there is room
for, for a minute. soak: short requests, a tenth of them broken off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import loads
import machine
import models
import report
import serve_report
from servers import Server, Setup

import slimrt
from slimrt import core
from slimrt.cache.server_sizes import QUEUE

SETTINGS = [{"flash": flash, "n_batch": n_batch} for flash in (True, False) for n_batch in (64, 256, 2048)]
SCENARIOS = ("steady", "stall", "conversations", "overload", "soak")
PEOPLE = 20  # of conversations


@dataclass(frozen=True)
class Cell:
    scenario: str
    streams: int
    shape: models.Shape
    weights: str
    file: Path | None = None  # a model that is there, in the place of one of this shape

    @property
    def name(self) -> str:
        of = self.file.stem if self.file else f"{self.shape.name} {self.weights}"
        return f"{of} {self.scenario} {self.streams}"

    @property
    def n_vocab(self) -> int:
        return int(core.plan(core.GgufFile(str(self.file)))["n_vocab"]) if self.file else self.shape.n_vocab

    def setup(self, args: argparse.Namespace) -> Setup:
        model = self.file or models.make(self.shape, self.weights, words=True)
        reuse = self.scenario in ("conversations", "soak")
        parallel = self.streams + (self.scenario == "stall")
        n_ctx = {"steady": args.prompt + args.answer, "stall": 4096 + 128, "conversations": 1280}.get(
            self.scenario, 256
        )
        n_ctx = -(-n_ctx // 256) * 256
        kept = (PEOPLE - parallel) * n_ctx if self.scenario == "conversations" else 0
        return Setup(model, parallel, n_ctx, reuse, kept, args.threads)

    def turn(self, server: Server, seed: int, args: argparse.Namespace) -> Coroutine[Any, Any, loads.Figures]:
        prompts, n = loads.Prompts(self.n_vocab, seed), self.streams
        if self.scenario == "steady":
            sizes = {"n_prompt": args.prompt, "n_answer": args.answer}
            return loads.steady(server, prompts, streams=n, each=max(args.each, 4 // n), **sizes)
        if self.scenario == "stall":
            return loads.stall(server, prompts, streams=n, n_prompt=4096)
        if self.scenario == "conversations":
            sizes = {"n_system": 256, "n_said": 64, "n_answer": 32}
            return loads.conversations(server, prompts, people=PEOPLE, turns=10, streams=n, **sizes)
        if self.scenario == "overload":
            clients = 10 * n * (1 + QUEUE)
            return loads.overload(server, prompts, clients=clients, seconds=args.seconds, n_prompt=64, n_answer=32)
        return loads.soak(server, prompts, requests=args.requests, streams=n)


def best_settings(cell: Cell, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """llama-server's settings with the most output tokens a second under a short steady load, and all that it tried."""
    if args.rival:
        return args.rival, []
    tried = []
    for settings in SETTINGS:
        server = Server("llama-server", settings, cell.setup(args))
        try:
            with server.turn():
                prompts = loads.Prompts(cell.n_vocab, 1)
                sizes = {"n_prompt": min(256, server.setup.n_ctx // 2), "n_answer": 32}
                figures = asyncio.run(loads.steady(server, prompts, streams=cell.streams, each=1, **sizes))
        finally:
            server.stop()
        tried.append(settings | {"tok_s": figures["tok_s"]})
        print(f"{cell.name}, llama-server {settings}: {figures['tok_s']:.1f} tok/s", file=sys.stderr, flush=True)
    best = max(tried, key=lambda one: one["tok_s"])
    return {key: best[key] for key in ("flash", "n_batch")}, tried


def contestants(cell: Cell, args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any], Any]]:
    """(name, engine, settings, what was tried to find them) of each that has a turn."""
    for one in args.slimrt:
        mode, _, type = one.partition(":")
        yield f"slimrt {mode} {type or 'f16'}", "slimrt", {"cache": mode, "type": type or "f16"}, None
    if "LLAMA_SERVER" in os.environ and not args.no_rival:
        settings, tried = best_settings(cell, args)
        yield "llama-server", "llama-server", settings, tried


def planned(server: Server, settings: dict[str, Any]) -> int:
    """Bytes that slimrt says it would take, mapped weights and requests that wait among them."""
    setup = server.setup
    cache: Any = {"cache": settings["cache"], "cache_type": settings["type"]}
    pool = setup.parallel * setup.n_ctx + setup.kept
    sizes: Any = {"n_ctx": setup.n_ctx, "n_seqs": setup.parallel, "cache_tokens": pool, "n_threads": setup.threads}
    said = slimrt.plan(setup.model, max_queue=QUEUE * setup.parallel, **sizes, **cache)
    return int(said.to_dict()["asked"]["total"])


def run_cell(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """All turns of one cell, as the JSON file holds them."""
    from slimrt import _core

    results: dict[str, dict[str, Any]] = {}
    servers: dict[str, Server] = {}
    try:
        for name, engine, settings, tried in contestants(cell, args):
            servers[name] = Server(engine, settings, cell.setup(args))
            facts: dict[str, Any] = {"planned": planned(servers[name], settings)} if engine == "slimrt" else {}
            facts |= {"loading": servers[name].loading, "command": [Path(one).name for one in servers[name].command]}
            results[name] = {"engine": engine, "settings": settings, "tried": tried, "turns": []} | facts
        for turn in range(args.turns):
            for name in list(servers) if turn % 2 == 0 else list(servers)[::-1]:
                with servers[name].turn():
                    figures = asyncio.run(cell.turn(servers[name], 100 + turn, args))
                figures |= {"read_gbs": _core.read_bandwidth(args.threads), "load_average": os.getloadavg()[0]}
                results[name]["turns"].append(figures)
                print(f"{cell.name}, turn {turn + 1}, {name}: {loads.show(figures)}", file=sys.stderr, flush=True)
    finally:
        for server in servers.values():
            server.stop()
    sizes = {"prompt": args.prompt, "answer": args.answer, "each": args.each, "threads": args.threads}
    return {
        "scenario": cell.scenario,
        "streams": cell.streams,
        "date": datetime.now().isoformat(timespec="seconds"),
        "settings": sizes,
        "contestants": results,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--weights", choices=sorted(models.WEIGHTS), default="q8_0")
    parser.add_argument("--model", type=Path, metavar="FILE", help="serve this file, not a shape with random weights")
    parser.add_argument("--streams", nargs="+", type=int, default=[4], help="requests at once")
    parser.add_argument("--slimrt", nargs="*", default=["kv:f16"], metavar="MODE:TYPE", help="cache modes and types")
    parser.add_argument("--rival", type=json.loads, metavar="JSON", help='such as {"flash": true, "n_batch": 256}')
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (steady)")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer (steady)")
    parser.add_argument("--each", type=int, default=2, help="requests of a stream, four in all at least (steady)")
    parser.add_argument("--requests", type=int, default=1000, help="in all (soak)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="results are added to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    here = machine.describe()
    data = report.gathered(args.json, here["machine"])
    if "LLAMA_SERVER" not in os.environ:
        print("LLAMA_SERVER names no llama-server: no rival (README.md here says how it is built)", file=sys.stderr)
    done = {}
    for scenario in args.scenarios:
        for streams in args.streams:
            cell = Cell(scenario, streams, models.SHAPES[args.shape], args.weights, args.model)
            done[cell.name] = run_cell(cell, args) | {"versions": here["versions"]}
            data["cells"][cell.name] = done[cell.name]
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{here['machine']}\n\n{serve_report.table(done)}")


if __name__ == "__main__":
    main()
