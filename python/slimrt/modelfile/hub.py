"""Models in repositories of Hugging Face's hub, downloaded by huggingface_hub into its own cache.

HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their usual meaning.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

from slimrt.errors import DownloadError, UnsupportedError
from slimrt.modelfile.hub_files import Chosen, choose
from slimrt.plumbing import progress
from slimrt.plumbing.files import check_utf8
from slimrt.plumbing.notes import note
from slimrt.plumbing.units import format_both, format_bytes

_FORM = "hf://ORG/REPO[:FILE or TYPE][@REVISION]"
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<scheme>hf://)?(?P<repo>{_PART}/{_PART})(:(?P<wanted>[^:@]+))?(@(?P<revision>[^:@\s]+))?", re.ASCII
)
_FILES = (".gguf", ".bin", ".safetensors")  # a name that ends so is a path, not a repository
_URL = re.compile(r"https?:/+(?P<page>(huggingface\.co|hf\.co)/)?(?P<rest>.*)")
_WHISPER = re.compile(r"(tiny|base|(distil-)?(small|medium))(\.en)?|(distil-)?large(-v[123])?|(large-v3-)?turbo")
_NO_FILE = "/"  # a pattern that matches no file


@dataclass(frozen=True)
class HubName:
    """A repository, and which of its files is wanted.

    Attributes:
        text: as it was given. repo: "org/repo". revision: a branch, tag or commit; None: main.
        wanted: a file, or a type such as "Q4_K_M"; "": the default (hub_files.choose).
        is_plain: without "hf://", so that it may be meant as a path.
    """

    text: str
    repo: str
    wanted: str
    revision: str | None
    is_plain: bool

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name; None: it is a local path. ValueError: "hf://" is not followed by the name of a repository."""
        match = _NAME.fullmatch(text)
        if match is None:
            if text.startswith("hf://"):
                raise ValueError(f"'{text}' names no repository: write {_FORM}")
            return None
        is_plain = match["scheme"] is None
        if is_plain and not (match["wanted"] or match["revision"]) and match["repo"].lower().endswith(_FILES):
            return None
        return cls(text, match["repo"], match["wanted"] or "", match["revision"], is_plain)


def located(path: str | os.PathLike[str], show_progress: bool | None = None) -> Path:
    """The local path of a model: the path itself, or that of a repository's model, downloaded unless it is cached.

    Args:
        path: a path; "hf://org/repo[:file or type][@revision]"; or that without "hf://" if there is no such path.
        show_progress: show bars on stderr; None: if it is a terminal.

    Returns:
        A GGUF file (of a split model the first file), whisper.cpp's ggml-*.bin, or a directory with safetensors. A path
        that does not exist is returned unchanged.

    Raises:
        DownloadError: no such repository, file or type, no access to it, no connection, or no disk space.
        UnsupportedError: a URL, a file of a directory, or a repository without files that slimrt can read.
        FileNotFoundError: a name without "hf://" whose first part is a local folder.
        ValueError: "hf://" without the name of a repository; or a path that is not UTF-8, which the engine requires.
    """
    text = re.sub("^hf:/+", "hf://", os.fspath(path))  # a Path has only one of the two slashes
    if Path(text).exists():
        check_utf8(text)
        if text.endswith(".safetensors") and Path(text).is_file():
            raise UnsupportedError(f"{text} has weights alone: name its directory, in which config.json is, too")
        return Path(text)
    if url := _URL.fullmatch(text):
        raise UnsupportedError(_about_url(url))
    name = HubName.parse(text)
    if name is None:
        return Path(text)
    if name.is_plain and Path(text).parent.is_dir():
        raise FileNotFoundError(f"{text}: no such file or directory (hf://{text} names a repository of Hugging Face)")
    return _fetched(name, progress.wanted(show_progress))


def repository_of(directory: Path) -> str | None:
    """The repository ("org/repo") of which a directory in Hugging Face's cache is a snapshot; None: it is not one."""
    kept = directory.absolute().parent.parent
    if directory.absolute().parent.name != "snapshots" or not kept.name.startswith("models--"):
        return None
    return kept.name.removeprefix("models--").replace("--", "/")


def title(path: Path) -> str:
    """A model's display name: the last part of its path, or of its repository if the path is a snapshot in Hugging
    Face's cache."""
    repository = repository_of(path)
    return repository.rpartition("/")[2] if repository else path.absolute().name


def whispers_name(text: str) -> str:
    """A hint for messages: the repository of a model for which openai-whisper and faster-whisper have a short name
    ("turbo"); "" for other names."""
    if not _WHISPER.fullmatch(text):
        return ""
    full = {"turbo": "large-v3-turbo", "large": "large-v3"}.get(text, text)
    repo = f"distil-whisper/{text}" if text.startswith("distil") else f"openai/whisper-{full}"
    return f" (on Hugging Face's hub that model of Whisper is {repo})"


def _about_url(url: re.Match[str]) -> str:
    """A message on why a URL is refused, and what to use instead."""
    text = re.sub(r"^(https?):/+", r"\1://", url[0])
    if not url["page"]:
        return f"{text}: slimrt reads files, not URLs: download it and give its path"
    parts: list[str] = str(url["rest"]).partition("?")[0].split("/")  # org, repo, "resolve" or "blob", revision, file
    org, repo, _, revision = (*parts, "", "", "")[:4]
    file = "/".join(parts[4:])
    name = f"{org}/{repo}" + (f":{file}" if file else "") + (f"@{revision}" if revision not in ("", "main") else "")
    return f"{text}: slimrt takes the name of a repository, not its URL: hf://{name}"


