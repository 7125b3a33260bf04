"""Time to make a mask of a grammar: mean, 99 %, worst, of a made-up vocabulary as large as a model's.

    python benchmarks/masks.py --vocab 151936

Texts are drawn from what the masks allow, so that all of a grammar is come by. Forced tokens have no mask, as when a
model writes.
"""

from __future__ import annotations

import argparse
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from slimrt.generation.grammar import Grammar, Matcher, Vocabulary, source_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[str, Any]] = {
    "schema of an object": ("json_schema", SCHEMA),
    "any JSON": ("json_schema", {}),
    "regex of words": ("regex", "([A-Z][a-z]+ )+[0-9]{1,4}"),
    "one of 100 texts": ("choice", [f"choice {i:03} of all" for i in range(100)]),
}
LETTERS = b'etaoinshrdlucmfwypvbgkjqxzETAOINS0123456789_-"{}[]:,.\n'


class Made:
    """A tokenizer of random words, every byte among them, with a control token at the end."""

    def __init__(self, n_vocab: int, seed: int):
        rng, words = random.Random(seed), dict.fromkeys(bytes([byte]) for byte in range(256))
        while len(words) < n_vocab - 1:
            length = min(1 + int(rng.expovariate(0.22)), 16)
            words[b" " * (rng.random() < 0.4) + bytes(rng.choices(LETTERS, k=length))] = None
        self._tokens, self.eog_ids = [*words, b"<|end|>"], (n_vocab - 1,)
        self.vocabulary = SimpleNamespace(control={n_vocab - 1})

    def token_bytes(self, id: int) -> bytes:
        return self._tokens[id]

    def encode(self, text: str, *_: bool) -> list[int]:
        return list(text.encode())


def masks(grammar: Grammar, count: int, rng: np.random.Generator) -> list[float]:
    """Seconds of each of so many masks."""
    times, matcher = list[float](), grammar.matcher()
    while len(times) < count:
        start = time.perf_counter()
        mask = matcher.mask()
        times.append(time.perf_counter() - start)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        _go_on(matcher, int(rng.choice(allowed)) if len(allowed) else -1)
        if matcher.is_done or not len(allowed) or len(times) % 200 == 0:
            matcher = grammar.matcher()
    return times


def _go_on(matcher: Matcher, token: int) -> None:
    if token >= 0:
        matcher.accept(token)
        for forced in () if matcher.is_done else matcher.forced():
            matcher.accept(forced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--masks", type=int, default=2000, help="of each grammar")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    made: Any = Made(args.vocab, args.seed)
    words = time.perf_counter()
    vocabulary = Vocabulary(made, args.vocab)
    built = time.perf_counter()
    print(f"{args.vocab} tokens: {words - start:.1f} s to make them up, {built - words:.2f} s for llguidance")
    rng, every = np.random.default_rng(args.seed), list[float]()
    print("| grammar | mean, ms | 99 %, ms | worst, ms |\n|---|---|---|---|")
    for name, (kind, value) in CASES.items():
        grammar = Grammar(vocabulary, source_of(kind, value))
        times = masks(grammar, args.masks, rng)
        every += times
        show(name, times)
    show("all", every)


def show(name: str, times: list[float]) -> None:
    ms = np.array(times) * 1e3
    print(f"| {name} | {ms.mean():.3f} | {np.percentile(ms, 99):.2f} | {ms.max():.2f} |", flush=True)


if __name__ == "__main__":
    main()
