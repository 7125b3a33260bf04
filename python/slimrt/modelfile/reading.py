# SPDX-License-Identifier: Apache-2.0
"""Reads models from any source; sources that are not GGUF are converted once and kept in slimrt's cache directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.info import Plan
from slimrt.modelfile.ggml_bin import read_ggml_bin
from slimrt.modelfile.gguf import ModelData, check_room, read_gguf, uint32, written_gguf
from slimrt.modelfile.hf.directory import read_hf
from slimrt.modelfile.hub import title
from slimrt.modelfile.hub_files import MODEL_FILES
from slimrt.modelfile.kept import remember_source
from slimrt.modelfile.lora import KEY as LORA
from slimrt.modelfile.lora import Adapters
from slimrt.modelfile.settings import PREFIX
from slimrt.modelfile.sharing import KEYS, OWNERS
from slimrt.modes import FOLD_SUFFIXES
from slimrt.plumbing import progress as bars
from slimrt.plumbing.files import cache_directory, is_ggml_bin
from slimrt.plumbing.notes import note
from slimrt.plumbing.units import format_bytes

FORMAT_VERSION = 1  # of the keys under "slimrt."
_CONVERTER = 11  # raise it when the same source converts to different bytes, so that cached files are made again
# Keys that describe the model, not its conversion.
_KEPT_KEYS = (
    "slimrt.activation",
    "slimrt.whisper.",
    "slimrt.chronos.",
    "slimrt.text2text.",
    PREFIX,
    "slimrt.sharing.",
    OWNERS,
    KEYS,
    "slimrt.text_part",
    "slimrt.format_version",
    LORA,
)


NONE = Adapters()


def read_model(
    source: Path, *, keep_fold: bool = False, named: Collection[str] = (), adapters: Adapters = NONE
) -> tuple[ModelData, list[str]]:
    """Return the model in a Hugging Face directory, a GGUF file or a ggml file of whisper.cpp, and warnings.

    Args:
        adapters: what is merged into its weights.
        keep_fold: keep the folded tensors and cache metadata of an earlier conversion of a GGUF file. Else they are
            dropped, with a warning unless the result will be folded for the same cache.
        named: caches that the result will be folded for, such as "--cache k+r".

    Raises:
        ModelFormatError, UnsupportedError, OSError: see `read_hf`, `read_gguf`, `read_ggml_bin`, `Adapters.merged`.
    """
    model, warnings = _read(source, keep_fold, named, adapters)
    model, more = adapters.merged(model, source)
    return model, warnings + more


def _read(source: Path, keep_fold: bool, named: Collection[str], adapters: Adapters) -> tuple[ModelData, list[str]]:
    """The model, with the adapters merged in that are merged into a directory."""
    if source.is_dir():
        return read_hf(source, adapters.peft)
    if is_ggml_bin(source):
        return read_ggml_bin(source)
    model = read_gguf(source)
    version = model.value("slimrt.format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UnsupportedError(f"{source}: slimrt.format_version is {version}; this slimrt reads {FORMAT_VERSION}")
    core.plan(
        str(source), n_ctx=1, cache=core.baseline(str(source))
    )  # validates the file's sizes, as loading does, before they are used
    if keep_fold:
        return model, []
    metadata = {
        key: value
        for key, value in model.metadata.items()
        if not key.startswith("slimrt.") or key.startswith(_KEPT_KEYS)
    }
    return without_folds(ModelData(metadata, model.tensors)), _about_the_earlier_fold(source, model, named)


def _about_the_earlier_fold(source: Path, model: ModelData, named: Collection[str]) -> list[str]:
    """A warning on a file that was converted for a cache which is not among the `named`; else []."""
    names = {name.decode() if isinstance(name, bytes) else name for name in model.value("slimrt.cache.modes", [])}
    earlier = [f"--cache {mode}" for mode in sorted(names)]
    if cross := model.value("slimrt.cache.cross", ""):
        earlier.append(f"--cross {cross}")
    earlier = [flag for flag in earlier if flag not in named]
    if not earlier:
        return []
    return [
        f"{source.name} was converted with {' '.join(earlier)}; that is left out, for it is of other weights or of "
        "another cache than is asked for now: name the cache here to fold the result for it"
    ]


def without_folds(model: ModelData) -> ModelData:
    """The model without the tensors that an earlier conversion folded."""
    kept = {name: tensor for name, tensor in model.tensors.items() if not name.endswith(FOLD_SUFFIXES)}
    return ModelData(model.metadata, kept)


def source_hash(source: Path, show_progress: bool = False, adapters: Adapters = NONE) -> str:
    """Return "sha256:..." of the bytes of a file and its shards, or of a directory's files with names and sizes, and of
    those of adapters."""
    files = source_files(source, adapters)
    total, done, digest = sum(file.stat().st_size for file in files), 0, hashlib.sha256()
    with bars.bar(show_progress, total, "hashing", "B") as update:
        for file in files:
            if source.is_dir():
                digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 24):
                    digest.update(block)
                    done += len(block)
                    update(done, total)
    return f"sha256:{digest.hexdigest()}"


def source_files(source: Path, adapters: Adapters = NONE) -> list[Path]:
    """The files from which a model is read. Errors as `core.GgufFile`."""
    if source.is_dir():
        return model_files(source) + adapters.files
    own = [source] if is_ggml_bin(source) else [Path(path) for path in core.GgufFile(str(source)).paths]
    return own + adapters.files


def model_files(directory: Path) -> list[Path]:
    """The files of a Hugging Face directory that a conversion may read, sorted by name."""
    return sorted(file for pattern in MODEL_FILES for file in directory.glob(pattern) if file.is_file())


def cached_gguf(
    path: str | os.PathLike[str],
    *,
    progress: bool = True,
    on_warning: Callable[[str], object] | None = None,
    adapters: Adapters = NONE,
) -> Path:
    """Convert a Hugging Face directory or ggml file of whisper.cpp, or a model with adapters, once, to a GGUF file in
    the cache directory.

    The file's name has a hash of the names, sizes and modification times of the source's files and of the converter's
    version, so a changed source is converted again. Processes that convert at the same time each write a file of their
    own beside the target; the last one replaces it with equal content. on_warning is called with warnings for the user.

    Raises:
        ModelFormatError, UnsupportedError: it cannot be converted.
        OSError: the disk is full, the cache cannot be written.
    """
    source = Path(path).resolve()
    digest = hashlib.sha256(f"{_CONVERTER}\0{source}".encode())
    if adapters:
        digest.update(f"\0{adapters.scales}\0{[str(file.resolve()) for file in adapters.files]}".encode())
    for file in source_files(source, adapters):
        status = file.stat()
        digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    named = source if source.is_dir() else Path(path).absolute()  # a link's own name: its target's may be a hash
    name = title(named)
    target = cache_directory() / f"{name}-{digest.hexdigest()[:16]}.gguf"
    if not target.is_file():
        model, warnings = read_model(named, adapters=adapters)
        if on_warning:
            for warning in warnings:
                on_warning(warning)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"{error.strerror}, and the converted model is kept there: SLIMRT_CACHE_DIR names another place"
            raise OSError(error.errno, told, error.filename) from error
        note(
            f"converting {name} once, {format_bytes(check_room(target, model))} into {target.parent} (slimrt cache "
            "list shows it, SLIMRT_CACHE_DIR names another place)"
        )
        version = {"slimrt.format_version": uint32(FORMAT_VERSION)}
        with written_gguf(target, model.with_metadata(version), show_progress=progress and bars.wanted(None)) as file:
            plan_of_written(file, named)
        remember_source(target, Path(path).absolute())
    return target


def plan_of_written(file: Path, source: Path) -> Plan:
    """The plan of a file that is not in its place yet, so that one which the runtime refuses never gets there.

    Raises:
        ModelFormatError, UnsupportedError: it does; the message names the source.
    """
    try:
        return core.plan(str(file))
    except (ModelFormatError, UnsupportedError) as error:
        raise type(error)(str(error).replace(str(file), str(source))) from None


def runnable(source: Path, show_progress: bool, adapters: Adapters = NONE) -> Path:
    """A GGUF file that the engine can load: the source itself, or its conversion."""
    made = adapters or source.is_dir() or is_ggml_bin(source)
    return cached_gguf(source, progress=show_progress, adapters=adapters) if made else source
