"""Host memory of a server beside its engine: the logits and masks of a step, and requests and their answers."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY = 4 << 20
"""Most bytes of a request."""

MAX_SOUND = 25 << 20
"""Most bytes of a request with audio."""

QUEUE = 4
"""Default number of waiting texts for each text that is generated at once."""

ROWS_OF_A_TEXT = 8
"""Most rows of logits of one text in a step: each draft token that is verified has one."""

ROWS_OF_A_PIECE = 64
"""Rows of logits of a piece of a prompt that is scored; only one prompt is scored at a time."""

SOUND_SECONDS = 3600
"""Longest sound."""

SCORE = 640
"""Most bytes of a log probability of a prompt's token: as an object, in the answer, and in its JSON."""

_SOUND = SOUND_SECONDS * (16000 * 4 * 9 // 8 + 100 * 128 * 4) + (40 << 20)
# Bytes of the longest sound: samples in a buffer that grows, frames of 128 mel channels, and a resampler's filters.
_FORECAST, _PATH = 128, 16  # bytes of a quantile of a step, as numbers and in JSON; of a step of a sample path
_SAMPLER = 20  # bytes of sampling buffers of a thread for each token of the vocabulary


@dataclass(frozen=True)
class ServerSizes:
    """Most bytes on the host.

    Attributes:
        logits: float32 rows of logits of a step, twice: as the engine returns them, and gathered for sampling; and the
            sampling buffers of each thread.
        masks: grammar masks, one bit per token of the vocabulary: of each text, and gathered for a step.
        queue: bodies of all accepted requests; a body is not read before its request has a place in the queue. Scores
            of prompts and forecasts take places of their own (Places.hold). Also the sounds that are heard at once.
    """

    logits: int
    masks: int
    queue: int

    @classmethod
    def of(
        cls, n_vocab: int, n_seqs: int, n_threads: int, max_queue: int, *, sounds: bool, drafts: bool
    ) -> ServerSizes:
        """Sizes of a server that generates n_seqs texts at once. sounds: requests may contain audio. drafts: there is a
        draft model, with a row of logits for each text."""
        rows = n_seqs * ROWS_OF_A_TEXT + ROWS_OF_A_PIECE
        words = (n_vocab + 31) // 32
        return cls(
            logits=(2 * rows + drafts * n_seqs) * n_vocab * 4 + n_threads * n_vocab * _SAMPLER,
            masks=2 * n_seqs * words * 4,
            queue=places(n_seqs, max_queue) * (MAX_SOUND if sounds else MAX_BODY) + sounds * n_seqs * _SOUND,
        )

    @property
    def total(self) -> int:
        return self.logits + self.masks + self.queue


def places(parallel: int, max_queue: int | None) -> int:
    """Most texts that are generated or wait. max_queue: most that wait; None: QUEUE for each of `parallel`."""
    return parallel + (QUEUE * parallel if max_queue is None else max_queue)


def forecast_bytes(steps: int, levels: int, paths: int) -> int:
    """Most bytes of a forecast of so many steps, over all series: of quantiles at these levels, from sample paths."""
    return steps * (levels * _FORECAST + paths * _PATH)
