"""Tasks that a cache must not spoil: look up a fact, repeat a list; answered through cached decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

import slimrt

CHUNK = 128  # tokens of a prompt fed at once
SINGLE = 32  # at its end, where the question is, one at a time: all that they read are stored rows


@dataclass(frozen=True)
class Task:
    """Prompts with their answers, as models/retrieval.json and models/copy.json hold them."""

    name: str
    prompts: tuple[tuple[float, tuple[int, ...], tuple[int, ...]], ...]  # depth of the fact, prompt ids, answer ids


# (ids, begins, n) -> the likeliest token after each of the last n ids. begins: for each id where the step began that it
# was fed in; what came before that is read as it was stored.
Predict = Callable[[list[int], list[int], int], list[int]]


def predict_with(model: slimrt.Model) -> Predict:
    """The predictions of a slimrt.Model, in a session of its own."""
    session = model.session()

    def predict(ids: list[int], begins: list[int], n: int) -> list[int]:
        session.truncate(0)
        likeliest: list[int] = []
        for begin, end in pairwise([*dict.fromkeys(begins), len(ids)]):
            logits = session.append(ids[begin:end], last_only=end <= len(ids) - n)
            likeliest += logits.argmax(-1).tolist()
        return likeliest[-n:]

    return predict


def some(task: Task, n: int | None) -> Task:
    """The task with n of its prompts, evenly spread over them (and so over the depths)."""
    total = len(task.prompts)
    if n is None or n >= total:
        return task
    return Task(task.name, tuple(task.prompts[i * total // n] for i in range(n)))


def tasks_for(source: slimrt.ModelSource, files: Sequence[Path]) -> list[Task]:
    """The tasks that are in this model's tokens and fit its context."""
    found = []
    for file in files:
        entries = json.loads(file.read_text())["prompts"]
        first = entries[0]
        own = source.tokenizer.encode(first["prompt"]) == first["prompt_ids"]
        longest = max(len(entry["prompt_ids"]) + len(entry["answer_ids"]) for entry in entries)
        if own and longest <= source.n_ctx_train:
            prompts = tuple((e["depth"], tuple(e["prompt_ids"]), tuple(e["answer_ids"])) for e in entries)
            found.append(Task(file.stem, prompts))
    return found


def answers(predict: Predict, task: Task) -> list[list[bool]]:
    """For each prompt, which tokens of the answer were the likeliest, given the right ones before."""
    found = []
    for _, prompt, answer in task.prompts:
        ids, known = [*prompt, *answer[:-1]], max(len(prompt) - SINGLE, 0)
        begins = [at // CHUNK * CHUNK for at in range(known)] + list(range(known, len(ids)))
        likeliest = predict(ids, begins, len(answer))
        found.append([got == wanted for got, wanted in zip(likeliest, answer, strict=True)])
    return found


def summary(found: Sequence[Sequence[bool]]) -> dict[str, float]:
    """answered: share of prompts with every token right. tokens: share of the tokens."""
    return {
        "answered": float(np.mean([all(one) for one in found])),
        "tokens": float(np.mean([right for one in found for right in one])),
    }
