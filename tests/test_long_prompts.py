# SPDX-License-Identifier: Apache-2.0
"""Long prompts, whose 16-bit weights are multiplied as 14-bit integers where the processor can, against float64.

The goldens' prompts have 64 tokens and stay in float32, so the parity tests never come here.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import slimrt
from reference import Layer, Reference

MODELS = Path(__file__).parent.parent / "models"
N_PROMPT = 192  # products of 128 tokens and more are multiplied so


def to_14_bits(weight: np.ndarray) -> np.ndarray:
    """Each 32 of a row as whole multiples of their largest / 8191."""
    groups = weight.reshape(len(weight), -1, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 8191
    return np.where(step > 0, np.rint(groups / np.where(step > 0, step, 1)) * step, 0).reshape(weight.shape)


def with_rounded_weights(reference: Reference) -> Reference:
    """The same model, the matrices of its layers in 14 bits."""

    def rounded(layer: Layer) -> Layer:
        values = {f.name: getattr(layer, f.name) for f in fields(layer)}
        return replace(layer, **{n: to_14_bits(v) for n, v in values.items() if np.ndim(v) == 2})

    return Reference(replace(reference.w, layers=[rounded(layer) for layer in reference.w.layers]))


@pytest.mark.parametrize("outtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["tale-llama", "tale-gpt2"])
def test_long_prompt_of_16_bit_weights(name, outtype, tmp_path):
    """As far from float64 as rounding to 14 bits explains, and no further.

    Activations are rounded like the weights, which doubles the energy of the error of each product; a third of that
    again covers what float32 adds. Chance averages out over 192 rows of logits.
    """
    path = tmp_path / "model.gguf"
    slimrt.convert(MODELS / f"{name}.gguf", path, outtype=outtype, progress=False)
    with slimrt.Model(path, cache="kv", cache_type="f32", n_ctx=N_PROMPT) as model, model.session() as session:
        ids = model.tokenize((MODELS / "heldout.txt").read_text()[:4000])[:N_PROMPT]
        got = session.append(ids)
        assert len(ids) == N_PROMPT
    reference = Reference(path)
    wanted = reference.logits(ids)
    predicted = np.linalg.norm(with_rounded_weights(reference).logits(ids) - wanted)
    assert np.linalg.norm(got - wanted) < 1.33 * np.sqrt(2) * predicted
    assert predicted < 2e-3 * np.linalg.norm(wanted)
