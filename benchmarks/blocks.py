"""Random weights as the bytes of a GGUF type.

Mean 0, standard deviation 1 / sqrt(cols): activations stay of order 1. Blocks are made directly, not quantised: each
field is random within what a quantiser would write.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_UNIFORM = 12**0.5  # 1 / the standard deviation of a uniform variable of width 1


def _f16(value: float | np.floating) -> Bytes:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def q8_0(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """32 elements: f16 scale, 32 int8."""
    blocks = np.empty((rows, cols // 32, 34), np.uint8)
    blocks[..., :2] = _f16(_UNIFORM / 2 / 127 / cols**0.5)
    blocks[..., 2:] = rng.integers(-127, 128, blocks[..., 2:].shape, np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def q4_0(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """32 elements: f16 scale, 16 bytes of (-8..7) + 8."""
    blocks = rng.integers(0, 256, (rows, cols // 32, 18), np.uint8)
    blocks[..., :2] = _f16(_UNIFORM / 16 / cols**0.5)
    return blocks.reshape(rows, -1)


def q5_0(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """32 elements: f16 scale, 4 bytes of fifth bits, 16 of the others of (-16..15) + 16."""
    blocks = rng.integers(0, 256, (rows, cols // 32, 22), np.uint8)
    blocks[..., :2] = _f16(_UNIFORM / 32 / cols**0.5)
    return blocks.reshape(rows, -1)


def q4_1(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """32 elements, d * (0..15) + m: f16 d, f16 m, which centres them on 0, 16 bytes."""
    blocks = rng.integers(0, 256, (rows, cols // 32, 20), np.uint8)
    d = _UNIFORM / 16 / cols**0.5
    blocks[..., :2], blocks[..., 2:4] = _f16(d), _f16(-7.5 * d)
    return blocks.reshape(rows, -1)


def q2_k(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """256 elements, d * scale * (0..3) - dmin * min: 16 bytes of a scale and a min of 4 bits, 64 of codes, f16 d, dmin.

    min equals scale and dmin is 1.5 d, which centres each sub-block on 0.
    """
    blocks = rng.integers(0, 256, (rows, cols // 256, 84), np.uint8)
    blocks[..., :16] = 17 * rng.integers(8, 16, (rows, cols // 256, 16), np.uint8)
    d = _UNIFORM / 4 / 11.7 / cols**0.5  # 11.7: root mean square of 8..15
    blocks[..., 80:82], blocks[..., 82:] = _f16(d), _f16(1.5 * d)
    return blocks.reshape(rows, -1)


def q3_k(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """256 elements, d * (-32..31) * (-4..3): 32 bytes of third bits, 64 of the others, 16 scales of 6 bits, f16 d."""
    blocks = rng.integers(0, 256, (rows, cols // 256, 110), np.uint8)
    blocks[..., 108:] = _f16(_UNIFORM / 8 / 18.5 / cols**0.5)  # 18.5: root mean square of -32..31
    return blocks.reshape(rows, -1)


def q4_k(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """256 elements, d * scale * (0..15) - dmin * min: f16 d, f16 dmin, 8 scales and 8 mins of 6 bits, 128 bytes.

    min equals scale and dmin is 7.5 d, which centres each sub-block on 0.
    """
    blocks = np.empty((rows, cols // 256, 144), np.uint8)
    d = _UNIFORM / 16 / 48.4 / cols**0.5  # 48.4: root mean square of 32..63
    blocks[..., 0:2], blocks[..., 2:4] = _f16(d), _f16(7.5 * d)
    scales = rng.integers(32, 64, (rows, cols // 256, 8), np.uint8)
    low, high = scales[..., :4], scales[..., 4:]
    blocks[..., 4:8] = blocks[..., 8:12] = low | (high >> 4) << 6
    blocks[..., 12:16] = (high & 15) | (high & 15) << 4
    blocks[..., 16:] = rng.integers(0, 256, (rows, cols // 256, 128), np.uint8)
    return blocks.reshape(rows, -1)


def q6_k(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """256 elements, d * scale * (-32..31): 128 low and 64 high bytes, 16 int8 scales, f16 d."""
    blocks = rng.integers(0, 256, (rows, cols // 256, 210), np.uint8)
    scales = rng.integers(8, 32, (rows, cols // 256, 16), np.int8)
    scales[..., ::2] *= -1  # the mean of -32..31 is not 0; alternating signs make it so
    blocks[..., 192:208] = scales.view(np.uint8)
    blocks[..., 208:] = _f16(_UNIFORM / 64 / 20.7 / cols**0.5)  # 20.7: root mean square of 8..31
    return blocks.reshape(rows, -1)


def _uniform(rng: np.random.Generator, rows: int, cols: int) -> NDArray[np.float32]:
    return (rng.random((rows, cols), np.float32) - np.float32(0.5)) * np.float32(_UNIFORM / cols**0.5)


def f32(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    return _uniform(rng, rows, cols).view(np.uint8)


def f16(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    return _uniform(rng, rows, cols).astype(np.float16).view(np.uint8)


def bf16(rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """The upper half of a float32 (cut, not rounded)."""
    return np.ascontiguousarray(_uniform(rng, rows, cols).view(np.uint16)[:, 1::2]).view(np.uint8)


TYPES: dict[gguf.GGMLQuantizationType, Callable[[np.random.Generator, int, int], Bytes]] = {
    gguf.GGMLQuantizationType.Q8_0: q8_0,
    gguf.GGMLQuantizationType.Q4_0: q4_0,
    gguf.GGMLQuantizationType.Q5_0: q5_0,
    gguf.GGMLQuantizationType.Q4_1: q4_1,
    gguf.GGMLQuantizationType.Q2_K: q2_k,
    gguf.GGMLQuantizationType.Q3_K: q3_k,
    gguf.GGMLQuantizationType.Q4_K: q4_k,
    gguf.GGMLQuantizationType.Q6_K: q6_k,
    gguf.GGMLQuantizationType.F32: f32,
    gguf.GGMLQuantizationType.F16: f16,
    gguf.GGMLQuantizationType.BF16: bf16,
}


def random_rows(type: gguf.GGMLQuantizationType, rng: np.random.Generator, rows: int, cols: int) -> Bytes:
    """uint8 [rows, bytes of a row], made 4096 rows at a time to bound what lies in memory beside it."""
    return np.concatenate([TYPES[type](rng, min(4096, rows - first), cols) for first in range(0, rows, 4096)])
