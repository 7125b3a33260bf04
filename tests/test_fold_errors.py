# SPDX-License-Identifier: Apache-2.0
"""The report can be believed: what one text predicts is what rounding does to another, on every shipped model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slimrt.folding.attention import Attention
from slimrt.folding.calibrate import Calibration, calibrated, text_ids
from slimrt.folding.fold import reader
from slimrt.folding.precision import measured, predicted
from slimrt.folding.weights import fold_value_bias
from slimrt.folding.window import Window
from slimrt.modelfile.gguf import read_gguf
from slimrt.modes import CACHE_TYPES, default_residual

pytestmark = pytest.mark.unsanitized  # NumPy most of the time; the core is tested by others

SHIPPED = Path(__file__).parent.parent / "models"
# predicted over measured, either way; in f32, where sums round and wide vectors sum better, at least 1 / it
WITHIN = 1.5
FIRST_ORDER = 0.01  # errors of attention's output up to which first order has to hold: beyond, weights move as a whole


@pytest.fixture(scope="module")
def known(request):
    """What the calibration text that ships with the models says about one of them."""
    path = SHIPPED / f"{request.param}.gguf"
    model = read_gguf(path)
    with calibrated(
        path, fold_value_bias(model, Attention.of(model)), SHIPPED / "calibration.txt", show_progress=False
    ) as found:
        yield path, found


def other_text(path: Path, known: Calibration) -> list[list[Window]]:
    """Windows of heldout.txt in each layer."""
    ids = text_ids(path, SHIPPED / "heldout.txt", 3000)
    with calibrated(path, known.model, ids, show_progress=False) as found:
        return [found.layer(layer)[0].windows for layer in range(known.attention.n_layers)]


LANGUAGE_MODELS = sorted(path.name.removesuffix(".golden.json") for path in SHIPPED.glob("*.golden.json"))


@pytest.mark.parametrize(
    "known",  # GPT-2's has the most modes, the hard one the largest conditions
    [
        name if name in ("tale-gpt2", "tale-hard") else pytest.param(name, marks=pytest.mark.nightly)
        for name in LANGUAGE_MODELS
    ],
    indirect=True,
)
def test_predicted_errors_are_those_of_another_text(known):
    path, calibration = known
    attention, off = calibration.attention, []
    for layer, windows in enumerate(other_text(path, calibration)):
        sample, held_out = calibration.layer(layer)
        for mode in attention.predictable():
            for type_name in CACHE_TYPES:
                usual = default_residual(mode, type_name, attention.kv_width)
                for rank, residual_type in {usual, (0, "")} if mode == "k+r" else {usual}:
                    made = reader(sample, mode, type_name, rank, residual_type, half=True)
                    expected, most = predicted(made), np.inf if type_name == "f32" else WITHIN
                    for text, found in (("same", measured(made, held_out)), ("other", measured(made, windows))):
                        what = (layer, mode, type_name, rank, text, expected, found)
                        if not 1 / WITHIN < expected.value / found.value < most:
                            off.append(("V", *what))
                        if expected.output < FIRST_ORDER and not 1 / WITHIN < expected.output / found.output < most:
                            off.append(("output", *what))
    assert not off, "\n".join(map(str, off))


@pytest.mark.parametrize("known", ["tale-gpt2"], indirect=True)
def test_without_a_text_it_is_a_guess_of_the_right_size(known):
    path, calibration = known
    blind = Calibration("no text", calibration.model, calibration.attention, [])
    for layer in range(2):
        (sample, none), (_, held_out) = blind.layer(layer), calibration.layer(layer)
        assert none == []
        for mode, type_name in (("kv", "q8"), ("x", "q8"), ("k", "f16"), ("k+r", "q8")):
            made = reader(sample, mode, type_name, half=True)
            assert 0.1 < made.value_error() / measured(made, held_out).value < 10, (layer, mode)
            assert np.isfinite(made.output_error())
