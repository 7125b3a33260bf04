# SPDX-License-Identifier: Apache-2.0
"""slimrt.imatrix: makes an importance matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.folding.calibrate import DEFAULT_TEXT
from slimrt.modelfile.gguf import opened
from slimrt.modelfile.hub import located
from slimrt.modelfile.imatrix import Squares, write_imatrix
from slimrt.modelfile.reading import runnable, source_files
from slimrt.modelfile.source import ModelSource
from slimrt.modelfile.text import file_ids
from slimrt.plumbing import progress as bars
from slimrt.plumbing.arguments import positive
from slimrt.plumbing.files import check_target, check_utf8
from slimrt.plumbing.keywords import named

_CHUNK = 512  # tokens, as in llama.cpp


@dataclass(frozen=True)
class ImatrixReport:
    """The result of slimrt.imatrix.

    Attributes:
        path: the new file. matrices: how many it has. tokens, chunks: of the text that was run.
        warnings: for the user.
    """

    path: Path
    matrices: int
    tokens: int
    chunks: int
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}

    def __str__(self) -> str:
        chunks = f"{self.chunks} chunk{'s' * (self.chunks != 1)}"
        lines = [f"{self.path}: {self.matrices} matrices, from {self.tokens} tokens in {chunks}"]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


@named
def imatrix(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    text: str | os.PathLike[str] | None = None,
    *,
    chunk: int | None = None,
    chunks: int | None = None,
    n_threads: int | None = None,
    progress: bool | None = None,
    overwrite: bool = True,
) -> ImatrixReport:
    """Make an importance matrix: for each weight matrix of a decoder but the output's the mean squares of the columns
    of its input over a text, of experts those of the tokens that each takes. For `slimrt.convert` and llama.cpp.

    The text is run on the CPU, in chunks that do not see each other. Best is the model unquantised.

    Args:
        src: the model, as for `slimrt.convert`.
        out: the GGUF file to write. It appears, or is replaced, only when it is complete.
        text: a UTF-8 file; None: the built-in text.
        chunk: tokens of a chunk; None: 512, or the model's context where that is less. A remainder that does not fill
            one is left out, unless it is all there is.
        chunks: at most so many; None: all of the text.
        n_threads: None: one for each physical (or big) core.
        progress: show a progress bar on stderr; None: if it is a terminal.
        overwrite: replace an existing file.

    Raises:
        ValueError: chunk is below 2 or longer than the model's context, chunks below 1; the text is empty or not UTF-8;
            `out` is the source or the text.
        FileExistsError: `out` exists and overwrite is false.
        UnsupportedError: the model has an encoder or no tokenizer, or is not supported.
        ModelFormatError: what a weight is multiplied by is not finite, or as `slimrt.convert`. OSError: as there.
    """
    source, target = located(src, bars.wanted(progress)), Path(out)
    _check(source, target, text, overwrite)
    gguf = runnable(source, bars.wanted(progress))
    plan = core.plan(str(gguf))
    if plan["encoder"] is not None:
        raise UnsupportedError("an importance matrix is of a decoder: this model has an encoder, whose inputs no text "
                               "alone makes")  # fmt: skip
    n_ctx = plan["n_ctx_train"]
    chunk = min(_CHUNK, n_ctx) if chunk is None else positive("chunk", chunk)
    if not 2 <= chunk <= n_ctx:
        raise ValueError(f"chunk must be from 2 to the model's context of {n_ctx} tokens, got {chunk}")
    limit = None if chunks is None else chunk * positive("chunks", chunks)
    dataset = DEFAULT_TEXT if text is None else Path(text)
    parts = _parts(ModelSource(gguf, show_progress=bars.wanted(progress)), dataset, chunk, limit)
    squares = _squares(gguf, parts, n_threads, bars.wanted(progress))
    write_imatrix(target, squares, dataset.name, len(parts), chunk)
    return ImatrixReport(target, len(squares), sum(map(len, parts)), len(parts), tuple(warnings_of(squares)))


def _check(source: Path, target: Path, text: str | os.PathLike[str] | None, overwrite: bool) -> None:
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or directory")
    if text is not None and not Path(text).is_file():
        raise FileNotFoundError(f"{text}: no such text file")
    check_target(target)
    check_utf8(target)
    if not target.exists():
        return
    if any(target.samefile(file) for file in [*source_files(source), *([] if text is None else [Path(text)])]):
        raise ValueError(f"{target} is the model or the text itself; write to another file")
    if not overwrite:
        raise FileExistsError(f"{target} exists: name another file, or replace it: --force, overwrite=True in Python")


def _parts(model: ModelSource, text: Path, chunk: int, limit: int | None) -> list[NDArray[np.int32]]:
    """The chunks of a text's first tokens. The first tokens of each are those that the tokenizer puts before a text, as
    in llama.cpp.

    Raises:
        ValueError: there is no text. Others as `file_ids`.
    """
    ids, start = file_ids(model.tokenizer, text, limit), model.tokenizer.with_bos([])
    if len(ids) == 0:
        raise ValueError(f"{text}: no text")
    whole = max(len(ids) - len(ids) % chunk, min(len(ids), chunk))
    parts = [ids[at : min(at + chunk, whole)].copy() for at in range(0, whole, chunk)]
    for part in parts:
        part[: len(start)] = start
    return parts


def _squares(gguf: Path, parts: list[NDArray[np.int32]], n_threads: int | None, show: bool) -> Squares:
    """Sums of squares and counts over all parts, by matrix. ModelFormatError: one is no finite float32."""
    baseline = core.baseline(str(gguf))  # a cache mode without folded weights
    engine = core.Engine(opened(gguf), n_ctx=len(parts[0]), cache=baseline, device="cpu", n_threads=n_threads or 0)
    found: dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
    done, n_tokens = 0, sum(map(len, parts))
    with bars.bar(show, n_tokens, "measuring", "token") as update:
        for part in parts:
            for name, (sums, counts) in engine.input_squares(part).items():
                before = found.get(name, (0, 0))
                found[name] = (before[0] + sums, before[1] + counts)
            done += len(part)
            update(done, n_tokens)
    for name, (sums, _) in found.items():
        if not (sums < np.finfo(np.float32).max).all():
            raise ModelFormatError(f"{gguf}: what '{name}' is multiplied by on this text is not finite, or too large")
    return found


def warnings_of(squares: Squares) -> Iterator[str]:
    """On experts that no token took."""
    unseen, experts = 0, 0
    for _, counts in squares.values():
        experts += len(counts) * (len(counts) > 1)
        unseen += int((counts == 0).sum())
    if unseen:
        yield (f"{unseen} of {experts} matrices of experts were given no token, and their columns will count alike: a "
               "longer text would reach more of them")  # fmt: skip
