# SPDX-License-Identifier: Apache-2.0
"""Spending a number of bytes a token on the layers of a model: the caches whose weighed errors add up to the least.

What is lowered is the sum over layers of attention's squared relative output error, with the part that comes through
the scores counted SCORES times (`loss`): an error of V is spread over all queries; one of K hits those that look for a
single token, where it decides the word. Measured on lowrank in three trained models (benchmarks/targets.py: tale-llama,
tale-hard, tale-gqa; 6 budgets from a seventh to a quarter of kv f16; geometric means), this has 1.05, 0.61 and 0.93
times the KL divergence of the best of ten levels that are the same in all layers, known in hindsight. Counting scores
8 times (`--scores`) has 1.04, 0.99 and 1.17 times the divergence of 4 times, 16 times 1.51, 1.05 and 1.44.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slimrt.folding.readback import Reader
from slimrt.plumbing.units import parse_bytes

SCORES = 4


def loss(reader: Reader) -> float:
    """What a budget is spent on: expected squared relative error of attention's output, weighed as above."""
    wanted = reader.sample.output_energy
    return (SCORES * reader.score_error + reader.value_part) / wanted if wanted else 0.0


@dataclass(frozen=True)
class Offer:
    """A cache that a layer may have. bytes: a token of a long context. Others as `choose.Option`."""

    bytes: float
    loss: float
    mode: str
    type: str
    rank: int = 0
    residual_type: str = ""


def allocate(layers: Sequence[Sequence[Offer]], budget: float) -> list[Offer]:
    """Choose an offer for each layer, of all together at most `budget` bytes a token.

    Each layer begins with its cheapest one; then the exchange that lowers the loss most for its bytes is made, of those
    that fit, until none does. That walks along the convex hulls of all layers, and so is optimal but for the last step.

    Raises:
        ValueError: the cheapest ones take more; says how many.
    """
    chosen = [min(offers, key=lambda one: (one.bytes, one.loss)) for offers in layers]
    spent = sum(one.bytes for one in chosen)
    if spent > budget:
        raise ValueError(
            f"target_bytes allows {budget:.6g} bytes a token, and the least that these layers can have is {spent:.6g}"
        )
    while True:
        steps = [
            ((have.loss - one.loss) / (one.bytes - have.bytes), layer, one)
            for layer, (have, offers) in enumerate(zip(chosen, layers, strict=True))
            for one in offers
            if one.loss < have.loss and have.bytes < one.bytes <= have.bytes + budget - spent
        ]
        if not steps:
            return chosen
        _, layer, one = max(steps, key=lambda step: step[0])
        chosen[layer] = one
        spent = sum(one.bytes for one in chosen)


@dataclass(frozen=True)
class Budget:
    """What `target_bytes` says: bytes a token of the whole model, or how many times fewer than kv f16 has."""

    number: float
    times: bool

    @classmethod
    def of(cls, said: int | str) -> Budget:
        """From 600, "600", "1KiB" or "8x". ValueError: another text, or nothing above 0."""
        if isinstance(said, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*x\s*", said)):
            if float(match[1]) <= 0:
                raise ValueError(f"target_bytes must be above 0, got '{said}'")
            return cls(float(match[1]), True)
        try:
            return cls(parse_bytes(said), False)
        except ValueError:
            raise ValueError(
                f"target_bytes must be bytes a token, such as 600, or how many times fewer than kv f16, such as 8x; "
                f"got {said!r}"
            ) from None

    def bytes(self, kv_bytes: int) -> float:
        """Bytes a token. kv_bytes: of kv f16."""
        return kv_bytes / self.number if self.times else self.number
