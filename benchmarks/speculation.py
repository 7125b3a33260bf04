"""Texts with guesses that are checked several at a time, and without, in turns: tokens a second, and the same tokens.

    python benchmarks/speculation.py --streams 1 8 --json out.json
    python benchmarks/speculation.py --draft smollm2-135m --json out.json     # a draft model in place of lookup

No trained weights of this size are here, so the model is one of random weights in a real shape that copies
(`models.make(copies=True)`): what it computes a token is that of the shape, what it says is known. Its prompts decide
what lookup finds in them:

copy           the answer is the prompt again
every 16th, 4th   the same, but so many tokens of the prompt were others
misleading     each two tokens of the answer stood in the prompt, and another followed them there
nothing        no two tokens of the answer stood together before
copy, drawn    copy at a temperature at which a token in some hundreds is another, with a seed for each turn

With a draft model: one that says the same as the model, and one of random weights, which is always wrong. Prompts are
computed before and kept, so that tokens a second are those of the answers. One text is made with guesses and without
eight tokens in turns, several at once one way after the other. The pure-read control is measured after each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import machine
import models
import numpy as np
import report

import slimrt
from slimrt import _core

N_CTX = 768
PIECE = 8  # tokens of either way in turns: what else the machine does is the same for both
KINDS = ("copy", "every 16th", "every 4th", "misleading", "nothing", "copy, drawn")
DRAWN = {"temperature": 4.0, "min_p": 0.0, "top_p": 1.0}
TEXTS = ("plain", "guessed")


def prompt(kind: str, n_vocab: int, rng: np.random.Generator) -> list[int]:
    """Ids that a model goes on after with a cycle from its beginning; not the first cycle, which has control tokens."""
    first = models.CYCLE * int(rng.integers(1, n_vocab // models.CYCLE))
    cycle = np.arange(first, first + models.CYCLE)
    others = rng.integers(models.CYCLE, n_vocab, models.CYCLE)
    if kind == "misleading":
        half = models.CYCLE // 2
        ids = np.stack([cycle[:half], cycle[1 : half + 1], others[:half]], 1).reshape(-1)
    elif kind == "nothing":
        ids = others
    else:
        ids = cycle.copy()
        if kind.startswith("every"):
            every = int(kind.split()[1].rstrip("th"))
            ids[::every] = others[::every]
    return [*map(int, ids), int(cycle[-1])]


def figures(results: list[slimrt.Generation], n: int, seconds: float) -> dict[str, Any]:
    """Of n tokens of texts that took so long."""
    guesses = [sum(getattr(one.usage, name) for one in results) for name in ("drafted_tokens", "accepted_tokens")]
    return {"seconds": seconds, "tok_s": n / seconds, "guesses": guesses[0], "right": guesses[1]}


def one_text(loaded: dict[str, slimrt.Model], prompt: list[int], options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, (figures, tokens of texts)) of both, a few tokens of either in turns; the first token is not counted."""
    streams = {name: model.stream(prompt, **options[name]) for name, model in loaded.items()}
    seconds = dict.fromkeys(streams, 0.0)
    for stream in streams.values():
        next(stream)
    while not all(stream.result.finish_reason == "length" for stream in streams.values()):
        for name, stream in streams.items():
            began = time.perf_counter()
            for _ in range(PIECE):
                next(stream, None)
            seconds[name] += time.perf_counter() - began
    for name, stream in streams.items():
        yield name, (figures([stream.result], len(stream.result.tokens) - 1, seconds[name]), [stream.result.tokens])


