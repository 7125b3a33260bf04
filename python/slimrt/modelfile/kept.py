"""Files in slimrt's cache directory: converted models, measurements of the machine, and partly written leftovers."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slimrt.plumbing.files import cache_directory, remove_leftovers, written_beside

_MODEL = re.compile(r"(?P<title>.+)-[0-9a-f]{16}\.gguf")
_MACHINE = re.compile(r"machine-.+\.json")
_LEFTOVER = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{8}\.partial")


@dataclass(frozen=True)
class Kept:
    """A file in slimrt's cache directory.

    Attributes:
        path: the file. title: its name without the hash. what: "model", "measurements" or "leftover".
        bytes: its size. made: modification time, seconds since 1970. source: path of what it was converted from; "":
            unknown.
    """

    path: Path
    title: str
    what: str
    bytes: int
    made: float
    source: str = ""


def remember_source(target: Path, source: Path) -> None:
    """Write the path of what a converted model was made from to a file beside it."""
    with written_beside(_beside(target)) as partial:
        partial.write_text(f"{source}\n", encoding="utf-8", errors="surrogateescape")


def kept() -> list[Kept]:
    """The files that slimrt has written there, sorted by name; other files are ignored."""
    folder = cache_directory()
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [one for path in paths if (one := _of(path)) is not None]


def forget(one: Kept) -> bool:
    """Remove a file of kept(). Returns False if a conversion is writing it now. OSError: it cannot be removed."""
    if one.what == "leftover":
        remove_leftovers(one.path.with_name(one.title))
        return not one.path.exists()
    one.path.unlink(missing_ok=True)
    _beside(one.path).unlink(missing_ok=True)
    return True


def _of(path: Path) -> Kept | None:
    """The record of a file; None: it is not slimrt's, or has been removed meanwhile."""
    with suppress(FileNotFoundError):
        status = path.stat()
        about = status.st_size, status.st_mtime
        if found := _LEFTOVER.fullmatch(path.name):
            return Kept(path, found["target"], "leftover", *about)
        if _MACHINE.fullmatch(path.name):
            return Kept(path, path.name, "measurements", *about)
        if found := _MODEL.fullmatch(path.name):
            source = ""
            with suppress(OSError):
                source = _beside(path).read_text(encoding="utf-8", errors="surrogateescape").strip("\n")
            return Kept(path, found["title"], "model", *about, source)
    return None


def _beside(target: Path) -> Path:
    return target.with_name(f"{target.name}.source")
