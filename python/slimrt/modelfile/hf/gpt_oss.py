# SPDX-License-Identifier: Apache-2.0
"""How gpt-oss stores its experts: gate and up in one tensor, row by row, as MXFP4 or plain."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slimrt.errors import ModelFormatError, UnsupportedError
from slimrt.modelfile.hf.family import Family, Source
from slimrt.modelfile.hf.safetensors_files import Entry

DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks)")
_ROWS = {"gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}}
_BLOCK, _BYTES = 32, 17  # of MXFP4: elements, bytes


def settle(family: Family, values: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The ramp of its YaRN lies between pairs, which GGUF's architecture means and has no key for."""
    if not values.get("rope_scaling") and values.get("rope_parameters") is None:
        if "rope_scaling" in values:
            raise UnsupportedError("config.json: gpt-oss with an empty rope_scaling, YaRN or none by the version")
        values = {**values, "rope_parameters": _ROPE}
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if isinstance(rope, dict) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            if rope.get("truncate", True):
                raise UnsupportedError("config.json: gpt-oss with YaRN of truncate = true is not supported")
            values = {**values, key: {name: value for name, value in rope.items() if name != "truncate"}}
    return family, values


@dataclass(frozen=True)
class _Part:
    """A tensor that is made of others, and how."""

    entry: Entry
    load: Callable[[], np.ndarray]

    def rows(self, some: slice) -> _Part:
        """Of [experts, rows, ...]."""
        experts, n, *rest = self.entry.shape
        shape = (experts, len(range(n)[some]), *rest)
        return _Part(replace(self.entry, shape=shape), lambda: self.load()[:, some])


class Unpacked:
    """gpt-oss's tensors by the names that other models would give them: gate_proj, up_proj and down_proj of experts,
    each with "weight" [experts, out, in] and "bias" [experts, out].

    Raises:
        ModelFormatError: a tensor of experts has an odd shape, or packed ones have no scales.
    """

    def __init__(self, source: Source):
        self._source = source
        self._parts: dict[str, _Part] = {}
        used = set()
        for name, entry in source.entries.items():
            match = _EXPERTS.fullmatch(name)
            if match is None:
                continue
            stem, projection, kind = match.groups()
            used |= {name, _scales(name) if kind == "_blocks" else name}
            whole, part = self._whole(name, entry, kind), "bias" if kind == "_bias" else "weight"
            for ours, rows in _ROWS.get(projection, {projection: slice(None)}).items():
                self._parts[f"{stem}{ours}.{part}"] = whole.rows(rows)
        self.entries: Mapping[str, Entry] = {
            **{name: entry for name, entry in source.entries.items() if name not in used},
            **{name: part.entry for name, part in self._parts.items()},
        }

    def elements(self, name: str) -> np.ndarray:
        """As `Source.elements`."""
        return self._parts[name].load() if name in self._parts else self._source.elements(name)

    def _whole(self, name: str, entry: Entry, kind: str) -> _Part:
        """A tensor with its rows in the middle."""
        shape, source = entry.shape, self._source
        scales = source.entries.get(_scales(name))
        if len(shape) != {"": 3, "_bias": 2, "_blocks": 4}[kind]:
            raise ModelFormatError(f"{entry.file}: tensor '{name}' is {list(shape)}, which experts are not")
        if kind == "_bias":
            return _Part(entry, lambda: source.elements(name))
        if kind == "":
            turned = replace(entry, shape=(shape[0], shape[2], shape[1]))
            return _Part(turned, lambda: source.elements(name).swapaxes(1, 2))
        of_bytes = scales is not None and entry.dtype == scales.dtype == "U8"
        if shape[3] != _BLOCK // 2 or scales is None or scales.shape != shape[:3] or not of_bytes:
            raise ModelFormatError(f"{entry.file}: tensor '{name}' is {list(shape)}, without scales for its blocks")
        packed = replace(entry, dtype="MXFP4", shape=(*shape[:2], shape[2] * _BLOCK))
        return _Part(packed, lambda: as_gguf(source.elements(name), source.elements(_scales(name))))


def _scales(name: str) -> str:
    return name.removesuffix("_blocks") + "_scales"


def as_gguf(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 as GGUF has it, the exponent and then its codes: uint8 [..., rows, bytes of a row].

    The published checkpoints pack neighbours into a byte, GGUF an element and that 16 after it; bits stay as they are.

    Args:
        blocks: uint8 [..., rows, blocks, 16]. scales: uint8 [..., rows, blocks].
    """
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 2, _BLOCK // 2)
    packed = codes[..., 0, :] | codes[..., 1, :] << 4
    both = np.concatenate([scales[..., None], packed], axis=-1)
    return both.reshape(*blocks.shape[:-2], blocks.shape[-2] * _BYTES)