def texts(
    loaded: dict[str, slimrt.Model], prompts: list[list[int]], options: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The same of several texts at once, the one way after the other, the first token counted."""
    for name, model in loaded.items():
        began = time.perf_counter()
        results: Any = model.generate(prompts, **options[name])
        seconds = time.perf_counter() - began
        tokens = [one.tokens for one in results]
        yield name, (figures(results, sum(map(len, tokens)), seconds), tokens)


def measured(
    loaded: dict[str, slimrt.Model], kind: str, streams: int, lookup: bool, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Turns of both, the order changing: figures of each, the ratio of their speeds, whether tokens are the same."""
    rng = np.random.default_rng(streams)
    prompts = [prompt(kind, models.SHAPES[args.shape].n_vocab, rng) for _ in range(streams)]
    common: Any = {"max_tokens": args.answer, "ignore_eos": True, "cache_prompt": True}
    for model in {id(one): one for one in loaded.values()}.values():  # prompts are computed once
        model.generate(prompts, **common | {"max_tokens": 1})
    for i in range(args.turns):
        drawn = DRAWN | {"seed": 100 * i} if kind == "copy, drawn" else {"temperature": 0.0}
        order = TEXTS if i % 2 == 0 else TEXTS[::-1]
        options = {name: common | drawn | {"lookup": lookup and name == "guessed"} for name in TEXTS}
        both = {name: loaded[name] for name in order}
        found = dict(one_text(both, prompts[0], options) if streams == 1 else texts(both, prompts, options))
        turn, said = ({name: one[j] for name, one in found.items()} for j in (0, 1))
        if kind != "copy, drawn" and any(map(strays, prompts, said["plain"])):
            raise SystemExit("the model does not copy")
        turn["ratio"] = turn["guessed"]["tok_s"] / turn["plain"]["tok_s"]
        turn["same"] = said["plain"] == said["guessed"]
        yield turn | {"read_gbs": _core.read_bandwidth(args.threads), "load_average": os.getloadavg()[0]}


def strays(prompt: list[int], answer: Sequence[int]) -> bool:
    """Whether a model says other than it was made to."""
    return not np.array_equal(answer, models.follows(np.array([prompt[-1], *answer[:-1]])))


def contestants(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, slimrt.Model], str]]:
    """(what guesses, who goes without and with guesses, kind of prompts)."""
    shape = models.SHAPES[args.shape]
    path, most = models.make(shape, args.weights, words=True, copies=True), max(args.streams)
    sizes: Any = {"n_ctx": N_CTX, "n_seqs": most, "cache_tokens": 2 * most * N_CTX}
    sizes |= {"n_threads": args.threads, "cache": "kv", "cache_type": "f16", "progress": False}
    with slimrt.Model(path, **sizes) as plain:
        if not args.draft:
            yield from (("lookup", {"plain": plain, "guessed": plain}, kind) for kind in args.kinds)
            return
        for right in (True, False):
            draft = models.make(models.SHAPES[args.draft], args.weights, words=True, copies=right)
            with slimrt.Model(path, draft_model=draft, **sizes) as guessing:
                name = f"{args.draft} that is {'right' if right else 'wrong'}"
                yield name, {"plain": plain, "guessed": guessing}, "nothing"


def row(name: str, turns: list[dict[str, Any]]) -> str:
    """Of the table."""
    middle = {one: statistics.median(turn[one]["tok_s"] for turn in turns) for one in TEXTS}
    ratios = sorted(turn["ratio"] for turn in turns)
    guesses, right = (sum(turn["guessed"][key] for turn in turns) for key in ("guesses", "right"))
    read = statistics.median(turn["read_gbs"] for turn in turns)
    same = "yes" if all(turn["same"] for turn in turns) else "NO"
    return (
        f"| {name} | {middle['plain']:.1f} | {middle['guessed']:.1f} | {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} - {ratios[-1]:.2f}) | {right} of {guesses} | {same} | {read:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--weights", choices=("f16", "bf16", "q8_0"), default="f16")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--draft", choices=sorted(models.SHAPES), help="shape of a draft model, in place of lookup")
    parser.add_argument("--streams", nargs="+", type=int, default=[1], help="texts at once")
    parser.add_argument("--answer", type=int, default=96, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="results are added to this file")
    args = parser.parse_args()
    here = machine.describe()
    data = report.gathered(args.json, here["machine"])
    rows = []
    for guesser, loaded, kind in contestants(args):
        for streams in args.streams:
            name, turns = f"{args.shape} {args.weights}, {guesser}, {kind}, {streams} at once", []
            for turn in measured(loaded, kind, streams, guesser == "lookup", args):
                turns.append(turn)
                print(f"{name}: {json.dumps(turn)}", file=sys.stderr, flush=True)
            cell = {"date": datetime.now().isoformat(timespec="seconds"), "versions": here["versions"]}
            data["cells"][name] = cell | {"threads": args.threads, "answer": args.answer, "turns": turns}
            rows.append(row(name, turns))
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{here['machine']}\n\n| | plain tok/s | guessed | ratio | right | same tokens | pure read GB/s |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
