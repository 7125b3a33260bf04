# SPDX-License-Identifier: Apache-2.0
"""What the reference models are measured on: text they have not seen, and prompts whose answer stands in the context.

A prompt of `retrieval*.json` asks for one fact among others; one of `copy.json` begins a list of words that stands in
the context, and the rest of the list is the answer. Depth 0 puts what is looked for first, depth 1 last.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from reference_language import NUMBERS, WORDS, Encoder, Facts, question, statement, tale, tales
from reference_rows import lookup_row
from torch import nn
from tqdm import tqdm

DEPTHS = [i / 10 for i in range(11)]
Maker = Callable[[random.Random, Encoder, int, float, int], tuple[str, str]]


def fill(story: Iterator[str], encode: Encoder, tokens: int) -> list[str]:
    """Sentences of a story, of at least so many tokens together."""
    sentences: list[str] = []
    used = 0
    while used < tokens:
        sentences.append(" " + next(story))
        used += len(encode(sentences[-1]))
    return sentences


def lookup_prompt(rng: random.Random, encode: Encoder, tokens: int, depth: float, distractors: int) -> tuple[str, str]:
    """A context of at least `tokens` tokens with one fact at `depth` (0 = first, 1 = last), and a question about it.

    Returns the prompt, ending in "Answer:", and the answer it should be followed by.
    """
    facts, story = Facts(rng), tales(rng)
    needle = facts.new()
    others = ["".join(statement(facts.new())) + "." for _ in range(distractors)]
    sentences = fill(story, encode, tokens - sum(len(encode(text)) for text in others) - 25)
    for text in others:
        sentences.insert(rng.randint(0, len(sentences)), text)
    sentences.insert(round(depth * len(sentences)), "".join(statement(needle)) + ".")
    text = "".join(sentences).strip() + question(needle)
    while len(encode(text)) < tokens:
        text = next(story) + " " + text if depth > 0.5 else text.replace(" Question:", " " + next(story) + " Question:")
    return text, "".join(statement(needle)) + "."


def copy_prompt(rng: random.Random, encode: Encoder, tokens: int, depth: float, words: int) -> tuple[str, str]:
    """A context of at least `tokens` tokens with a list of different words at `depth`, and its first three at the end.

    Two other lists stand anywhere, which share some of the words. A sentence of the story opens the text, since a word
    without a space before it is another token. Returns the prompt, and the rest of the list with its full stop.
    """
    (chosen, *lists), story = [rng.sample(WORDS + NUMBERS, words) for _ in range(3)], tales(rng)
    needle, *others = (" " + " ".join(each) + "." for each in (chosen, *lists))
    sentences = fill(story, encode, tokens - 3 * len(encode(needle)))
    for text in others:
        sentences.insert(rng.randint(1, len(sentences)), text)
    sentences.insert(max(1, round(depth * len(sentences))), needle)
    return "".join(sentences).strip() + " " + " ".join(chosen[:3]), " " + " ".join(chosen[3:]) + "."


KINDS: dict[Maker, str] = {lookup_prompt: "distractor_facts", copy_prompt: "words"}  # what their last argument is


def held_out_text(encode: Encoder, seed: int, tokens: int) -> str:
    """Text the models have not seen: mostly tales, one a line, and now and then facts with questions."""
    rng, lines, used = random.Random(seed), [], 0
    while used < tokens:
        if rng.random() < 0.25:
            ids, _ = lookup_row(rng, encode, 240, 1.0, dense=False)
            text = encode.tokenizer.decode(ids, skip_special_tokens=True).strip()
            text = text[: text.rindex(".") + 1]
        else:
            text = " ".join(tale(rng))
        lines.append(text)
        used += len(encode(text))
    return " ".join(lines) + "\n"


def write_texts(encode: Encoder, out: Path) -> None:
    """Held-out text, calibration text, and long prompts with the answers they should get."""
    (out / "heldout.txt").write_text(held_out_text(encode, 101, 12000), encoding="utf-8")
    (out / "calibration.txt").write_text(held_out_text(encode, 102, 6000), encoding="utf-8")
    write_prompts(encode, out / "retrieval.json", 103, lookup_prompt, 20)
    write_prompts(encode, out / "copy.json", 104, copy_prompt, 20)


def write_prompts(encode: Encoder, path: Path, seed: int, make: Maker, size: int) -> None:
    """44 prompts of 1000 tokens and more, four at each depth, with their token ids and the ids of their answers."""
    rng, rows = random.Random(seed), []
    for i in range(44):
        depth = DEPTHS[i % len(DEPTHS)]
        text, answer = make(rng, encode, 1000, depth, size)
        ids = [encode.end, *encode(text)]
        rows.append({"depth": depth, "prompt": text, "prompt_ids": ids, "answer": answer, "answer_ids": encode(answer)})
    note = "prompt_ids open with BOS; a greedy continuation of the prompt is the answer"
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f'{{"note": {json.dumps(note)}, "prompts": [\n{body}\n]}}\n', encoding="utf-8")


@torch.no_grad()
def accuracy_table(
    model: nn.Module, encode: Encoder, make: Maker, tokens: int, trials: int, size: int
) -> dict[str, float | int | dict[str, float]]:
    """Share of prompts answered exactly (every token of the answer is the most likely one), by depth.

    Also the mean negative log-likelihood of an answer's token in nats: where every answer is right, it still tells
    how near to wrong they are.
    """
    rng, table = random.Random(2024), {}
    shortest, nll, count = 10**9, 0.0, 0
    for depth in tqdm(DEPTHS, desc="questions, by depth"):
        right = 0
        for _ in range(trials):
            text, answer = make(rng, encode, tokens, depth, size)
            ids, wanted = [encode.end, *encode(text)], torch.tensor(encode(answer))
            logits = model(torch.tensor([ids + wanted[:-1].tolist()]))[0, len(ids) - 1 :]
            right += int((logits.argmax(-1) == wanted).all())
            nll, count = nll + F.cross_entropy(logits, wanted, reduction="sum").item(), count + len(wanted)
            shortest = min(shortest, len(ids))
        table[f"{depth:.0%}"] = right / trials
    mean = sum(table.values()) / len(table)
    return {
        "context_tokens_at_least": shortest, KINDS[make]: size, "trials_per_depth": trials,
        "trials": trials * len(DEPTHS), "accuracy": mean, "accuracy_by_depth": table,
        "nll_per_answer_token": nll / count,
    }  # fmt: skip
