# SPDX-License-Identifier: Apache-2.0
"""What modes x and e multiply queries by, W_K transposed: in which type it is held, and what that changes."""

from __future__ import annotations

import numpy as np
import pytest

import slimrt
from conftest import decode, open_engine
from gguf_shapes import Shape, write_random

SHAPE = Shape(d=64, n_layers=2, n_heads=4, n_ctx=64, d_ff=128, n_vocab=96, arch="gpt2")
IDS = np.random.default_rng(3).integers(3, 96, 24)
NUMBERS = SHAPE.n_layers * SHAPE.n_heads * SHAPE.d * SHAPE.dk


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model by the type of its weights."""
    folder = tmp_path_factory.mktemp("absorbed")
    exact, made = write_random(folder / "exact.gguf", SHAPE), {}
    for outtype in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        made[outtype] = folder / f"{outtype}.gguf"
        slimrt.convert(exact, made[outtype], outtype=outtype, progress=False)
    return made


def derived_bytes(path, rows: str) -> int:
    """Beyond what kv derives."""
    held = [open_engine(path, mode, rows, n_ctx=32).memory()["derived"] for mode in ("x", "kv")]
    return held[0] - held[1]


def test_it_has_the_type_of_the_weight_and_f16_in_place_of_blocks(files):
    taken = {name: derived_bytes(path, "f16") - derived_bytes(files["f32"], "f16") for name, path in files.items()}
    assert taken == {"f32": 0} | dict.fromkeys(("f16", "bf16", "q8_0", "q4_0"), -2 * NUMBERS)
    assert derived_bytes(files["q8_0"], "f32") == derived_bytes(files["f32"], "f32")
    assert derived_bytes(files["f16"], "f32") == derived_bytes(files["f32"], "f32") - 2 * NUMBERS


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_rows_and_weights_in_f16_say_what_those_in_f32_say(files, outtype):
    """Within a few roundings of f16; rows of f32 what kv says. Products of blocks round activations, and more."""
    wanted = decode(open_engine(files[outtype], "kv", "f32", n_ctx=32), IDS, 12)
    exact = decode(open_engine(files[outtype], "x", "f32", n_ctx=32), IDS, 12)
    found = decode(open_engine(files[outtype], "x", "f16", n_ctx=32), IDS, 12)
    blocks, largest = outtype in ("q8_0", "q4_0"), np.abs(wanted).max()
    assert np.abs(exact - wanted).max() < (2e-2 if blocks else 2e-5) * largest
    assert np.abs(found - exact).max() < (2e-2 if blocks else 4e-3) * largest


def test_numbers_beyond_f16_are_refused(files, tmp_path):
    import gguf

    path = tmp_path / "huge.gguf"
    path.write_bytes(files["q8_0"].read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    weight = next(t for t in reader.tensors if t.name == "blk.1.attn_qkv.weight")
    scales = weight.data.reshape(-1, 34)[:, :2].view(np.float16)
    scales[scales.shape[0] // 3 : 2 * scales.shape[0] // 3] = 60000  # of K
    reader.data.flush()
    with pytest.raises(slimrt.UnsupportedError, match="beyond the range of f16"):
        open_engine(path, "x", "f16", n_ctx=32)
    open_engine(path, "x", "f32", n_ctx=32)
