"""Transcripts as plain text, SubRip (.srt), WebVTT (.vtt), tables (.tsv, .csv) and lyrics (.lrc)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

from slimrt.speech.records import Segment, Word


@dataclass(frozen=True)
class Cue:
    """A subtitle. number: from 1; words: empty if their times are not shown."""

    number: int
    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        head: beginning of a file. cue: formats one cue.
        timed: it has times. tagged: it can mark the times of words within a cue; else each word becomes a cue.
    """

    head: str
    cue: Callable[[Cue], str]
    timed: bool = True
    tagged: bool = False


class Subtitles:
    """Formats the segments of one sound, in order. words: with the times of words."""

    def __init__(self, form: str, words: bool = False):
        self._format, self._words, self._n_cues = FORMATS[form], words, 0

    @property
    def head(self) -> str:
        """The beginning of the file."""
        return self._format.head

    def add(self, segment: Segment) -> str:
        """The text of the next segment's cues."""
        words = (segment.words or ()) if self._words and self._format.timed else ()
        if words and not self._format.tagged:
            return "".join(self._cue(word.start, word.end, word.word, ()) for word in words)
        return self._cue(segment.start, segment.end, segment.text, words)

    def _cue(self, start: float, end: float, text: str, words: tuple[Word, ...]) -> str:
        self._n_cues += 1
        return self._format.cue(Cue(self._n_cues, start, end, " ".join(text.split()), words))


def written(form: str, segments: Iterable[Segment], words: bool = False) -> str:
    """The text of a whole file."""
    subtitles = Subtitles(form, words)
    return subtitles.head + "".join(map(subtitles.add, segments))


def _txt(cue: Cue) -> str:
    return f"{cue.text}\n"


def _srt(cue: Cue) -> str:
    """Numbered, times as 00:00:01,500; arrows in the text are changed, since they would begin a new cue."""
    text = cue.text.replace("-->", "->")
    return f"{cue.number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{text}\n\n"


def _vtt(cue: Cue) -> str:
    """Times as 00:00:01.500; the text is escaped, with tags for the times of words."""
    tagged = _tagged(cue, lambda time: f"<{clock(time, '.')}>", lambda text: escape(text, quote=False))
    return f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{tagged}\n\n"


def _tsv(cue: Cue) -> str:
    """Times in whole milliseconds, as in openai/whisper."""
    return f"{round(cue.start * 1000)}\t{round(cue.end * 1000)}\t{cue.text}\n"


def _csv(cue: Cue) -> str:
    """The same, comma-separated; texts with commas or quotes are quoted (RFC 4180)."""
    row = io.StringIO()
    csv.writer(row, lineterminator="\n").writerow((round(cue.start * 1000), round(cue.end * 1000), cue.text))
    return row.getvalue()


def _lrc(cue: Cue) -> str:
    """The start as [minutes:seconds.hundredths], and those of words within the line."""
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
    """A cue's text with a time tag before each word that starts within the cue and later than the last tag."""
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
    """A time as HH:MM:SS, `point` and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _lyrics_clock(seconds: float) -> str:
    """A time as MM:SS.hh."""
    minutes, rest = divmod(round(seconds * 100), 6000)
    return f"{minutes:02d}:{rest // 100:02d}.{rest % 100:02d}"
