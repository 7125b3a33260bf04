"""What a step of the loop computes for one ticket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimrt.generation.search import Append, Decode, Read
from slimrt.generation.sequences import Report, Sequences
from slimrt.generation.tickets import Call, Ticket

FEW = 8  # tokens of a sequence up to which a step costs little more than with one: more count as a prompt


class Part:
    """What a step computes for a ticket: items (sequence, tokens), including tokens whose rows were given up.

    Attributes:
        few: at most FEW tokens for each sequence, so no prompt. whole: it is all that the ticket wants.
        before: cached rows of the first sequence. states: it wants hidden states, not logits.
        scores: it wants logits of every token.
    """

    def __init__(self, ticket: Ticket[Any], engine: Sequences):
        self.ticket, self.whole = ticket, True
        self.items = self.all_items = [(of, [*engine.missing(of), *ids]) for of, ids in ticket.left]
        self.few = all(len(ids) <= FEW for _, ids in self.items)
        self.before = engine.stored(ticket.left[0][0])
        self._lacked = len(self.items[0][1]) - len(ticket.left[0][1])
        reads = ticket.wants if isinstance(ticket.wants, Read) else None
        self.states = reads is not None and reads.states
        self.scores = reads is not None and not reads.states
        if reads is not None and not reads.states:
            self.cut(reads.most)

    @property
    def outputs(self) -> list[int]:
        """Rows of logits or states wanted from each item."""
        wish = self.ticket.wants
        if isinstance(wish, Read):
            return [max(len(self) - self._lacked, 0)]
        return [(wish.outputs if isinstance(wish, Append) else 1) if self.whole else 0] * len(self.items)

    def n_deciding(self, n_vocab: int) -> int:
        """How many of the likeliest tokens decide what is wanted; 0: all of them may."""
        wish = self.ticket.wants
        if not isinstance(wish, Decode) or wish.logprobs or wish.mask is not None or wish.joint_from >= 0:
            return 0
        return wish.sampler.n_deciding(n_vocab)

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.items)

    def cut(self, n: int) -> None:
        """Compute only the first n tokens in this step; parts of several sequences stay whole."""
        if len(self.all_items) == 1 and n < len(self):
            (of, ids), self.whole = self.all_items[0], False
            self.items = [(of, ids[:n])]

    def take(self, logits: Any, at: int) -> int:
        """Take this part's rows of `logits`, which begin at row `at`. Returns the first row after them."""
        n, reads = sum(self.outputs), isinstance(self.ticket.wants, Read)
        if self.whole or n > 0:
            self.ticket.left, self.ticket.answer = [], logits[at : at + n]
            self.ticket.answered = reads or isinstance(self.ticket.wants, Append)
        else:
            (of, ids), (_, wanted) = self.items[0], self.ticket.left[0]
            self.ticket.left = [(of, wanted[max(len(ids) - self._lacked, 0) :])]
        return at + n


def told_to_all(parts: Sequence[Part], calls: set[Call]) -> Report | None:
    """A progress callback that reports to each call its share; an exception from the only call stops the step."""
    totals = {call: sum(len(part) for part in parts if part.ticket.call is call) for call in calls}
    n_items, everything = sum(len(part.items) for part in parts), sum(totals.values())
    if n_items == everything:  # one token for each sequence: too short to report
        return None

    def report(done: int, total: int) -> None:
        for call, own in totals.items():
            call.report(done * own // total, own)
            if call.failure is not None and len(totals) == 1:
                raise call.failure

    return report
