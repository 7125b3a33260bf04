"""Files that people name: text to read, and what is written complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_GGML = b"lmgg"  # 0x67676d6c, little-endian


def is_ggml_bin(path: Path) -> bool:
    """Whether it is a file that begins as whisper.cpp's own (ggml-*.bin) do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_GGML)) == _GGML


def cache_directory() -> Path:
    """Where converted models and what was measured of the machine are kept: $SLIMRT_CACHE_DIR, else slimrt in
    $XDG_CACHE_HOME, else ~/.cache/slimrt."""
    own = os.environ.get("SLIMRT_CACHE_DIR")
    return Path(own) if own else _base("XDG_CACHE_HOME", ".cache") / "slimrt"


def state_directory() -> Path:
    """Where what a program leaves behind unasked is kept, such as a conversation that an error ended: slimrt in
    $XDG_STATE_HOME, else ~/.local/state/slimrt."""
    return _base("XDG_STATE_HOME", ".local/state") / "slimrt"


def _base(variable: str, usual: str) -> Path:
    """A base directory: what the variable says, unless that is relative, which XDG wants ignored, else one in the
    user's home. Of a user without any, as containers have them, it is one where nothing can be kept."""
    said = Path(os.environ.get(variable, ""))
    if said.is_absolute():
        return said
    try:
        return Path.home() / usual
    except RuntimeError:
        return Path(os.devnull) / usual  # where not even root makes a folder


def decode_text(data: bytes, name: str) -> str:
    """The text in these bytes, without a byte order mark; ValueError, with the name of what they are from, when they
    are not UTF-8."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def check_utf8(path: str | Path) -> None:
    """ValueError: a path that is not UTF-8, as the engine has them."""
    if os.fsencode(path) != str(path).encode(errors="replace"):
        raise ValueError(f"{path}: this path is not UTF-8 here: rename what it names, or give a link to it")


def followed(target: Path) -> Path:
    """The file to write under a name: where that is a symbolic link what it leads to, which need not be there yet.

    Raises:
        OSError: links lead in a circle.
    """
    if not target.is_symlink():
        return target
    file = Path(os.path.realpath(target))
    if file.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target))
    return file


def check_target(target: Path) -> None:
    """Refuses a path that no file can be written to, before the work whose result it is for.

    Raises:
        OSError: no such directory, one that must not be written to, something there that is not a plain file, or links
            that lead in a circle.
    """
    file = followed(target)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file.parent}: no such directory")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; name the file to write")
    if target.exists() and not file.is_file():  # /dev/stdout may lead to what has no name
        raise OSError(f"{target} is not a plain file; name another to write")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{file.parent}: no permission to write to this directory")


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """A path to write to, that becomes `target`, or what that links to, when all went well and vanishes when anything
    did not.

    Raises:
        OSError: as check_target; or the disk is full, ...; it names `target`.
    """
    check_target(target)
    with stand_in(target, ".partial", Path.touch) as partial, writing(target, partial):
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, followed(target))


@contextmanager
def stand_in(target: Path, suffix: str, make: Callable[[Path], object]) -> Iterator[Path]:
    """A new file or folder beside a target, or what that links to, under a name of its own; gone afterwards.

    Where this process is killed it stays, and goes when the same target is written again: whoever uses one holds a lock
    on it, which ends with the process.
    """
    beside = followed(target)
    remove_leftovers(beside)
    path, descriptor = beside, None
    try:
        while descriptor is None:
            path = beside.with_name(f".{beside.name}.{secrets.token_hex(4)}{suffix}")
            with writing(target, path):
                make(path)
                descriptor = _claim(path)
        yield path
    finally:
        if descriptor is not None:
            os.close(descriptor)
        if path != beside:
            with suppress(OSError):  # what went wrong before says more
                _remove(path)


def _claim(path: Path) -> int | None:
    """Opens and locks what was just made; None: before that another process took it for a leftover."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # no locks in this file system: then nobody removes leftovers
        return descriptor
    os.close(descriptor)
    return None


def remove_leftovers(target: Path) -> None:
    """Removes what processes that were killed left beside a target."""
    ours = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{8}(\.partial)?")
    found = [Path(entry.path) for entry in os.scandir(target.parent) if ours.fullmatch(entry.name)]
    for path in found:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: it is in use, or there are no locks
                _remove(path)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing(target: Path, *stand_ins: Path) -> Iterator[None]:
    """Has an OSError that names no file, or one that stands in for the target, name the target."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # NumPy's way to say that the disk took only a part
            raise OSError(errno.EIO, f"not written completely: {error}", str(target)) from error
        if error.filename in (None, *map(str, stand_ins)):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
