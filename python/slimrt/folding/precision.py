# SPDX-License-Identifier: Apache-2.0
"""What a cache costs: the error of V and of attention's output, measured on text that had no part in the fold."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

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
        output: of what the heads give, before W_O, over the tokens that query.
    """

    value: float
    output: float

    @property
    def size(self) -> float:
        """What a target bounds: the error of V, and of attention's output over sqrt(2).

        V alone would not do, since a row may keep V and lose the scores. Errors of scores may cost the output as much
        again as those of V, and no more: with both at the target, it is off by sqrt(2) of it.
        """
        return max(self.value, self.output / sqrt(2))


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


def measure_error_of_v(path: GgufPath, ids: np.ndarray, mode: str = "k") -> dict[str, np.ndarray]:
    """Return what rounding does to an exact fold on a text, for every float type.

    The real rows of mode "k" (or "v") are computed in float32 from the model's own activations, rounded to the type,
    multiplied by the stored float32 fold, and compared with the projection in float64.

    Args:
        path: a GGUF file, folded or not.
        ids: token ids int32 [n], n at most the model's context.

    Returns:
        Type name -> relative error of V (of K in mode "v") in each layer, float64 [n_layers]; 0 where a layer reads
        another's rows.
    """
    from slimrt import core

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
