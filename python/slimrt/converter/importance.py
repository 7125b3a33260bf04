# SPDX-License-Identifier: Apache-2.0
"""What the columns of a model's weight matrices count when they are quantised, from an importance matrix."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import ModelFormatError
from slimrt.modelfile.gguf import ModelData, Tensor, string, uint32
from slimrt.modelfile.imatrix import Imatrix

_KEYS = "quantize.imatrix."  # llama.cpp's keys of what a file was quantised with
_LAYER = re.compile(r"(.*\bblk)\.(\d+)\.")
# Of the mean of a matrix: what the text hardly showed may come up in another text, and costs the others little.
_LEAST, _MOST = 1e-4, 2.0**20


@dataclass(frozen=True)
class Importance:
    """The importance matrix of one model. Without a matrix all columns count alike."""

    matrix: Imatrix | None = None

    @classmethod
    def of(cls, matrix: Imatrix, model: ModelData) -> Importance:
        """The matrix, checked to be of this model: it has layers, matrices and widths of it.

        Raises:
            ModelFormatError: it is another model's.
        """
        others = cls(matrix).unknown_to(model)
        if len(others) == len(matrix.means):
            raise ModelFormatError(
                f"{matrix.path}: of another model: none of its {len(others)} matrices is in this one, which has no "
                f"'{others[0]}'"
            )
        layers = {found[0] for name in model.tensors if (found := _LAYER.match(name))}
        for name in others:
            if (found := _LAYER.match(name)) and found[0] not in layers:
                raise ModelFormatError(f"{matrix.path}: of another model: it has '{name}', and this one no such layer")
        for name, means in matrix.means.items():
            tensor, n = model.tensors.get(name), len(means)
            if tensor is not None and n != _columns(tensor):
                raise ModelFormatError(
                    f"{matrix.path}: of another model: '{name}' has {n} numbers, and the matrix {_columns(tensor)} "
                    "columns"
                )
        return cls(matrix)

    def __bool__(self) -> bool:
        return self.matrix is not None

    def covers(self, name: str) -> bool:
        """Whether it says anything of a matrix."""
        return self.matrix is not None and name in self.matrix.means

    def unknown_to(self, model: ModelData) -> list[str]:
        """Names of its matrices that a model does not have."""
        return [] if self.matrix is None else [name for name in self.matrix.means if name not in model.tensors]

    def columns(self, tensor: Tensor) -> NDArray[np.float32] | None:
        """What each column of a matrix counts, [experts or 1, columns], 1 in the mean; None: all alike."""
        if self.matrix is None or tensor.name not in self.matrix.means:
            return None
        means = self.matrix.means[tensor.name].reshape(-1, tensor.shape[-1])
        mean = means.mean(axis=1, keepdims=True)
        shares = np.where(mean > 0, means / np.where(mean > 0, mean, 1), 1)
        return np.clip(shares, _LEAST, _MOST).astype(np.float32)

    def without(self, wanted: Callable[[str], bool]) -> Importance:
        """The same without the matrices of some names."""
        if self.matrix is None:
            return self
        kept = {name: means for name, means in self.matrix.means.items() if not wanted(name)}
        return Importance(replace(self.matrix, means=kept))

    def said_in(self, model: ModelData) -> ModelData:
        """The model with metadata of this matrix in place of an earlier one's, as llama.cpp writes them; but the file's
        name has no folder."""
        metadata = {key: value for key, value in model.metadata.items() if not key.startswith(_KEYS)}
        if self.matrix is not None:
            metadata[f"{_KEYS}file"] = string(self.matrix.path.name)
            metadata[f"{_KEYS}entries_count"] = uint32(len(self.matrix.means))
            if self.matrix.dataset:
                metadata[f"{_KEYS}dataset"] = string(self.matrix.dataset)
            if self.matrix.chunks:
                metadata[f"{_KEYS}chunks_count"] = uint32(self.matrix.chunks)
        return replace(model, metadata=metadata)


NONE = Importance()


def _columns(tensor: Tensor) -> int:
    """Columns of all matrices that a tensor stacks."""
    return int(np.prod(tensor.shape, dtype=np.int64)) // (tensor.shape[-2] if len(tensor.shape) > 1 else 1)
