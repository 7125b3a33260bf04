# SPDX-License-Identifier: Apache-2.0
"""Convert a model: Hugging Face directory or GGUF in, GGUF out, folded for a cache mode and requantised if asked."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from slimrt import progress as bars
from slimrt.errors import UnsupportedError
from slimrt.files import check_target, writing
from slimrt.plan import CACHE_TYPES

from .calibrate import text_ids, text_moments
from .fold import FOLDED, Attention, Fold, each_fold, fold_value_bias, stored
from .gguf_file import F32, ModelData, Tensor, array, read_gguf, string, uint32, write_gguf
from .hf import read_hf
from .precision import ROUNDOFF, isotropic_moments, predicted_errors
from .quantize import OUT_TYPES, requantise
from .report import CAUTION, TOO_LARGE, ConvertReport, LayerReport, verdict
from .verify import compare

FORMAT_VERSION = 1  # of the keys under "slimrt."
_CONVERTER = 1  # raise it when the same directory converts to other bytes: cached files are made again
_KEPT_KEY = "slimrt.activation"  # says what the model is, not how it was converted
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja")

_Text = str | os.PathLike[str] | None


def convert(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    cache: str | None = None,
    cache_type: str = "f16",
    outtype: str | None = None,
    calibration: str | os.PathLike[str] | None = None,
    exact: bool = True,
    verify: bool | str | os.PathLike[str] | None = None,
    progress: bool = True,
    overwrite: bool = True,
) -> ConvertReport:
    """Convert a model.

    Args:
        src: a GGUF file or a Hugging Face directory (config.json, safetensors); never written to.
        out: the GGUF file to write. It appears, or is replaced, only when it is complete.
        cache: the cache mode to fold for ("kv", "k", "v", "x"); None: only convert.
        cache_type: element type the cache will have ("f32", "f16", "bf16"); the report's warnings are about it.
        outtype: type of the weight matrices, a key of `slimrt.tools.quantize.OUT_TYPES`; None: as in the source.
        calibration: a text file for predicting the fold's error (modes "k" and "v"); None: the built-in text, if the
            model has a tokenizer; "none": no text.
        exact: fold without a residual. The only way so far.
        verify: compare logits of source and result on a text file; True or "": on the built-in text (on arbitrary
            tokens when the model has no tokenizer).
        progress: show bars on stderr, when that is a terminal.
        overwrite: replace an existing file.

    Returns:
        What was written, and what it will cost.

    Raises:
        ValueError: an unknown mode or type, a text that is not UTF-8 or has no use, or out is the source.
        FileExistsError: out exists and overwrite is false.
        CacheUnsupportedError: the mode is not exact for this model; names the layer, the reason, and legal modes.
        ModelFormatError, UnsupportedError: the source is broken, or something in it is not handled; by name.
        OSError: the disk is full, a file cannot be read or written. Nothing partial stays behind.
    """
    source, target, show = Path(src), Path(out), progress and bars.wanted(None)
    _check(source, target, cache_type, outtype, exact, overwrite)
    _check_texts(cache, calibration, verify)
    model, warnings = read_model(source)
    if outtype is not None:
        model, more = requantise(model, outtype)
        warnings += more
    attention = Attention.of(model)
    if cache is not None:
        attention.require(cache)
    metadata = {
        "slimrt.format_version": uint32(FORMAT_VERSION),
        "slimrt.source_hash": string(source_hash(source, show)),
    }
    layers, basis = [LayerReport(layer, cache or "kv") for layer in range(attention.n_layers)], "none"
    with _spool(target) as spool:
        if cache is not None:
            model = fold_value_bias(model, attention)
            metadata["slimrt.cache.modes"] = array([cache] * attention.n_layers, GGUFValueType.STRING)
        if cache in FOLDED:
            model, layers, basis = _fold(model, cache, source, calibration, spool, show)
            metadata |= _fold_fields(layers, basis)
            warnings += _error_warnings(layers, cache_type)
        write_gguf(target, model.with_metadata(metadata), show_progress=show)
    report = ConvertReport(target, cache, cache_type, basis, layers, warnings)
    if verify is None or verify is False:
        return report
    plain = _runnable(source, show)
    ids = text_ids(plain, None if verify is True else verify or None)
    return replace(report, verify=compare(plain, target, ids, cache_type, show_progress=show))


def _check(source: Path, target: Path, cache_type: str, outtype: str | None, exact: bool, overwrite: bool) -> None:
    if cache_type not in ROUNDOFF:
        problem = "no errors can be predicted for" if cache_type in CACHE_TYPES else "unknown"
        raise ValueError(f"{problem} cache type {cache_type!r}; the types are: {', '.join(ROUNDOFF)}")
    if outtype is not None and outtype not in OUT_TYPES:
        raise ValueError(f"unknown outtype {outtype!r}; the types are: {', '.join(OUT_TYPES)}")
    if not exact:
        raise UnsupportedError("folding with a residual (k+r) is not there yet; exact=True folds without one")
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or directory")
    check_target(target)
    if target.exists() and (target.samefile(source) or not overwrite):
        if target.samefile(source):
            raise ValueError(f"{target} is the source itself; write to another file")
        raise FileExistsError(f"{target} exists")


def _check_texts(cache: str | None, calibration: _Text, verify: bool | _Text) -> None:
    if calibration not in (None, "none") and cache not in FOLDED:
        raise ValueError(
            f"calibration is for the folds of cache modes {' and '.join(FOLDED)}, and this conversion has none"
        )
    texts = (None if calibration == "none" else calibration, None if isinstance(verify, bool) else verify)
    for text in texts:
        if text and not Path(text).is_file():
            raise FileNotFoundError(f"{text}: no such text file")


def read_model(source: Path) -> tuple[ModelData, list[str]]:
    """Return the plain model in a GGUF file or a Hugging Face directory, an earlier fold left out, and warnings.

    Raises:
        ModelFormatError, UnsupportedError, OSError: see `read_hf` and `read_gguf`.
    """
    if source.is_dir():
        return read_hf(source)
    model = read_gguf(source)
    if model.value("split.count", 1) > 1:
        raise UnsupportedError(f"{source} is one of several files; join them first: llama-gguf-split --merge")
    version = model.value("slimrt.format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UnsupportedError(f"{source}: slimrt.format_version is {version}; this slimrt reads {FORMAT_VERSION}")
    metadata = {
        key: value for key, value in model.metadata.items() if not key.startswith("slimrt.") or key == _KEPT_KEY
    }
    tensors = {name: tensor for name, tensor in model.tensors.items() if not name.endswith(tuple(FOLDED.values()))}
    return ModelData(metadata, tensors), []


@contextmanager
def _spool(target: Path) -> Iterator[Path]:
    """A folder beside the target for what is computed before the header can be written; gone afterwards."""
    with writing(target), tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        yield Path(folder)


def _fold(
    model: ModelData, mode: str, source: Path, calibration: str | os.PathLike[str] | None, spool: Path, show: bool
) -> tuple[ModelData, list[LayerReport], str]:
    """The model with its folds, which wait in files, the reports, and what the predicted errors rest on."""
    attention, moments, basis = Attention.of(model), None, "no text: white activations assumed"
    if calibration != "none":
        plain = _runnable(source, show)
        ids = text_ids(plain, calibration)
        if ids is not None:
            moments, n_tokens = text_moments(plain, model, mode, ids, show_progress=show)
            basis = f"{n_tokens} tokens of {'the built-in text' if calibration is None else Path(calibration).name}"
    layers: list[LayerReport] = []
    folds: list[Tensor] = []

    def keep(fold: Fold) -> None:
        at = moments[fold.layer] if moments else isotropic_moments(model, fold)
        layers.append(LayerReport(fold.layer, mode, fold.cond, predicted_errors(fold, at)))
        file, name, shape = spool / str(fold.layer), f"blk.{fold.layer}.{FOLDED[mode]}", fold.weight.T.shape
        file.write_bytes(stored(fold).data)
        folds.append(Tensor(name, shape, F32, lambda: np.memmap(file, np.float32, "r", shape=shape).view(np.uint8)))

    each_fold(model, attention, mode, keep, show_progress=show)
    return model.with_tensors(*folds), layers, basis


def _fold_fields(layers: list[LayerReport], basis: str) -> dict[str, GGUFValue]:
    columns = {"cond": [layer.cond for layer in layers]}
    columns |= {f"error_{name}": [layer.errors[name] for layer in layers] for name in ROUNDOFF}
    fields = {key: array(values, GGUFValueType.FLOAT32) for key, values in columns.items()}
    fields["calibration"] = string(basis)
    return {f"slimrt.fold.{key}": value for key, value in fields.items()}


def _error_warnings(layers: list[LayerReport], cache_type: str) -> list[str]:
    """One sentence when the stored row's rounding is amplified too much, naming the worst layer."""
    worst = max(layers, key=lambda layer: layer.errors[cache_type])
    error = worst.errors[cache_type]
    if not verdict(error):
        return []
    limit = TOO_LARGE if error > TOO_LARGE else CAUTION
    n_over = sum(layer.errors[cache_type] > limit for layer in layers)
    amplified = "V" if worst.mode == "k" else "K"
    return [
        f"cache mode '{worst.mode}' in {cache_type}: predicted error of {amplified} {error:.1%} in layer {worst.layer} "
        f"(over {limit:.0%} in {n_over} of {len(layers)} layers): {verdict(error)}"
    ]


