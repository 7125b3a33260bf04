# SPDX-License-Identifier: Apache-2.0
"""What a cache costs: the error of V and of attention's output, measured on text that had no part in the fold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np

from .attention import Attention, LayerWeights
from .gguf_file import read_gguf
from .noise import ROUNDOFF
from .readers import KReader, Reader, Sample, VReader
from .rotation import Rotation
from .window import Window


@dataclass(frozen=True)
class Errors:
    """Relative errors, root mean square.

    Attributes:
        value: of V, over tokens: sqrt(E|v^ - v|^2 / E|v|^2).
        output: of what the heads give, before W_O, over the tokens that query.
    """

    value: float
    output: float

    def within(self, target: float) -> bool:
        return self.value <= target and self.output <= target


def predicted(reader: Reader) -> Errors:
    """What second moments, noise and the softmax weights of the calibration text let expect."""
    return Errors(reader.value_error(), reader.output_error())


def measured(reader: Reader, windows: list[Window]) -> Errors | None:
    """What the real rounding of real rows does to other text; None when there is none."""
    if not windows:
        return None
    value, output = np.zeros(2), np.zeros(2)
    for window in windows:
        keys, values = reader.read(window)
        value += np.square(values - window.exact_v).sum(), np.square(window.exact_v).sum()
        output += window.output_error(keys, values)
    return Errors(_relative(value), _relative(output))


def _relative(sums: np.ndarray) -> float:
    return sqrt(sums[0] / sums[1]) if sums[1] else 0.0
