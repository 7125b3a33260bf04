"""Times of words: Whisper's cross-attention, aligned by dynamic time warping."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slimrt.speech.pauses import Times, cut_at_sentences, usual_duration
from slimrt.speech.records import Word
from slimrt.speech.rules import SECONDS_PER_TIME
from slimrt.speech.vocabulary import WhisperTokens

Weights = NDArray[np.float32]
_FILTER = 7  # width of the median filter over time, in encoder positions of 20 ms
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")  # languages written without spaces between words
_OPENING = "\"'“¿([{-"  # belong to the word after them
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # belong to the word before them


class Aligner(Protocol):
    """The methods of core.Engine that alignment needs."""

    def truncate(self, sequence: int, length: int) -> None: ...
    def alignment(self, sequence: int, tokens: NDArray[np.int32], heads: Sequence[tuple[int, int]]) -> Weights: ...


@dataclass(frozen=True)
class Spoken:
    """A word with its tokens; times in seconds from the start of the window."""

    word: Word
    tokens: tuple[int, ...]


def spoken_words(
    engine: Aligner,
    sequence: int,
    tokens: WhisperTokens,
    heads: Sequence[tuple[int, int]],
    language: str,
    task: str,
    text: Sequence[int],
    probabilities: Sequence[float],
    n_frames: int,
) -> tuple[list[Spoken], float]:
    """The words of a window, and their usual duration in seconds.

    The text is fed through the decoder; the cross-attention of the alignment heads is normalised over the tokens,
    median-filtered over time and averaged; the cheapest monotonic path through it gives the time of each token (the
    method published with Radford et al.).

    Args:
        sequence: has the encoded window; it is left empty.
        language: of the sound.
        text: ids without timestamps and control tokens; probabilities: of each.
        n_frames: mel frames of sound in the window.
    """
    if not text:
        return [], 0.0
    prompt = [tokens.start, *tokens.instructions(language, task, False)]
    engine.truncate(sequence, 0)
    forced = np.array([*prompt, *text, tokens.end], np.int32)
    weights = engine.alignment(sequence, forced, list(heads))[:, :, : max(n_frames // 2, 1)]
    engine.truncate(sequence, 0)
    rows = token_times(weights, len(prompt) - 1, len(text) + 1)
    groups = split_words(tokens, text, "en" if task == "translate" else language)  # translations are English
    bounds = np.cumsum([0, *(len(ids) for _, ids in groups)]).tolist()
    begins = [float(rows[at]) * SECONDS_PER_TIME for at in bounds]
    times: Times = list(pairwise(begins))
    usual = usual_duration(times)
    cut = cut_at_sentences([word for word, _ in groups], times, usual)
    found = [
        Spoken(Word(word, start, end, float(np.mean(probabilities[at : at + len(ids)]))), tuple(ids))
        for (word, ids), (start, end), at in zip(groups, cut, bounds, strict=False)
    ]
    return merge_punctuation(found), usual


def token_times(weights: Weights, first: int, count: int) -> NDArray[np.int64]:
    """The encoder position at which each token begins, (count,).

    Args:
        weights: cross-attention after softmax over all encoder positions, (heads, tokens, positions with sound).
        first: index of the token that predicts the first one asked for; count: tokens asked for.
    """
    share = weights.astype(np.float64)
    share /= np.maximum(share.sum(axis=2, keepdims=True), 1e-30)  # renormalised over the positions with sound
    share -= share.mean(axis=1, keepdims=True)
    share /= np.maximum(share.std(axis=1, keepdims=True), 1e-30)
    matrix = median_filter(share, _FILTER).mean(axis=0)[first : first + count]
    token, row = warp(-matrix)
    begins = np.flatnonzero(np.diff(token, prepend=-1))
    return row[begins]


def median_filter(x: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Median of `width` neighbours along the last axis, mirrored at its ends; x unchanged if that is too short."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), axis=-1)


def warp(cost: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Dynamic time warping: the cheapest path from the first to the last cell of cost (n, m), by steps down, right, or
    diagonal.

    Returns:
        Row and column of each cell on it. The table is computed by antidiagonals, each of which depends only on
        earlier ones, at once.
    """
    n, m = cost.shape
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0.0
    step = np.zeros((n + 1, m + 1), np.int8)  # 0: diagonal, 1: down, 2: right
    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        before = np.stack((total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]))
        best = before.argmin(axis=0)
        total[i, j] = cost[i - 1, j - 1] + before[best, np.arange(len(i))]
        step[i, j] = best
    path = []
    i, j = n, m
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        i, j = i - (step[i, j] != 2), j - (step[i, j] != 1)
    rows, columns = np.array(path[::-1], np.int64).T
    return rows, columns


def split_words(tokens: WhisperTokens, text: Sequence[int], language: str) -> list[tuple[str, list[int]]]:
    """Group tokens into words; each token is in one. A group has whole characters; in languages with spaces a group
    that begins with neither a space nor punctuation continues the previous word."""
    groups: list[tuple[str, list[int]]] = []
    held: list[int] = []
    for id in text:
        held.append(id)
        piece = tokens.tokenizer.decode(held)
        if "\ufffd" not in piece:
            groups.append((piece, held))
            held = []
    if held:
        groups.append((tokens.tokenizer.decode(held), held))
    if language in _WITHOUT_SPACES:
        return groups
    words: list[tuple[str, list[int]]] = []
    for piece, ids in groups:
        if not words or piece.startswith(" ") or piece.strip() in string.punctuation:
            words.append((piece, ids))
        else:
            words[-1] = (words[-1][0] + piece, words[-1][1] + ids)
    return words


def merge_punctuation(words: Sequence[Spoken]) -> list[Spoken]:
    """Merge opening marks into the next word and closing marks into the previous one; the word's times are kept."""
    merged: list[Spoken] = []
    opening: list[Spoken] = []
    for spoken in words:
        text = spoken.word.word
        if text.startswith(" ") and text.strip() in _OPENING:
            opening.append(spoken)
        elif text in _CLOSING and merged and not opening and not merged[-1].word.word.endswith(" "):
            merged[-1] = _joined(merged[-1], spoken, merged[-1])
        else:
            for mark in reversed(opening):
                spoken = _joined(mark, spoken, spoken)
            opening = []
            merged.append(spoken)
    return merged + opening


def _joined(left: Spoken, right: Spoken, timed: Spoken) -> Spoken:
    word = replace(timed.word, word=left.word.word + right.word.word)
    return Spoken(word, left.tokens + right.tokens)
