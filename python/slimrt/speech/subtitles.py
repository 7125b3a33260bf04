"""Segments as text, SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slimrt.speech.records import Segment


def as_txt(segments: Sequence[Segment]) -> str:
    """A line a segment."""
    return "".join(f"{segment.text.strip()}\n" for segment in segments)


def as_srt(segments: Sequence[Segment]) -> str:
    """SubRip: numbered, times as 00:00:01,500."""
    return "".join(
        f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{_cue(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def as_vtt(segments: Sequence[Segment]) -> str:
    """WebVTT: times as 00:00:01.500."""
    return "WEBVTT\n\n" + "".join(
        f"{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n{_cue(segment)}\n\n" for segment in segments
    )


FORMATS: dict[str, Callable[[Sequence[Segment]], str]] = {"txt": as_txt, "srt": as_srt, "vtt": as_vtt}


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _cue(segment: Segment) -> str:
    """The text of a segment: an arrow would begin a new cue, and so would an empty line."""
    return " ".join(segment.text.split()).replace("-->", "->")
