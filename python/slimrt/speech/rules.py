"""What Whisper may say next: the published rules of its decoding, as changes of a row of logits."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from slimrt.generation.search import Logits
from slimrt.plumbing.numbers import log_normaliser
from slimrt.speech.vocabulary import WhisperTokens

SECONDS_PER_TIME = 0.02  # from one timestamp token to the next
FRAMES_PER_TIME = 2  # mel frames of the same

Ranges = tuple[tuple[int, int], ...]  # [first, end) of ids


class WhisperRules:
    """Whisper's rules for the next token (Radford et al. 2022, section 4.5, and the decoding code published with it).

    Suppressed tokens never come, some of them only not at the beginning; no control but <|endoftext|> ever does. With
    timestamps: the first token is a time, at most max_initial seconds; times come in pairs (the end of a segment and
    the beginning of the next) with text between; they never go back, and a segment has a length; where all times
    together are likelier than the likeliest text, it is a time.

    Args:
        suppress, begin_suppress: ids; begin_suppress None: a lone space, and the end.
    """

    def __init__(
        self,
        tokens: WhisperTokens,
        n_vocab: int,
        *,
        timestamps: bool,
        suppress: Iterable[int] = (),
        begin_suppress: Iterable[int] | None = None,
        max_initial: float | None = 1.0,
    ):
        first_time = n_vocab if tokens.timestamps is None else tokens.timestamps
        controls = range(tokens.end + 1, first_time if timestamps else n_vocab)
        never = {id for id in suppress if 0 <= id < n_vocab and id != tokens.end} | set(controls)
        at_start = (*tokens.blank, tokens.end) if begin_suppress is None else begin_suppress
        self._never = np.array(sorted(never), np.int64)
        self._at_start = tuple((id, id + 1) for id in at_start if 0 <= id < n_vocab)
        self._times = timestamps and tokens.timestamps is not None
        self._n_vocab, self._first_time, self._end = n_vocab, first_time, tokens.end
        self._max_initial = None if max_initial is None else round(max_initial / SECONDS_PER_TIME)
        self._masked: tuple[Ranges, NDArray[np.uint32]] | None = None

    def __call__(self, row: Logits, tokens: Sequence[int]) -> None:
        """Change a row of logits (vocab,) in place, given the tokens of this window so far."""
        ranges, joint = self._ruled_out(tokens)
        row[self._never] = -np.inf
        for start, stop in ranges:
            row[start:stop] = -np.inf
        times = row[self._first_time :]
        if joint and np.isfinite(times.max(initial=-np.inf)) and log_normaliser(times) > row[: self._first_time].max():
            row[: self._first_time] = -np.inf

    def may(self, tokens: Sequence[int]) -> tuple[NDArray[np.uint32], int]:
        """The same as a Decode's mask and joint_from, which leave what __call__ leaves."""
        ranges, joint = self._ruled_out(tokens)
        if self._masked is None or self._masked[0] != ranges:  # from one time to the next it is the same
            allowed = np.zeros((self._n_vocab + 31) // 32 * 32, bool)
            allowed[: self._n_vocab] = True
            allowed[self._never] = False
            for start, stop in ranges:
                allowed[start:stop] = False
            self._masked = ranges, np.packbits(allowed, bitorder="little").view("<u4")
        return self._masked[1], self._first_time if joint else self._n_vocab

    def _ruled_out(self, tokens: Sequence[int]) -> tuple[Ranges, bool]:
        """Ranges of ids that must not come now, and whether all times together compete with the likeliest text."""
        first = self._first_time
        if not self._times:
            return (() if tokens else self._at_start), False
        if not tokens:
            late = self._n_vocab if self._max_initial is None else first + self._max_initial + 1
            return ((0, first), (late, self._n_vocab)), False
        after_time = tokens[-1] >= first
        if after_time and (len(tokens) < 2 or tokens[-2] >= first):  # a segment has begun: its text comes
            return ((first, self._n_vocab),), False
        ranges = [(0, self._end)] if after_time else []  # a segment has ended: maybe the next begins, or it is the end
        last = next((token for token in reversed(tokens) if token >= first), None)
        if last is not None:
            ranges.append((first, last if after_time else last + 1))
        return tuple(ranges), True


def compression_ratio(text: str) -> float:
    """Bytes of a text over those it compresses to: high where it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def pieces(
    tokens: Sequence[int], first_time: int | None, n_frames: int, *, whole: bool = False
) -> tuple[list[tuple[float, float, list[int]]], int]:
    """The segments of a window, (start, end, tokens) in seconds from its beginning, and the frames that are done.

    Where a pair of times ends the last whole segment, the next window begins there: what follows was cut off. A single
    time at the end says that nothing more is spoken in this window.

    Args:
        tokens: of the window; first_time: <|0.00|>, None where no times are told.
        n_frames: mel frames of sound in the window.
        whole: no window hears again what was cut off: it is a segment too.
    """
    times = [first_time is not None and token >= first_time for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    if first_time is None or not cuts:
        told = [
            (token - (first_time or 0)) * SECONDS_PER_TIME for token, time in zip(tokens, times, strict=True) if time
        ]
        start = told[0] if told and times[0] else 0.0
        end = told[-1] if told and told[-1] > start else n_frames / FRAMES_PER_TIME * SECONDS_PER_TIME
        return [(start, max(start, end), list(tokens))], n_frames
    complete = times[-2:] == [False, True]
    found, start = [], 0
    for cut in [*cuts, len(tokens)] if complete else cuts:
        part = list(tokens[start:cut])
        found.append(((part[0] - first_time) * SECONDS_PER_TIME, (part[-1] - first_time) * SECONDS_PER_TIME, part))
        start = cut
    if whole and not complete:
        rest = list(tokens[start:])
        begin = (rest[0] - first_time) * SECONDS_PER_TIME
        found.append((begin, max(begin, n_frames / FRAMES_PER_TIME * SECONDS_PER_TIME), rest))
        return found, n_frames
    done = n_frames if complete else (tokens[start - 1] - first_time) * FRAMES_PER_TIME
    return found, done
