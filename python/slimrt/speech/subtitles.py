"""Segments as text, SubRip (.srt), WebVTT (.vtt), tables (.tsv, .csv) and lyrics (.lrc)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

from slimrt.speech.records import Segment, Word


@dataclass(frozen=True)
class Cue:
    """What is shown at a time. number: from 1; words: empty where their times are not told."""

    number: int
    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Format:
    """A way to write cues.

    Attributes:
        head: what a file begins with. cue: one cue.
        timed: it tells times. tagged: it has tags for the times of words within a cue; else each word is a cue.
    """

    head: str
    cue: Callable[[Cue], str]
    timed: bool = True
    tagged: bool = False


class Subtitles:
    """Writes the segments of one sound, in order. words: with the times of words."""

    def __init__(self, form: str, words: bool = False):
        self._format, self._words, self._n_cues = FORMATS[form], words, 0

    @property
    def head(self) -> str:
        """What the file begins with."""
        return self._format.head

    def add(self, segment: Segment) -> str:
        """The cues of the next segment."""
        words = (segment.words or ()) if self._words and self._format.timed else ()
        if words and not self._format.tagged:
            return "".join(self._cue(word.start, word.end, word.word, ()) for word in words)
        return self._cue(segment.start, segment.end, segment.text, words)

    def _cue(self, start: float, end: float, text: str, words: tuple[Word, ...]) -> str:
        self._n_cues += 1
        return self._format.cue(Cue(self._n_cues, start, end, " ".join(text.split()), words))


def written(form: str, segments: Iterable[Segment], words: bool = False) -> str:
    """A whole file."""
    subtitles = Subtitles(form, words)
    return subtitles.head + "".join(map(subtitles.add, segments))


def _txt(cue: Cue) -> str:
    return f"{cue.text}\n"


def _srt(cue: Cue) -> str:
    """Numbered, times as 00:00:01,500; in the text an arrow would begin a new cue."""
    text = cue.text.replace("-->", "->")
    return f"{cue.number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{text}\n\n"


def _vtt(cue: Cue) -> str:
    """Times as 00:00:01.500; text is a markup language's, with tags of times, each later than the one before."""
    tagged = _tagged(cue, lambda time: f"<{clock(time, '.')}>", lambda text: escape(text, quote=False))
    return f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{tagged}\n\n"


def _tsv(cue: Cue) -> str:
    """Whole milliseconds, as openai/whisper writes them."""
    return f"{round(cue.start * 1000)}\t{round(cue.end * 1000)}\t{cue.text}\n"


def _csv(cue: Cue) -> str:
    """The same with commas; a text with a comma or quotes in it is quoted (RFC 4180)."""
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow((round(cue.start * 1000), round(cue.end * 1000), cue.text))
    return row.getvalue()


def _lrc(cue: Cue) -> str:
    """Minutes, seconds and hundredths in front; of words in between."""
    return f"[{_lyrics_clock(cue.start)}]{_tagged(cue, lambda time: f'<{_lyrics_clock(time)}>', str)}\n"


FORMATS = {
    "txt": Format("", _txt, timed=False),
    "srt": Format("", _srt),
    "vtt": Format("WEBVTT\n\n", _vtt, tagged=True),
    "tsv": Format("start\tend\ttext\n", _tsv),
    "csv": Format("start,end,text\n", _csv),
    "lrc": Format("", _lrc, tagged=True),
}


def _tagged(cue: Cue, tag: Callable[[float], str], plain: Callable[[str], str]) -> str:
    """The text of a cue, with a tag before each word that begins within it and later than the one before."""
    if not cue.words:
        return plain(cue.text)
    text, last = "", cue.start
    for word in cue.words:
        space = " " if text and word.word.startswith(" ") else ""
        later = tag(last) != tag(word.start) and last < word.start < cue.end
        text += space + (tag(word.start) if later else "") + plain(" ".join(word.word.split()))
        last = word.start if later else last
    return text


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _lyrics_clock(seconds: float) -> str:
    """Minutes, seconds and hundredths."""
    minutes, rest = divmod(round(seconds * 100), 6000)
    return f"{minutes:02d}:{rest // 100:02d}.{rest % 100:02d}"
