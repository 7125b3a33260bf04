# SPDX-License-Identifier: Apache-2.0
"""Files whose scores and logits are capped, or whose heads have sinks: copies of others, as any decoder may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from slimrt.modelfile.gguf import Tensor, float32, read_gguf, write_gguf

SCORE_CAP, LOGIT_CAP = 3.0, 6.0  # the tiny models' are about as large


def capped(path: Path, out: Path, score: float = SCORE_CAP, logit: float = LOGIT_CAP) -> Path:
    model = read_gguf(path)
    caps = {"attn_logit_softcapping": score, "final_logit_softcapping": logit}
    keys = {f"{model.arch}.{key}": float32(cap) for key, cap in caps.items()}
    write_gguf(out, model.with_metadata(keys), show_progress=False)
    return out


def with_sinks(path: Path, out: Path, layers: tuple[int, ...] | None = None, heads: int | None = None) -> Path:
    """layers: those that have them, None: all. Most of a softmax is a sink's in some heads, little of it in others."""
    model, random = read_gguf(path), np.random.default_rng(9)
    heads = heads or model.size("attention.head_count")
    rows = {i: random.normal(2, 3, heads).astype(np.float32) for i in range(model.size("block_count"))}
    sinks = [
        Tensor(f"blk.{i}.attn_sinks.weight", (heads,), GGMLQuantizationType.F32, lambda row=row: row.view(np.uint8))
        for i, row in rows.items()
        if layers is None or i in layers
    ]
    write_gguf(out, model.with_tensors(*sinks), show_progress=False)
    return out
