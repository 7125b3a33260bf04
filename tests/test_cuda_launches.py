# SPDX-License-Identifier: Apache-2.0
"""How many kernels a step of one token starts on a CUDA device, a layer; the emulator counts them (tests/emulated.sh).

Each costs some two microseconds at decoding, whatever it does: of a small model that is half of the time.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from conftest import open_engine
from gguf_shapes import Shape, write_random
from slimrt import _core

MODEL = Shape(d=256, n_layers=1, n_heads=4, n_ctx=128, d_ff=512, n_vocab=64)  # of sizes that have the fast kernels
launches = getattr(ctypes.CDLL(_core.__file__), "slimrt_emulated_launches", None)
pytestmark = pytest.mark.skipif(launches is None, reason="counted by the emulator of CUDA")


def of_a_step(path, mode: str) -> int:
    engine = open_engine(path, mode, "f16", device="cuda")
    sequence = engine.new_sequence()
    engine.append([(sequence, np.arange(3, 60, dtype=np.int32))])
    for _ in range(3):  # by single calls, recorded, and played
        before = launches()
        engine.append([(sequence, np.asarray([5], np.int32))])
    return launches() - before


@pytest.mark.parametrize(("mode", "n"), [("kv", 7), ("k", 8)])
def test_kernels_of_a_layer(mode, n, tmp_path):
    one, two = (of_a_step(write_random(tmp_path / f"{n}.gguf", replace(MODEL, n_layers=n)), mode) for n in (1, 2))
    assert two - one == n
