"""Whisper's decoding rules, applied to rows of logits."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from slimrt.generation.search import Logits
from slimrt.plumbing.numbers import log_normaliser
from slimrt.speech.vocabulary import WhisperTokens

SECONDS_PER_TIME = 0.02  # between two timestamp tokens
FRAMES_PER_TIME = 2  # the same in mel frames

Ranges = tuple[tuple[int, int], ...]  # [first, end) of ids


class WhisperRules:
    """The rules for the next token (Radford et al. 2022, section 4.5, and the decoding code published with it).

    Suppressed tokens never come, some of them not at the beginning only; of the control tokens only <|endoftext|> may
    come. With timestamps: the first token is a timestamp, of at most max_initial seconds; timestamps come in pairs (the
    end of a segment and the start of the next) with text between; they never decrease, and segments are not empty; if
    all timestamps together are more likely than the most likely text token, a timestamp comes.

    Args:
        suppress, begin_suppress: ids; begin_suppress None: a lone space, and <|endoftext|>.
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
        """Apply the rules to a row of logits (vocab,) in place, given the tokens of this window so far."""
        ranges, joint = self._ruled_out(tokens)
        row[self._never] = -np.inf
        for start, stop in ranges:
            row[start:stop] = -np.inf
        times = row[self._first_time :]
        if joint and np.isfinite(times.max(initial=-np.inf)) and log_normaliser(times) > row[: self._first_time].max():
            row[: self._first_time] = -np.inf

    def may(self, tokens: Sequence[int]) -> tuple[NDArray[np.uint32], int]:
        """The same rules as a mask and joint_from for a Decode request."""
        ranges, joint = self._ruled_out(tokens)
        if self._masked is None or self._masked[0] != ranges:  # the mask only changes at timestamps
            allowed = np.zeros((self._n_vocab + 31) // 32 * 32, bool)
            allowed[: self._n_vocab] = True
            allowed[self._never] = False
            for start, stop in ranges:
                allowed[start:stop] = False
            self._masked = ranges, np.packbits(allowed, bitorder="little").view("<u4")
        return self._masked[1], self._first_time if joint else self._n_vocab

    def _ruled_out(self, tokens: Sequence[int]) -> tuple[Ranges, bool]:
        """Ranges of ids that are not allowed now, and whether all timestamps together compete with the text."""
        first = self._first_time
        if not self._times:
            return (() if tokens else self._at_start), False
        if not tokens:
            late = self._n_vocab if self._max_initial is None else first + self._max_initial + 1
            return ((0, first), (late, self._n_vocab)), False
        after_time = tokens[-1] >= first
        if after_time and (len(tokens) < 2 or tokens[-2] >= first):  # a segment has just begun: text must come
            return ((first, self._n_vocab),), False
        ranges = [(0, self._end)] if after_time else []  # a segment has just ended: a timestamp or <|endoftext|> comes
        last = next((token for token in reversed(tokens) if token >= first), None)
        if last is not None:
            ranges.append((first, last if after_time else last + 1))
        return tuple(ranges), True


def compression_ratio(text: str) -> float:
    """Length of a text in bytes / its compressed length: high for repetitive text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def pieces(
    tokens: Sequence[int], first_time: int | None, n_frames: int, *, whole: bool = False
) -> tuple[list[tuple[float, float, list[int]]], int]:
    """The segments of a window, (start, end, tokens) with seconds from its start, and the mel frames that are done.

    If a pair of timestamps ends the last complete segment, the next window begins there, since what follows was cut
    off. A single timestamp at the end means that no speech follows in this window.

    Args:
        tokens: of the window; first_time: id of <|0.00|>, None without timestamps.
        n_frames: mel frames of sound in the window.
        whole: the next window does not begin there, so that what was cut off becomes a segment too.
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
