"""Chooses the files of a repository for the wanted model: a GGUF file, its shards, or a directory with safetensors."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimrt.errors import DownloadError, UnsupportedError

USUAL_TYPE = "Q4_K_M"
# Files of a directory that a conversion may read, of its folders further chat templates and how vectors are pooled.
MODEL_FILES = (
    "*.json", "*.safetensors", "*.model", "*.jinja", "additional_chat_templates/*.jinja", "*_Pooling/config.json",
)  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_TYPE = re.compile(r"(?:^|[-._/])((?:IQ|TQ|Q)\d(?:_\w+)?|MXFP4\w*|NVFP4|BF16|F16|F32)(?=[-./]|$)", re.IGNORECASE)
_NOT_RUN = ("IQ1", "NVFP4")  # types that slimrt does not support
_BESIDE = re.compile(r"(.*/)?(mmproj|imatrix)\b.*|.*[-.](mmproj|imatrix)\.gguf", re.IGNORECASE)  # not language models
_SINGLE, _OTHER_COPY = "model.safetensors", "consolidated*"  # all weights; the same weights in the vendor's own format


@dataclass(frozen=True)
class Chosen:
    """The chosen files.

    Attributes:
        model: the file to open; "": the directory.
        files: all files to download. why: if there was a choice, a phrase on it that follows the name in messages.
    """

    model: str
    files: tuple[str, ...]
    why: str = ""


def choose(repo: str, files: Iterable[str], wanted: str = "") -> Chosen:
    """The files of a repository to download for a model.

    Args:
        repo: its name, for messages. files: all its files.
        wanted: a file's name, or a pattern of one ("*q8_0.gguf"); or a type, such as "q8_0", as in file names; "":
            Q4_K_M, else the first GGUF file of a type that slimrt supports, else the directory's safetensors.

    Raises:
        DownloadError: no such file or type (the message lists those that exist), or a shard is missing.
        UnsupportedError: there is no model that slimrt can read.
    """
    files = sorted(files)
    if wanted.endswith(".safetensors"):
        raise DownloadError(f"{repo}: {wanted} has weights alone: give {repo} without a file's name")
    if wanted in files:
        return _whole(repo, files, wanted)
    found = [file for file in files if is_model(file)]
    if not found:
        return _directory(repo, files, wanted)
    if not wanted:
        usual = _of_type(found, USUAL_TYPE)
        runs = [file for file in found if not type_of(file).startswith(_NOT_RUN)]
        why = "" if len(found) == 1 else f" (of {_types(found)})"
        return _whole(repo, files, (usual or runs or found)[0], why)
    of_type = _of_type(found, wanted)
    if not of_type:
        raise DownloadError(f"{repo} has no '{wanted}'; it has {_types(found)}")
    why = "" if len(of_type) == 1 else f" (the first of {len(of_type)} in {wanted}; a file's name chooses another)"
    return _whole(repo, files, of_type[0], why)


def type_of(file: str) -> str:
    """The type in a file's name, in capitals; "": none."""
    said = _TYPE.findall(file.removesuffix(".gguf"))
    return said[-1].upper() if said else ""


def is_model(file: str) -> bool:
    """Whether a file is a GGUF model, or the first of its shards."""
    shard = _SHARD.fullmatch(file)
    return (
        file.lower().endswith(".gguf") and not _BESIDE.fullmatch(file) and (shard is None or int(shard["number"]) == 1)
    )


def matches(file: str, pattern: str) -> bool:
    """Whether a file's name matches a pattern, in any case."""
    return fnmatch.fnmatchcase(file.lower(), pattern.lower())


def _of_type(files: Sequence[str], wanted: str) -> list[str]:
    """The files of this type, or with it between two separators in their name, or matching it as a pattern; ignores
    case."""
    said = re.compile(rf"(?:^|[-./]){re.escape(wanted)}(?=[-./])", re.IGNORECASE)
    return [file for file in files if type_of(file) == wanted.upper() or said.search(file) or matches(file, wanted)]


def _types(files: Sequence[str]) -> str:
    """The types to choose from, for messages; files whose names have no type are listed by name."""
    return ", ".join(dict.fromkeys(type_of(file) or file for file in files))


def _whole(repo: str, files: Sequence[str], model: str, why: str = "") -> Chosen:
    """A file, with the other shards if it is one of several."""
    shard = _SHARD.fullmatch(model)
    if shard is None:
        return Chosen(model, (model,), why)
    names = [f"{shard['stem']}-{i:05}-of-{shard['count']}.gguf" for i in range(1, int(shard["count"]) + 1)]
    if missing := [name for name in names if name not in files]:
        raise DownloadError(f"{repo} has not all of {names[0]}: {missing[0]} is missing")
    return Chosen(names[0], tuple(names), why)


def _directory(repo: str, files: Sequence[str], wanted: str) -> Chosen:
    """The safetensors of a repository without GGUF files, and the other files that a conversion reads."""
    ggml = [file for file in files if re.fullmatch(r"ggml-.*\.bin", file)]
    if ggml:
        said = f"has no '{wanted}'" if wanted else "has several models"
        raise DownloadError(f"{repo} {said}: name a file: {repo}:{ggml[0]}; it has {', '.join(ggml)}")
    at_top = [file for file in files if "/" not in file and not fnmatch.fnmatch(file, _OTHER_COPY)]
    if "config.json" not in at_top or not fnmatch.filter(at_top, "*.safetensors"):
        held = sorted({suffix for file in files if (suffix := file.rpartition(".")[2]) in ("bin", "pt", "pth", "onnx")})
        has = f"; it has .{', .'.join(held)}" if held else ""
        raise UnsupportedError(f"{repo} has no GGUF file and no config.json with safetensors, which slimrt reads{has}")
    if wanted:
        raise DownloadError(
            f"{repo} has no '{wanted}' and no GGUF file: give {repo} alone for its safetensors, and the type to slimrt "
            "convert --outtype"
        )
    inside = [file for file in files if "/" in file]
    read = [file for one in MODEL_FILES for file in fnmatch.filter(inside if "/" in one else at_top, one)]
    if _SINGLE in read:  # only this is read; other safetensors contain the same weights in other types
        read = [file for file in read if file == _SINGLE or not file.endswith(".safetensors")]
    return Chosen("", tuple(sorted(read)))
