# SPDX-License-Identifier: Apache-2.0
"""How blocks of a team wait for each other (absorbed_kernel.cuh), in every order that threads may come in.

Blocks overwrite what they sent without asking whether it was read: as many slots as there are make that safe. Here all
orders are gone through of two blocks, each with two score warps and a product warp. A word or a part that comes late is
only waited for longer, since a word bears its round and parts are counted with acquire and release (in a cluster the
bytes of both are); so what is asked is whether anything is overwritten before it is read, read before it is there, or
waited for by everyone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).parent.parent / "csrc" / "kernels" / "cuda"
BLOCKS = WARPS = 2

pytestmark = pytest.mark.unsanitized  # a model of the protocol


class Wrong(Exception):
    pass


class State(NamedTuple):
    """Of each block: where its score warps are, four steps a tile; tiles fetched from each block, and multiplied."""

    scores: tuple[tuple[int, ...], ...]
    fetched: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]


class Team(NamedTuple):
    tiles: int  # of the sequence
    ring: int  # tiles, or stages, that scores may be ahead of products
    slots: int  # for weights
    part_slots: int  # for parts of scores; 0: scores are of heads, and nobody needs parts

    def first(self) -> State:
        return State(((0,) * WARPS,) * BLOCKS, ((0,) * BLOCKS,) * BLOCKS, (0,) * BLOCKS)

    def passed(self, state: State, block: int, tile: int, step: int) -> bool:
        """Whether all score warps of a block are past a step of a tile."""
        return all(at > 4 * tile + step for at in state.scores[block])

    def sent(self, state: State, block: int) -> int:
        """Tiles whose weights all warps of a block have sent; parts make them a tile late."""
        return min(at // 4 for at in state.scores[block]) - (1 if self.part_slots else 0)

    def score(self, state: State, block: int, warp: int) -> bool:
        """Whether a score warp can take its next step. 0: receives a tile; 1, 2: has met the others twice, and sends
        parts; 3: softmax, and sends weights."""
        tile, step = divmod(state.scores[block][warp], 4)
        if tile == self.tiles:
            return self.part_slots > 0 and step == 3 and self.soften(state, block, tile - 1)
        if step == 0:
            return tile < state.done[block] + self.ring
        if step < 3:
            if not self.passed(state, block, tile, step - 1):
                return False
            if step == 2 and self.part_slots:
                self.send_parts(state, tile)
            return True
        if self.part_slots:
            return tile == 0 or self.soften(state, block, tile - 1)
        self.send_weights(state, block, tile)
        return True

    def send_parts(self, state: State, tile: int) -> None:
        old = tile - self.part_slots  # softened in the step 3 of the tile after it
        if old >= 0 and not all(self.passed(state, owner, old + 1, 3) for owner in range(BLOCKS)):
            raise Wrong(f"parts of tile {old} are overwritten")

    def soften(self, state: State, block: int, tile: int) -> bool:
        in_slot = range(tile % self.part_slots, self.tiles, self.part_slots)
        have = sum(at > 4 * other + 2 for other in in_slot for warps in state.scores for at in warps)
        if have < BLOCKS * WARPS * (tile // self.part_slots + 1):
            return False
        if not all(self.passed(state, other, tile, 2) for other in range(BLOCKS)):
            raise Wrong(f"parts of tile {tile} are read before they are there")
        self.send_weights(state, block, tile)
        return True

    def send_weights(self, state: State, block: int, tile: int) -> None:
        if any(of[block] <= tile - self.slots for of in state.fetched):
            raise Wrong(f"weights of tile {tile - self.slots} are overwritten")

    def next(self, state: State) -> Iterator[State]:
        for block in range(BLOCKS):
            for warp in range(WARPS):
                if state.scores[block][warp] < 4 * self.tiles + 4 and self.score(state, block, warp):
                    at = state.scores[block][warp] + 1
                    if at == 4 * self.tiles:  # the last turn has the softmax alone, if any
                        at += 3 if self.part_slots else 4
                    yield state._replace(scores=_set(state.scores, block, _set(state.scores[block], warp, at)))
            tile = state.done[block]
            if tile == self.tiles:
                continue
            for other in range(BLOCKS):
                if state.fetched[block][other] == tile and self.sent(state, other) > tile:
                    fetched = _set(state.fetched, block, _set(state.fetched[block], other, tile + 1))
                    yield state._replace(fetched=fetched)
            if min(state.fetched[block]) > tile:
                yield state._replace(done=_set(state.done, block, tile + 1))


def _set(of: tuple, i: int, value: object) -> tuple:
    return (*of[:i], value, *of[i + 1 :])


def explore(team: Team) -> int:
    """How many states there are. Raises Wrong."""
    seen, ahead = {team.first()}, [team.first()]
    while ahead:
        state = ahead.pop()
        after = list(team.next(state))
        if not after and min(state.done) < team.tiles:
            raise Wrong(f"all wait: {state}")
        ahead += (new for new in set(after) - seen)
        seen.update(after)
    return len(seen)


def slots_of(ring: int) -> int:
    return int(re.search(r"at\.slots = (\d+) \* tiles;", (SOURCES / "absorbed.cu").read_text())[1]) * ring


def part_slots() -> int:
    return int(re.search(r"kPartSlots = (\d+);", (SOURCES / "absorbed_plan.h").read_text())[1])


@pytest.mark.parametrize("ring", [1, 2])
def test_weights_are_read_before_they_are_overwritten(ring):
    assert explore(Team(tiles=slots_of(ring) + 2, ring=ring, slots=slots_of(ring), part_slots=0)) > 1000


@pytest.mark.parametrize("ring", [2, 3])
def test_so_are_parts_of_scores(ring):
    assert explore(Team(tiles=part_slots() + 2, ring=ring, slots=slots_of(ring), part_slots=part_slots())) > 1000


@pytest.mark.parametrize(
    ("team", "what"),
    [
        (Team(tiles=6, ring=2, slots=2, part_slots=0), "weights of tile . are overwritten"),
        (Team(tiles=6, ring=2, slots=4, part_slots=1), "parts of tile . are"),
        # The reason why fill_memory() wants three stages there, of which one is filled a tile late.
        (Team(tiles=6, ring=1, slots=4, part_slots=4), "all wait"),
    ],
)
def test_less_would_not_do(team, what):
    with pytest.raises(Wrong, match=what):
        explore(team)
