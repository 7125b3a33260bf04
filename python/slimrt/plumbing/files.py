"""Files that users name: text to read, and output that is written completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_GGML = b"lmgg"  # 0x67676d6c, little-endian


def is_ggml_bin(path: Path) -> bool:
    """Whether it is a file in whisper.cpp's format (ggml-*.bin), by its magic number."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_GGML)) == _GGML


def cache_directory() -> Path:
    """The directory for converted models and measurements of the machine: $SLIMRT_CACHE_DIR, else slimrt in
    $XDG_CACHE_HOME, else ~/.cache/slimrt."""
    own = os.environ.get("SLIMRT_CACHE_DIR")
    return Path(own) if own else _base("XDG_CACHE_HOME", ".cache") / "slimrt"


def state_directory() -> Path:
    """The directory for files that are kept without being asked for, such as a conversation that an error ended: slimrt
    in $XDG_STATE_HOME, else ~/.local/state/slimrt."""
    return _base("XDG_STATE_HOME", ".local/state") / "slimrt"


def _base(variable: str, usual: str) -> Path:
    """A base directory: the variable's value, unless it is relative (XDG: to be ignored), else a path in the user's
    home. For a user without a home, as in some containers, a path where no directory can be made."""
    said = Path(os.environ.get(variable, ""))
    if said.is_absolute():
        return said
    try:
        return Path.home() / usual
    except RuntimeError:
        return Path(os.devnull) / usual  # not even root can make a directory there


def decode_text(data: bytes, name: str) -> str:
    """UTF-8 bytes as text, without a byte order mark. ValueError, with `name` in front: they are not UTF-8."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_text(path: str | os.PathLike[str] | None) -> str:
    """The text of a UTF-8 file, or of stdin (None), without a byte order mark.

    Raises:
        OSError: it cannot be read. ValueError: it is not UTF-8; names the byte.
    """
    if path is None:
        return decode_text(sys.stdin.buffer.read(), "stdin")
    return decode_text(Path(path).read_bytes(), os.fspath(path))


def check_utf8(path: str | Path) -> None:
    """ValueError: a path that is not UTF-8, which the engine cannot take."""
    if os.fsencode(path) != str(path).encode(errors="replace"):
        raise ValueError(f"{path}: this path is not UTF-8 here: rename what it names, or give a link to it")


def followed(target: Path) -> Path:
    """The file to write for a name: the target of a symbolic link, which need not exist yet, else the name itself.

    Raises:
        OSError: the links form a cycle.
    """
    if not target.is_symlink():
        return target
    file = Path(os.path.realpath(target))
    if file.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target))
    return file


def check_target(target: Path) -> None:
    """Refuse a path that cannot be written to, before the work whose result it is for.

    Raises:
        OSError: the directory does not exist or is not writable, the path is not a regular file, or its links form a
            cycle.
    """
    file = followed(target)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file.parent}: no such directory")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; name the file to write")
    if target.exists() and not file.is_file():  # exists() for links such as /dev/stdout, which may lead to a pipe
        raise OSError(f"{target} is not a plain file; name another to write")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{file.parent}: no permission to write to this directory")


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that replaces it (or the file it links to) on success, and is removed otherwise.

    Raises:
        OSError: as check_target; or a full disk, ...; it names `target`.
    """
    check_target(target)
    with stand_in(target, ".partial", Path.touch) as partial, writing(target, partial):
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, followed(target))


@contextmanager
def stand_in(target: Path, suffix: str, make: Callable[[Path], object]) -> Iterator[Path]:
    """A new temporary file or directory beside a target (or the file it links to), removed afterwards.

    If the process is killed it stays until the same target is written again: it is locked while in use, and unlocked
    ones are removed.
    """
    beside = followed(target)
    remove_leftovers(beside)
    path, descriptor = beside, None
    try:
        while descriptor is None:
            path = beside.with_name(f".{beside.name}.{secrets.token_hex(4)}{suffix}")
            with writing(target, path):
                make(path)
                descriptor = _open_locked(path)
        yield path
    finally:
        if descriptor is not None:
            os.close(descriptor)
        if path != beside:
            with suppress(OSError):  # an earlier error says more
                _remove(path)


def _open_locked(path: Path) -> int | None:
    """Open and lock a new temporary path; None: another process has removed it as a leftover before it was locked."""
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
    except OSError:  # the file system has no locks: then leftovers are never removed either
        return descriptor
    os.close(descriptor)
    return None


def remove_leftovers(target: Path) -> None:
    """Remove temporary files that killed processes left beside a target."""
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
    """Make an OSError that names no file, or a temporary one, name the target, and say what helps a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None and not re.fullmatch(r"\d+ requested and \d+ written", str(error)):
            raise  # one of ours, which names its file
        number, why = error.errno, error.strerror
        if number is None:  # NumPy's error for a partial write, which does not say why
            number, why = errno.ENOSPC, "not written completely"
        if error.filename not in (None, *map(str, stand_ins)):
            raise
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = f"{why}: make room (or raise ulimit -f, if it is set), or write to another disk"
        raise OSError(number, why, str(target)) from error
