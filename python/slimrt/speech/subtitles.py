"""Segments as text, SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from slimrt.speech.records import Segment


@dataclass(frozen=True)
class Format:
    """head: what a file begins with; cue: a segment of it."""

    head: str
    cue: Callable[[Segment], str]

    def whole(self, segments: Sequence[Segment]) -> str:
        """A file."""
        return self.head + "".join(map(self.cue, segments))


def _txt(segment: Segment) -> str:
    return f"{segment.text.strip()}\n"


def _srt(segment: Segment) -> str:
    """Numbered, times as 00:00:01,500; in the text an arrow would begin a new cue, and so would an empty line."""
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{segment.id + 1}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{text}\n\n"


def _vtt(segment: Segment) -> str:
    """Times as 00:00:01.500; text is a markup language's."""
    text = escape(" ".join(segment.text.split()), quote=False)
    return f"{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n{text}\n\n"


FORMATS = {"txt": Format("", _txt), "srt": Format("", _srt), "vtt": Format("WEBVTT\n\n", _vtt)}


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
