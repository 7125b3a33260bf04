# SPDX-License-Identifier: Apache-2.0
"""Distributing a budget of bytes per token over the layers of a model, such that a weighted sum of errors is minimal.

Minimised is the sum over layers of the squared relative error of attention's output, in which the part that comes
through the scores counts SCORES times (`loss`): an error of V is spread over all queries, while one of K mostly affects
queries that look for a single token, where it decides the next word. Measured for lowrank in three trained models
(benchmarks/targets.py: tale-llama, tale-hard, tale-gqa; 6 budgets from a seventh to a quarter of kv f16; geometric
means), the KL divergence is 1.05, 0.61 and 0.93 times that of the best of ten choices of levels that are the same in
all layers, selected in hindsight. A weight of 8 (`--scores`) gives 1.04, 0.99 and 1.17 times the divergence of a weight
of 4; 16 gives 1.51, 1.05 and 1.44 times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slimrt.folding.readback import Reader
from slimrt.plumbing.units import parse_bytes

SCORES = 4


def loss(reader: Reader) -> float:
    """The quantity minimised: expected squared relative error of attention's output, weighted as above."""
    wanted = reader.sample.output_energy
    return (SCORES * reader.score_error + reader.value_part) / wanted if wanted else 0.0


@dataclass(frozen=True)
class Offer:
    """A cache that a layer may have. bytes: per token of a long context. Others as `choose.Option`."""

    bytes: float
    loss: float
    mode: str
    type: str
    rank: int = 0
    residual_type: str = ""


def allocate(layers: Sequence[Sequence[Offer]], budget: float) -> list[Offer]:
    """Choose an offer for each layer, such that their bytes per token sum to at most `budget`.

    Greedy: each layer starts with its cheapest offer; then, of all exchanges of one layer's offer that fit the budget,
    the one with the largest decrease of loss per byte is made, until none fits. This follows the convex hulls of all
    layers, and is therefore optimal except for the last step.

    Raises:
        ValueError: the cheapest offers exceed the budget; the message says what they take.
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
    """The value of `target_bytes`: bytes per token of the whole model, or (`times`) a factor below those of kv f16."""

    number: float
    times: bool

    @classmethod
    def of(cls, said: int | str) -> Budget:
        """Parse 600, "600", "1KiB" or "8x". ValueError: another text, or not above 0."""
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
        """The budget in bytes per token. kv_bytes: bytes per token of kv f16."""
        return kv_bytes / self.number if self.times else self.number
