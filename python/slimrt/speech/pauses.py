"""Corrects the times of words next to pauses, as openai/whisper does: dynamic time warping adds a pause to a word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LONGEST_USUAL = 0.7  # seconds, limit of the usual duration: a longer median comes from pauses
_SENTENCE_ENDS = ".。!！?？"
_APART = 0.5  # seconds by which a word may exceed its segment

Times = list[tuple[float, float]]
"""Start and end of words, seconds."""


def usual_duration(times: Times) -> float:
    """The median duration of the words with a duration above 0, at most 0.7 s; 0.0 without any."""
    durations = [end - start for start, end in times if end > start]
    return min(float(np.median(durations)), _LONGEST_USUAL) if durations else 0.0


def cut_at_sentences(words: Sequence[str], times: Times, usual: float) -> Times:
    """Limit sentence-ending marks, and words after them, to twice the usual duration. Marks are words of their own
    here, since they are not merged yet."""
    result = list(times)
    for i, (start, end) in enumerate(times):
        if i == 0 or end - start <= 2 * usual:
            continue
        if words[i] in _SENTENCE_ENDS:
            result[i] = start, start + 2 * usual
        elif words[i - 1] in _SENTENCE_ENDS:
            result[i] = end - 2 * usual, end
    return result


def cut_at_segment(times: Times, start: float, end: float, before: float, usual: float) -> Times:
    """Limit the words of a segment: after a pause the first two to twice the usual duration each; and no word may
    exceed the segment by much.

    Args:
        start, end: of the segment. before: end of the last word of the previous segment.
    """
    if not times:
        return []
    begins, ends = map(list, zip(*times, strict=True))
    longest, several = 2 * usual, len(times) > 1
    long = ends[0] - begins[0] > longest or (several and ends[1] - begins[0] > 2 * longest)
    if ends[0] - before > 4 * usual and long:
        if several and ends[1] - begins[1] > longest:
            ends[0] = begins[1] = max(ends[1] / 2, ends[1] - longest)
        begins[0] = max(0.0, ends[0] - longest)
    if begins[0] + _APART < start < ends[0]:
        begins[0] = max(0.0, min(ends[0] - usual, start))
    if begins[-1] < end < ends[-1] - _APART:
        ends[-1] = max(begins[-1] + usual, end)
    return list(zip(begins, ends, strict=True))
