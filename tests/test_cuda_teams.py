# SPDX-License-Identifier: Apache-2.0
"""How blocks of a team wait for each other (absorbed_kernel.cuh), in every order that threads may come in.

Blocks overwrite what they sent without asking whether it was read: as many slots as there are make that safe. Here all
orders are gone through of two blocks, each with some score warps and a product warp. A word or a part that comes late
is only waited for longer, since a word bears its round and parts are counted with acquire and release (in a cluster the
bytes of both are); so what is asked is whether anything is overwritten before it is read, read before it is there,
taken for what an earlier round left, or waited for by everyone.
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


class Heads(NamedTuple):
    """Scores that a block reads head by head: one head, whose tiles `phases` warps take in turn. Of each block a state
    says where those are, three steps a tile (it is full; its weights are relative to what the tile before left; they
    are sent), and which tiles of each block it has fetched and multiplied.
    """

    tiles: int  # of the sequence
    ring: int  # tiles, or stages, that scores may be ahead of products
    slots: int  # for weights
    phases: int
    turns: int  # barriers at which tiles come one after the other

    class State(NamedTuple):
        at: tuple[tuple[int, ...], ...]
        fetched: tuple[tuple[int, ...], ...]
        done: tuple[int, ...]

    def first(self) -> State:
        return self.State(((0,) * self.phases,) * BLOCKS, ((0,) * BLOCKS,) * BLOCKS, (0,) * BLOCKS)

    def passed(self, state: State, block: int, tile: int, step: int) -> bool:
        return state.at[block][tile % self.phases] > 3 * (tile // self.phases) + step

    @staticmethod
    def waits(completed: int, round: int, what: str) -> bool:
        """For a round of a barrier, of which a thread sees whether it is odd."""
        passes = completed % 2 != round % 2
        if passes and completed <= round:
            raise Wrong(f"an earlier round is taken for {what}")
        return not passes

    def score(self, state: State, block: int, phase: int) -> bool:
        """Whether a warp can take its next step."""
        own, step = divmod(state.at[block][phase], 3)
        tile = own * self.phases + phase
        if tile >= self.tiles:
            return False
        if step == 0:
            full = min(state.done[block] + self.ring, self.tiles)  # tiles that were ever brought
            in_stage = len(range(tile % self.ring, full, self.ring))
            return not self.waits(in_stage, tile // self.ring, "a full stage")
        if step == 1 and tile > 0:
            before = range((tile - 1) % self.turns, self.tiles, self.turns)
            ended = sum(self.passed(state, block, other, 1) for other in before)
            return not self.waits(ended, (tile - 1) // self.turns, "the turn of a tile")
        if step == 2 and any(of[block] <= tile - self.slots for of in state.fetched):
            raise Wrong(f"weights of tile {tile - self.slots} are overwritten")
        return True

    def next(self, state: State) -> Iterator[State]:
        for block in range(BLOCKS):
            for phase in range(self.phases):
                if self.score(state, block, phase):
                    at = _set(state.at[block], phase, state.at[block][phase] + 1)
                    yield state._replace(at=_set(state.at, block, at))
            tile = state.done[block]
            if tile == self.tiles:
                continue
            for other in range(BLOCKS):
                if state.fetched[block][other] == tile and self.passed(state, other, tile, 2):
                    fetched = _set(state.fetched, block, _set(state.fetched[block], other, tile + 1))
                    yield state._replace(fetched=fetched)
            if min(state.fetched[block]) > tile:
                yield state._replace(done=_set(state.done, block, tile + 1))


class State(NamedTuple):
    """Of each block: where its score warps are, four steps a tile; tiles fetched from each block, and multiplied."""

    scores: tuple[tuple[int, ...], ...]
    fetched: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]


class WholeRows(NamedTuple):
    """Scores of whole rows: blocks send their parts of a tile's, a tile ahead of the softmax."""

    tiles: int  # of the sequence
    ring: int  # tiles, or stages, that scores may be ahead of products
    slots: int  # for weights
    part_slots: int  # for parts of scores

    def first(self) -> State:
        return State(((0,) * WARPS,) * BLOCKS, ((0,) * BLOCKS,) * BLOCKS, (0,) * BLOCKS)

    def passed(self, state: State, block: int, tile: int, step: int) -> bool:
        """Whether all score warps of a block are past a step of a tile."""
        return all(at > 4 * tile + step for at in state.scores[block])

    def sent(self, state: State, block: int) -> int:
        """Tiles whose weights all warps of a block have sent; parts make them a tile late."""
        return min(at // 4 for at in state.scores[block]) - 1

    def score(self, state: State, block: int, warp: int) -> bool:
        """Whether a score warp can take its next step. 0: receives a tile; 1, 2: has met the others twice, and sends
        parts; 3: softmax, and sends weights."""
        tile, step = divmod(state.scores[block][warp], 4)
        if tile == self.tiles:
            return step == 3 and self.softmax_of_parts(state, block, tile - 1)
        if step == 0:
            return tile < state.done[block] + self.ring
        if step < 3:
            if not self.passed(state, block, tile, step - 1):
                return False
            if step == 2:
                self.send_parts(state, tile)
            return True
        return tile == 0 or self.softmax_of_parts(state, block, tile - 1)

    def send_parts(self, state: State, tile: int) -> None:
        old = tile - self.part_slots  # its softmax is step 3 of the tile after it
        if old >= 0 and not all(self.passed(state, owner, old + 1, 3) for owner in range(BLOCKS)):
            raise Wrong(f"parts of tile {old} are overwritten")

    def softmax_of_parts(self, state: State, block: int, tile: int) -> bool:
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
                    if at == 4 * self.tiles:  # the last turn has the softmax alone
                        at += 3
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


def explore(team: Heads | WholeRows) -> int:
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


@pytest.mark.parametrize(("ring", "phases"), [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)])
def test_weights_are_read_before_they_are_overwritten(ring, phases):
    assert explore(Heads(slots_of(ring) + 2, ring, slots_of(ring), phases, turns=phases)) > 50


@pytest.mark.parametrize("ring", [2, 3])
def test_so_are_parts_of_scores(ring):
    team = WholeRows(tiles=part_slots() + 2, ring=ring, slots=slots_of(ring), part_slots=part_slots())
    assert explore(team) > 1000


@pytest.mark.parametrize(
    ("team", "what"),
    [
        (Heads(tiles=6, ring=2, slots=2, phases=2, turns=2), "weights of tile . are overwritten"),
        # Warps that take more tiles in turn than there are stages see the barrier of a stage two rounds late.
        (Heads(tiles=8, ring=2, slots=4, phases=3, turns=3), "an earlier round is taken for a full stage|all wait"),
        (Heads(tiles=8, ring=3, slots=6, phases=3, turns=1), "an earlier round is taken for the turn|all wait"),
        (WholeRows(tiles=6, ring=2, slots=4, part_slots=1), "parts of tile . are"),
        # The reason why fill_memory() wants three stages there, of which one is filled a tile late.
        (WholeRows(tiles=6, ring=1, slots=4, part_slots=4), "all wait"),
    ],
)
def test_less_would_not_do(team, what):
    with pytest.raises(Wrong, match=what):
        explore(team)
