"""What a server takes beside its engine: the logits and masks of a step, and the requests that wait."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY = 4 << 20
"""Bytes of a request."""

MAX_SOUND = 25 << 20
"""Bytes of a request with a sound."""

QUEUE = 4
"""Texts that may wait, for each that is made, unless told otherwise."""

ROWS_OF_A_TEXT = 8
"""Rows of logits of one text in a step, at most: where its next tokens were guessed each of them has one."""

ROWS_OF_A_PIECE = 64
"""Rows of logits of a piece of a prompt that is scored; one prompt at a time is."""

_SAMPLER = 20  # bytes that a thread keeps for each token of the vocabulary, to choose one


@dataclass(frozen=True)
class ServerSizes:
    """Bytes, at most, on the host.

    Attributes:
        logits: float32 rows of all that a step of the loop may want, twice: as the engine gives them and put together
            for those that choose; and what choosing takes on each thread.
        masks: bits of the vocabulary for each text, and put together for a step.
        queue: bodies of requests that were taken on, none of which is read before it has a place.
    """

    logits: int
    masks: int
    queue: int

    @classmethod
    def of(
        cls, n_vocab: int, n_seqs: int, n_threads: int, max_queue: int, *, sounds: bool, drafts: bool
    ) -> ServerSizes:
        """Of a server that makes n_seqs texts at once. sounds: it may be sent some. drafts: a model drafts for them,
        with a row of logits for each."""
        rows = n_seqs * ROWS_OF_A_TEXT + ROWS_OF_A_PIECE
        words = (n_vocab + 31) // 32
        return cls(
            logits=(2 * rows + drafts * n_seqs) * n_vocab * 4 + n_threads * n_vocab * _SAMPLER,
            masks=2 * n_seqs * words * 4,
            queue=places(n_seqs, max_queue) * (MAX_SOUND if sounds else MAX_BODY),
        )

    @property
    def total(self) -> int:
        return self.logits + self.masks + self.queue


def places(parallel: int, max_queue: int | None) -> int:
    """Texts that may be under way or wait. max_queue: None: QUEUE for each that is made."""
    return parallel + (QUEUE * parallel if max_queue is None else max_queue)
