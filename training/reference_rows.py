# SPDX-License-Identifier: Apache-2.0
"""What the reference models read while they are trained: rows of tokens, each with the weight of its loss."""

from __future__ import annotations

import random

from reference_language import (
    MEN,
    NUMBERS,
    WOMEN,
    WORDS,
    Encoder,
    Facts,
    question,
    statement,
    tale,
    tales,
)


def tale_row(rng: random.Random, encode: Encoder, length: int) -> tuple[list[int], list[float]]:
    """Whole tales one after the other, cut to `length` tokens, every token of equal weight."""
    ids: list[int] = []
    while len(ids) < length:
        ids += [encode.end, *encode(" ".join(tale(rng)))]
    return ids[:length], [1.0] * length


def lookup_row(
    rng: random.Random, encode: Encoder, length: int, answer_weight: float, dense: bool
) -> tuple[list[int], list[float]]:
    """Tale sentences with facts between them, repeated or asked for again anywhere later in the row.

    The value of a new fact is random, so learning from it is only noise and it weighs little; the value of a
    repeated fact is what the row is about and it weighs much. `dense` leaves out most of the story.
    """
    story, facts = tales(rng), Facts(rng)
    ids, weights = [encode.end], [1.0]
    p_story = rng.uniform(0.0, 0.2) if dense else rng.uniform(0.3, 0.9)
    p_recall = 0.55  # of what is not story
    late = rng.random() < 0.4  # everything is asked at the end, so distances are long
    unasked: list[tuple[str, str, str]] = []

    def add(text: str, weight: float) -> None:
        piece = encode(text if len(ids) > 1 else text.lstrip())  # a document opens without a space
        ids.extend(piece)
        weights.extend([weight] * len(piece))

    while len(ids) < length:
        asking = len(ids) > 0.75 * length if late else True
        told = not unasked and facts.known == []
        if not told and rng.random() < (0.1 if late and asking else p_story):
            add(" " + next(story), 1.0)
        elif unasked and asking and rng.random() < (0.95 if late else p_recall):
            fact = unasked.pop(rng.randrange(len(unasked))) if rng.random() < 0.9 else rng.choice(facts.known)
            lead, value = statement(fact)
            if rng.random() < 0.4:
                add(question(fact), 0.5)
            add(lead, 0.5)
            add(value, answer_weight)
            add(".", 1.0)
        elif (fresh := facts.new()) is not None:
            unasked.append(fresh)
            lead, value = statement(fresh)
            add(lead, 0.3)
            add(value, 0.1)
            add(".", 1.0)
        else:
            add(" " + next(story), 1.0)
    return ids[:length], weights[:length]


def drill_row(rng: random.Random, encode: Encoder, length: int) -> tuple[list[int], list[float]]:
    """Lists that come round again: plain words in the same order, or name-value pairs in a new order.

    Almost every token of the second round can be looked up, so the heads that look things up form here within a few
    hundred steps, where facts among tales alone leave the model guessing for thousands.
    """
    ids, weights = [encode.end], [1.0]
    if rng.random() < 0.4:
        words = [encode(f" {rng.choice(WORDS + WOMEN + MEN + NUMBERS)}")[0] for _ in range(rng.randint(8, length // 2))]
        ids += words * (length // len(words) + 1)
        weights += [0.05] * len(words) + [1.0] * (len(ids) - 1 - len(words))
        return ids[:length], weights[:length]
    values = rng.choice([WORDS, NUMBERS, WORDS + NUMBERS])
    short = rng.random() < 0.6
    size = 5 if short else 7
    facts = Facts(rng)
    names = facts.names[: rng.randint(4, max(5, min(60, length // (2 * size))))]
    pairs = [("password", name, rng.choice(values)) for name in names]
    seen = 0.05
    while len(ids) < length:
        for fact in rng.sample(pairs, len(pairs)):
            lead = encode(f" {fact[1]} is") if short else encode(statement(fact)[0])
            ids += lead + encode(f" {fact[2]}.")
            weights += [0.2] * len(lead) + [3.0 if seen == 1 else 0.05, 0.2]
        seen = 1
    return ids[:length], weights[:length]


def word_list(rng: random.Random, words: list[str]) -> str:
    """A sentence that is nothing but these words, in an order of chance."""
    return " " + " ".join(rng.sample(words, len(words))) + "."


def copy_row(rng: random.Random, encode: Encoder, length: int, answer_weight: float) -> tuple[list[int], list[float]]:
    """Tale sentences with lists of words between them, each list once more anywhere later, sometimes shuffled too.

    A shuffled list has the same words with other neighbours, so only what stood before a word tells what follows it.
    """
    story = tales(rng)
    ids, weights = [encode.end, *encode(next(story))], [1.0]
    weights *= len(ids)
    p_story = rng.uniform(0.2, 0.9)
    pool, told = WORDS + NUMBERS, []
    longest = max(8, min(40, length // 8))
    while len(ids) < length:
        if rng.random() < p_story:
            piece = encode(" " + next(story))
            new = [1.0] * len(piece)
        elif told and rng.random() < 0.6:
            piece = encode(told.pop(rng.randrange(len(told))))
            new = [0.05, 0.2] + [0.5 * answer_weight] * (len(piece) - 2)
        else:
            words = rng.sample(pool, rng.randint(6, longest))
            fresh = [word_list(rng, words) for _ in range(rng.choice([1, 1, 2, 3]))]
            told += fresh
            piece = encode("".join(fresh))
            new = [0.05] * len(piece)
        ids += piece
        weights += new
    return ids[:length], weights[:length]