def _fetched(name: HubName, show: bool) -> Path:
    """The local path of a repository's model, downloaded unless it is cached. Errors as located()."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with _explained(name):
        sizes, commit = _online(name)
        if not commit:
            return _from_cache(name)
        chosen = choose(name.repo, sizes, name.wanted)
        held = {file: try_to_load_from_cache(name.repo, file, revision=commit) for file in chosen.files}
        missing = [file for file, path in held.items() if not isinstance(path, str)]
        if missing:
            _make_room(name, chosen, sum(sizes[file] for file in missing))
        elif chosen.why:
            note(f"{name.repo}:{chosen.model}{chosen.why}")
        # One file after another in this thread: with snapshot_download's threads Ctrl-C waits for all downloads.
        paths = [
            hf_hub_download(name.repo, file, revision=commit, tqdm_class=_bar(show, file)) for file in chosen.files
        ]
        first = chosen.files[0]
        if missing:  # all files are complete: make the cache's reference of the branch point to this commit
            hf_hub_download(name.repo, first, revision=name.revision, tqdm_class=_bar(show, first))
        return Path(paths[0]).parents[first.count("/")] / chosen.model


def _online(name: HubName) -> tuple[dict[str, int], str]:
    """The repository's files with their bytes, and its commit; {} and "" if the hub cannot be reached.

    Raises:
        huggingface_hub's errors: the hub refuses the request.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except OfflineModeIsEnabled:
        return {}, ""
    except Exception as error:
        is_down = isinstance(error, HfHubHTTPError) and error.response.status_code >= 500
        if not is_down and not _is_connection(error):
            raise
        note(f"{_endpoint()} cannot be reached ({_one_line(error)}): looking for {name.repo} in the cache", WARNING)
        return {}, ""
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}, info.sha or ""


def _from_cache(name: HubName) -> Path:
    """The path of the model in Hugging Face's cache. DownloadError: it is not there, or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(name.repo, revision=name.revision, local_files_only=True, allow_patterns=[_NO_FILE])
        )
    except LocalEntryNotFoundError as error:
        raise DownloadError(f"{_intro(name)} is not in the cache ({hub_cache()}), and {_why_not_online()}") from error
    sizes = {file.relative_to(folder).as_posix(): 0 for file in folder.rglob("*") if file.is_file()}
    try:
        return folder / choose(name.repo, sizes, name.wanted).model
    except DownloadError as error:
        raise DownloadError(
            f"{error}: that is what the cache holds ({hub_cache()}), and {_why_not_online()}"
        ) from error


def _make_room(name: HubName, chosen: Chosen, needed: int) -> None:
    """Check the disk space for `needed` bytes, and note what will be downloaded. DownloadError: too little space."""
    what, folder = f"{name.repo}:{chosen.model}" if chosen.model else name.repo, hub_cache()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        wanted, there = format_both(needed, free)
        raise DownloadError(
            f"{what} needs {wanted} in {folder}, {there} free: make room, or name another place with HF_HOME"
        )
    note(f"fetching {what}{chosen.why}, {format_bytes(needed)}, into {folder}")


def _bar(show: bool, file: str) -> type[Any]:
    """The class of a file's progress bar. Of the bars that huggingface_hub creates only the one that counts bytes on
    disk is shown; HF_HUB_DISABLE_PROGRESS_BARS disables it too.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, bar_format: str | None = None, **settings: Any):
            shown = show and settings.get("unit") == "B" and not str(name).endswith(".transfer")
            ours = {
                "desc": file.rpartition("/")[2],
                "disable": not shown,
                "leave": False,
                "delay": 1.0,
                "dynamic_ncols": True,
            }
            super().__init__(*args, name=name, **settings | ours)  # type: ignore[no-untyped-call]

    return Bar


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Convert huggingface_hub's errors to DownloadError, with a message that says what to do."""
    from huggingface_hub import errors

    token = "give a token of an account that may read it: HF_TOKEN, or hf auth login"
    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{name.repo} is gated: accept its terms at {_endpoint()}/{name.repo}, then {token}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"{name.repo} has no revision '{name.revision}'") from error
    except errors.RepositoryNotFoundError as error:
        nowhere = "no such file or directory, and no such repository on" if name.is_plain else "no such repository on"
        raise DownloadError(f"{name.text}: {nowhere} {_endpoint()}; if it is private, {token}") from error
    except errors.HFValidationError as error:
        raise DownloadError(f"{name.text}: no name of a repository: {_one_line(error)}") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise DownloadError(f"{name.repo}: {_endpoint()} refuses the token that it was given; {token}") from error
        raise DownloadError(f"{name.repo}: {_endpoint()} answers: {_one_line(error)}") from error
    except DownloadError:
        raise
    except Exception as error:
        if not _is_connection(error) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise
        raise DownloadError(
            f"{name.repo}: the connection to {_endpoint()} broke off ({_one_line(error.__cause__ or error)}): the same "
            "command again keeps the files that are complete"
        ) from error


def _is_connection(error: BaseException) -> bool:
    """Whether an error is a connection error; those of the HTTP library differ between versions of huggingface_hub."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests") or isinstance(
        error, ConnectionError
    )


def _why_not_online() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it to fetch the model, or copy the cache of a machine that has it"
    return f"{_endpoint()} cannot be reached: try again with a connection"


def _intro(name: HubName) -> str:
    return f"{name.text}: no such file or directory, and as a repository it" if name.is_plain else name.text


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def hub_cache() -> Path:
    """The folder of Hugging Face's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _one_line(error: BaseException) -> str:
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
