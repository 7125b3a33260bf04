# SPDX-License-Identifier: Apache-2.0
"""The error that a cache causes in V and in attention's output: predicted, and measured on held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from slimrt import core
from slimrt.folding.attention import Attention
from slimrt.folding.exact import fold_layer, stored
from slimrt.folding.noise import ROUNDOFF
from slimrt.folding.planes import Plane
from slimrt.folding.readback import Reader
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import GgufPath, opened, read_gguf


@dataclass(frozen=True)
class Errors:
    """Relative errors, root mean square.

    Attributes:
        value: of V, over tokens: sqrt(E|v^ - v|^2 / E|v|^2).
        output: of the heads' outputs, before W_O, over the query tokens.
    """

    value: float
    output: float

    @property
    def size(self) -> float:
        """The error that a target bounds: the larger of that of V and that of attention's output over sqrt(2).

        V alone is not enough, since a row may preserve V but not the scores. The factor allows errors of scores to
        contribute as much to the output as those of V: with both at the target, the output's error is sqrt(2) times it.
        """
        return max(self.value, self.output / sqrt(2))


def predicted(reader: Reader) -> Errors:
    """Errors expected from second moments, noise and the softmax weights of the calibration text."""
    return Errors(reader.value_error(), reader.output_error())


def measured(reader: Reader, windows: list[Window]) -> Errors | None:
    """Errors from actually rounding the rows of held-out windows; None if there are none."""
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


def measure_error_of_v(path: GgufPath, ids: np.ndarray, mode: str = "k") -> dict[str, np.ndarray]:
    """Measure the error that rounding causes with an exact fold on a text, for every float type.

    Rows of mode "k" (or "v") are computed in float32 from the model's own activations, rounded to the type, multiplied
    by the stored float32 fold, and compared with the projection in float64.

    Args:
        path: a GGUF file, folded or not.
        ids: token ids int32 [n], n at most the model's context.

    Returns:
        Type name -> relative error of V (of K in mode "v") in each layer, float64 [n_layers]; 0 for layers that read
        another layer's rows.
    """
    file = opened(path)
    model = read_gguf(file)
    attention = Attention.of(model)
    attention.require(mode)
    engine = core.Engine(file, n_ctx=len(ids), cache="kv", cache_type_k="f32", cache_type_v="f32")
    inputs = engine.attention_inputs(np.asarray(ids, np.int32))
    errors = {name: np.zeros(attention.n_layers) for name in ROUNDOFF}
    for layer in attention.owning():
        fold = fold_layer(model, attention, mode, layer)
        weight, row = stored(fold).T, inputs[layer] @ fold.w_in.astype(np.float32)
        exact = inputs[layer].astype(np.float64) @ fold.w_out
        for name in ROUNDOFF:
            off = np.linalg.norm(Plane(attention.kv_width, 1, name).round(row) @ weight - exact)
            errors[name][layer] = off / np.linalg.norm(exact)
    return errors
