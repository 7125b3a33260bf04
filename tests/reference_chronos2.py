# SPDX-License-Identifier: Apache-2.0
"""The encoder of Chronos-2 in plain float64 NumPy, read from a GGUF file: Ansari et al. 2025, section 3 (scores are not
scaled; RMS norms; attention in time with RoPE, then without among the series of a group at one time). All rows see each
other through masks."""

from __future__ import annotations

import numpy as np

from reference_seq2seq import Array, Seq2Seq


class Chronos2(Seq2Seq):
    def encode(self, rows: Array, positions: Array, series: Array, groups: Array) -> Array:
        """States [rows, d] of embeddings of patches, with the position, the series and the group of each."""
        self._at = positions
        together = groups[:, None] == groups
        in_time = np.where(series[:, None] == series, 0.0, -np.inf)
        across = np.where(together & (positions[:, None] == positions), 0.0, -np.inf)
        x = rows.astype(np.float64)
        for layer in range(self.key("block_count")):
            p = f"enc.blk.{layer}."
            h = self.norm(f"{p}attn_norm", x)
            x = x + self.attention(f"{p}attn", h, h, in_time, rotate=True)
            h = self.norm(f"{p}group_attn_norm", x)
            x = x + self.attention(f"{p}group_attn", h, h, across, rotate=False)
            x = x + self.ffn(p, self.norm(f"{p}ffn_norm", x), "relu")
        return self.norm("enc.output_norm", x)

    def rotated(self, x: Array) -> Array:
        """Dimensions i and i + head_dim / 2 of each head turned together."""
        angle = self._at[:, None] * self.key("rope.freq_base") ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        low, high = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)
