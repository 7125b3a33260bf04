# SPDX-License-Identifier: Apache-2.0
"""Stored weights of any type: random bytes, and what the gguf package reads from them."""

from __future__ import annotations

import gguf
import numpy as np

from reference_formats import rounded
from slimrt._core import ops

PLAIN = ["f32", "f16", "bf16"]
# Quantised types: where a block keeps its float16 numbers (the rest of a block may be any bits).
HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "mxfp4": (),
    "tq1_0": (52,),
    "tq2_0": (64,),
}


def ggml(type_name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type_name.upper()]


def block_size(type_name: str) -> int:
    return 256 if type_name in HELD else gguf.GGML_QUANT_SIZES[ggml(type_name)][0]


def random_blocks(type_name: str, rows: int, cols: int, random: np.random.Generator, size: float) -> np.ndarray:
    """Bytes [rows, row bytes] of a quantised type: any bits, but for scales of about `size`."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[ggml(type_name)]
    raw = random.integers(0, 256, (rows, cols // block, n_bytes), dtype=np.uint8)
    for at in HALVES[type_name]:
        scale = (size * random.normal(size=raw.shape[:2])).astype(np.float16)
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    if type_name == "mxfp4":  # the block's power of two
        raw[:, :, 0] = random.integers(118, 133, raw.shape[:2]) + round(np.log2(size))
    return raw.reshape(rows, -1)


# What types are held as that only files have -> such a type, what the codes stand for, the unit.
HELD = {
    "iq2_n": ("iq2_s", [8, 25, 43, 43, 43, 43, 43, 43], 1 / 8),
    "iq3_xxs_n": ("iq3_xxs", [4, 12, 20, 28, 36, 44, 52, 62], 1 / 4),
    "iq3_s_n": ("iq3_s", [1, 3, 5, 7, 9, 11, 13, 15], 1.0),
}


def dequantised(raw: np.ndarray, type_name: str) -> np.ndarray:
    """What is read from bytes [rows, row bytes], float64 [rows, cols]."""
    if type_name not in HELD:
        return gguf.quants.dequantize(raw, ggml(type_name)).astype(np.float64)
    _, magnitudes, unit = HELD[type_name]
    blocks = raw.reshape(len(raw), -1, 146)
    d = blocks[:, :, :2].copy().view(np.float16).astype(np.float64)
    scales = blocks[:, :, 2:18].view(np.int8).repeat(16, axis=-1)
    codes = np.stack([blocks[:, :, 18:] & 15, blocks[:, :, 18:] >> 4], axis=2)  # [rows, blocks, half, 8 x 16]
    codes = codes.reshape(*blocks.shape[:2], 2, 8, 16).swapaxes(2, 3).reshape(*blocks.shape[:2], 256)
    values = np.array(magnitudes + [-x for x in magnitudes], np.float64)[codes]
    return (d * unit * scales * values).reshape(len(raw), -1)


def random_bytes(type_name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """[rows, row bytes], with any bits."""
    random = np.random.default_rng(seed)
    if type_name in PLAIN:
        return narrowed(random.normal(size=(rows, cols)), type_name).reshape(rows, -1)
    raw = random_blocks(HELD.get(type_name, (type_name,))[0], rows, cols, random, 1.0)
    if type_name in HELD:
        raw = ops.repack(HELD[type_name][0], raw.reshape(-1))[1].reshape(rows, -1)
    return raw


def random_weight(type_name: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [rows, row bytes] with any bits, and what the gguf package reads from them, float64."""
    raw = random_bytes(type_name, rows, cols, seed)
    return raw, dequantised(raw, type_name)


def narrowed(x: np.ndarray, type_name: str) -> np.ndarray:
    """The bytes of x in a plain type."""
    single = np.asarray(x, np.float32)
    if type_name == "bf16":
        return (np.asarray(rounded(single, "bf16"), np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return single.astype({"f32": np.float32, "f16": np.float16}[type_name]).view(np.uint8)


def half_bytes(type_name: str) -> list[int]:
    """Where a block keeps what must not be any bits."""
    if type_name in HELD:
        return list(range(18))
    return [0] if type_name == "mxfp4" else [at + i for at in HALVES[type_name] for i in (0, 1)]
