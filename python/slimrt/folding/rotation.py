# SPDX-License-Identifier: Apache-2.0
"""RoPE from a GGUF file's metadata, for offline measurements (the runtime's is csrc/model/rope.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt

import numpy as np

from slimrt import core
from slimrt.folding.attention import Attention
from slimrt.modelfile.gguf import ModelData


@dataclass(frozen=True)
class Rotation:
    """RoPE: rotates pair i of a head by position * frequencies[i], with cos and sin multiplied by `magnitude`."""

    frequencies: np.ndarray
    magnitude: float
    interleaved: bool

    @classmethod
    def of(cls, model: ModelData, attention: Attention, n_ctx: int) -> Rotation | None:
        """From metadata; None for a model without RoPE. n_ctx selects one of longrope's two tables."""
        if not attention.rope:
            return None
        n_rot, base = attention.n_rot, model.size("rope.freq_base", 10000.0)
        if attention.own_base:
            return cls(attention.own_base ** (-np.arange(0, n_rot, 2) / n_rot), 1.0, attention.interleaved)
        kind = model.size("rope.scaling.type", "")
        factor = model.size("rope.scaling.factor", model.size("rope.scale_linear", 1.0))
        trained = model.size("context_length")
        original = model.size("rope.scaling.original_context_length", trained)
        frequencies = base ** (-np.arange(0, n_rot, 2) / n_rot)
        magnitude, divisors = model.size("rope.scaling.attn_factor", 0.0), model.tensors.get("rope_freqs.weight")
        if kind == "yarn":
            frequencies *= _yarn(model, attention, base, factor, original)
            usual = 1 + 0.1 * log(max(factor, 1.0))
            whole = model.size("rope.scaling.yarn_attn_factor", 0.0)
            undoes = abs(whole * usual - 1) < 1e-3  # as in csrc/model/config.cpp
            magnitude = magnitude * usual or (0.0 if undoes else whole) or usual
        elif kind == "longrope" or (not kind and "rope_factors_long.weight" in model.tensors):
            divisors = model.tensor(f"rope_factors_{'long' if n_ctx > original else 'short'}.weight")
            stretch = trained / original
            usual = sqrt(1 + log(stretch) / log(original)) if stretch > 1 else 1.0
            own = core.architectures()[model.arch].own_longrope
            if not magnitude or (own and abs(magnitude - usual) <= 1e-4):  # as in csrc/model/rope.cpp
                magnitude = own or usual
        else:
            frequencies /= factor if kind != "none" else 1.0
            magnitude = magnitude or 1.0
        if divisors is not None:
            frequencies = frequencies / divisors.values()
        return cls(frequencies, magnitude, attention.interleaved)

    def turn(self, rows: np.ndarray, n_heads: int) -> np.ndarray:
        """Rotate the first columns of each head in rows [n, n_heads * head_dim] of positions 0, 1, ..."""
        heads, half = rows.reshape(len(rows), n_heads, -1), len(self.frequencies)
        angles = np.outer(np.arange(len(rows)), self.frequencies)[:, None, :]
        cos, sin = ((f(angles) * self.magnitude).astype(rows.dtype) for f in (np.cos, np.sin))
        one = slice(0, 2 * half, 2) if self.interleaved else slice(0, half)
        other = slice(1, 2 * half, 2) if self.interleaved else slice(half, 2 * half)
        out = heads.copy()
        out[..., one] = heads[..., one] * cos - heads[..., other] * sin
        out[..., other] = heads[..., one] * sin + heads[..., other] * cos
        return out.reshape(rows.shape)

    def averaged(self, variance: np.ndarray, n_heads: int) -> np.ndarray:
        """Variances of channels [n, n_heads * head_dim] after rotation, averaged over the angle: both channels of a
        pair get the mean of theirs."""
        heads, half = variance.reshape(len(variance), n_heads, -1), len(self.frequencies)
        one = slice(0, 2 * half, 2) if self.interleaved else slice(0, half)
        other = slice(1, 2 * half, 2) if self.interleaved else slice(half, 2 * half)
        out = heads.copy()
        out[..., one] = out[..., other] = self.magnitude**2 * (heads[..., one] + heads[..., other]) / 2
        return out.reshape(variance.shape)


def _yarn(model: ModelData, attention: Attention, base: float, factor: float, original: int) -> np.ndarray:
    """YaRN's factors of the frequencies (Peng et al. 2023, section 3.2): a ramp from 1 to 1 / factor."""
    n_rot = attention.n_rot

    def pair_turning(times: float) -> float:
        return n_rot * log(original / (times * 2 * pi)) / (2 * log(base))

    first = pair_turning(model.size("rope.scaling.yarn_beta_fast", 32.0))
    last = pair_turning(model.size("rope.scaling.yarn_beta_slow", 1.0))
    low = max(floor(first) if attention.whole_ramp else first, 0)
    high = min(ceil(last) if attention.whole_ramp else last, n_rot - 1)
    interpolated = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 1e-3), 0, 1)
    return np.asarray(interpolated / factor + 1 - interpolated)