def source_hash(source: Path, show_progress: bool = False) -> str:
    """Return "sha256:..." over the bytes of a file, or over names and bytes of a directory's model files."""
    files = [source] if source.is_file() else model_files(source)
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


def model_files(directory: Path) -> list[Path]:
    """The files of a Hugging Face directory that a conversion may read, by name."""
    return sorted(file for pattern in _MODEL_FILES for file in directory.glob(pattern) if file.is_file())


def cache_directory() -> Path:
    """Where converted directories are kept: $SLIMRT_CACHE_DIR, else slimrt in $XDG_CACHE_HOME, else ~/.cache/slimrt."""
    own, xdg = os.environ.get("SLIMRT_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(xdg) if xdg else Path.home() / ".cache") / "slimrt"


def hf_cache_gguf(
    directory: str | os.PathLike[str], *, progress: bool = True, on_warning: Callable[[str], object] | None = None
) -> Path:
    """Convert a Hugging Face directory once, and return the GGUF file in the user's cache.

    The file is named after the names, sizes and modification times of the directory's files and the version of this
    converter, so a changed directory is converted again. Processes that convert at once each write their own file
    beside the target; whichever is last replaces it with equal content. on_warning is called with what a user should
    know about the directory.

    Raises:
        ModelFormatError, UnsupportedError: the directory cannot be converted.
        OSError: the disk is full, the cache cannot be written.
    """
    source = Path(directory).resolve()
    digest = hashlib.sha256(f"{_CONVERTER}\0{source}".encode())
    for file in model_files(source):
        status = file.stat()
        digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    target = cache_directory() / f"{source.name}-{digest.hexdigest()[:16]}.gguf"
    if not target.is_file():
        model, warnings = read_hf(source)
        for warning in warnings if on_warning else ():
            on_warning(warning)
        target.parent.mkdir(parents=True, exist_ok=True)
        version = {"slimrt.format_version": uint32(FORMAT_VERSION)}
        write_gguf(target, model.with_metadata(version), show_progress=progress and bars.wanted(None))
    return target


def _runnable(source: Path, show_progress: bool) -> Path:
    """A GGUF file that the engine can load in place of the source."""
    return hf_cache_gguf(source, progress=show_progress) if source.is_dir() else source
