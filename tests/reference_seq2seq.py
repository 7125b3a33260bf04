# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders in plain float64 NumPy, read from a GGUF file: whole sequences at once, no cache, no slimrt.

Row vectors. T5: Raffel et al. 2020, section 2.1 (unscaled scores, RMS norm, a bias by bucketed distance that all layers
share). Whisper: Radford et al. 2022, section 2.2 (two convolutions, pre-norm, no bias on k). Moonshine: Jeffries et al.
2024, section 3 (three convolutions over samples, RoPE of a part of each head). BART: Lewis et al. 2020, section 2.1
(norms of sums, as Vaswani et al. 2017; mBART and others norm inputs instead).
"""

from __future__ import annotations

from math import erf, log, sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray

_ERF = np.vectorize(erf)


def gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1 + _ERF(x / sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def bucket(distance: int, n_buckets: int, most: int, both_ways: bool) -> int:
    """Which bucket a key that stands `distance` after the query falls into: near ones singly, far ones by logarithm."""
    first = 0
    if both_ways:
        n_buckets //= 2
        first, distance = (n_buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = n_buckets // 2
    if distance < exact:
        return first + distance
    # float32, as the models were trained: a power of two falls on an edge.
    scaled = (
        np.log(np.float32(distance) / np.float32(exact)) / np.float32(log(most / exact)) * np.float32(n_buckets - exact)
    )
    return first + min(exact + int(scaled), n_buckets - 1)


class Seq2Seq:
    """One model. All weights [out, in] as in the file."""

    def __init__(self, path: str | Path):
        reader = gguf.GGUFReader(path)
        self.meta = {name: field.contents() for name, field in reader.fields.items()}
        self.arch = self.meta["general.architecture"]
        self.w = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type)
            .reshape(tuple(int(n) for n in reversed(t.shape)))
            .astype(np.float64)
            for t in reader.tensors
        }
        self.n_heads = self.key("attention.head_count")
        self.head_dim = self.key("attention.key_length")
        self.rms = self.arch in ("t5", "chronos2")
        self.eps = self.key("attention.layer_norm_rms_epsilon" if self.rms else "attention.layer_norm_epsilon")
        self.scale = 1.0 if self.rms else self.head_dim**-0.5

    def key(self, name: str, default: Any = None) -> Any:
        return self.meta.get(f"{self.arch}.{name}", default)

    # ------------------------------------------------------------ parts
    def linear(self, name: str, x: Array) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def norm(self, name: str, x: Array) -> Array:
        if self.rms:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps)
        else:
            x = x - x.mean(axis=-1, keepdims=True)
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps)
        return x * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0)

    def heads(self, x: Array) -> Array:
        return x.reshape(len(x), self.n_heads, self.head_dim).swapaxes(0, 1)

    def rotated(self, x: Array) -> Array:
        """Neighbours (2 i, 2 i + 1) of each head's first dimensions turned by position * base^(-2 i / n)."""
        n = self.key("rope.dimension_count", 0)
        if not n:
            return x
        angle = np.arange(x.shape[1])[:, None] * self.key("rope.freq_base") ** (-np.arange(0, n, 2) / n)
        even, odd, out = x[..., 0:n:2], x[..., 1:n:2], x.copy()
        out[..., 0:n:2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1:n:2] = odd * np.cos(angle) + even * np.sin(angle)
        return out

    def attention(self, prefix: str, x: Array, source: Array, bias: Array | float, rotate: bool) -> Array:
        q, k, v = (
            self.heads(self.linear(f"{prefix}_{part}", rows)) for part, rows in (("q", x), ("k", source), ("v", source))
        )
        if rotate:
            q, k = self.rotated(q), self.rotated(k)
        out = softmax(q @ k.swapaxes(1, 2) * self.scale + bias) @ v
        return self.linear(f"{prefix}_o", out.swapaxes(0, 1).reshape(len(x), -1))

    def ffn(self, prefix: str, x: Array, activation: str) -> Array:
        act = {"relu": relu, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "silu": silu}[activation]
        up = self.linear(f"{prefix}ffn_up", x)
        gated = f"{prefix}ffn_gate.weight" in self.w
        return self.linear(f"{prefix}ffn_down", act(self.linear(f"{prefix}ffn_gate", x)) * up if gated else act(up))

    def activation(self, decoder: bool) -> str:
        fixed = {"moonshine": "silu" if decoder else "gelu_erf", "whisper": "gelu_erf"}
        gated = "dec.blk.0.ffn_gate.weight" in self.w
        usual = fixed.get(self.arch, "gelu_tanh" if gated else "relu")
        return str(self.meta.get("slimrt.activation", usual))

    def position_bias(self, side: str, layer: int, at: Array) -> Array | float:
        """[heads, n, n]: T5's, of this layer or of the first, for rows at these positions."""
        found = self.w.get(f"{side}.blk.{layer}.attn_rel_b.weight", self.w.get(f"{side}.blk.0.attn_rel_b.weight"))
        if found is None:
            return 0.0
        count, most = self.key("attention.relative_buckets_count"), self.key("attention.relative_max_distance", 128)
        places = [[bucket(j - i, count, most, side == "enc") for j in at.tolist()] for i in at.tolist()]
        return found[np.array(places)].transpose(2, 0, 1)

    def convolved(self, name: str, x: Array, width: int, stride: int, pad: int = 0) -> Array:
        """[time, in] -> [time, out]; the weight's columns are tap after tap."""
        x = np.pad(x, ((pad, pad), (0, 0)))
        starts = range(0, len(x) - width + 1, stride)
        return self.linear(name, np.stack([x[start : start + width].ravel() for start in starts]))

    # ------------------------------------------------------------ the two halves
    def embedded(self, source: Array) -> Array:
        """What the encoder's first layer reads: of token ids, mel frames [time, n_mel], samples [n, 1], or rows."""
        if self.arch == "whisper":
            x = gelu_erf(self.convolved("enc.conv1", source, 3, 1, 1))
            x = gelu_erf(self.convolved("enc.conv2", x, 3, 2, 1))
            return x
        if self.arch == "moonshine":
            x = np.tanh(self.convolved("enc.conv1", source, 127, 64))
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
            x = x * self.w["enc.conv_norm.weight"] + self.w["enc.conv_norm.bias"]
            x = gelu_erf(self.convolved("enc.conv2", x, 7, 3))
            return gelu_erf(self.convolved("enc.conv3", x, 3, 2))
        return source if source.ndim == 2 else self.looked_up(source)

    def looked_up(self, tokens: Array) -> Array:
        return self.w["token_embd.weight"][tokens] * self.key("embedding_scale", 1.0)

    def placed(self, side: str, x: Array, at: Array) -> Array:
        """What the first layer reads: with a table's rows of its positions, and normed, where the file has either."""
        if f"{side}.position_embd.weight" in self.w:
            x = x + self.w[f"{side}.position_embd.weight"][at]
        name = f"{side}.token_embd_norm"
        return self.norm(name, x) if f"{name}.weight" in self.w else x

    def added(self, norms: tuple[str, str], x: Array, part: Any) -> Array:
        """x + part(norm(x)) by the first norm, or norm(x + part(x)) by the second: whichever the file has."""
        before, after = norms
        if f"{after}.weight" in self.w:
            return self.norm(after, x + part(x))
        return x + part(self.norm(before, x))

    def encode(self, source: Array, positions: Array | None = None) -> Array:
        """States [rows, d]. positions: of rows between which others are missing, for T5."""
        x = self.embedded(source)
        at = np.arange(len(x)) if positions is None else positions
        x = self.placed("enc", x, at)
        for layer in range(self.key("block_count")):
            x = self.layer(f"enc.blk.{layer}.", x, self.position_bias("enc", layer, at), None)
        return self.ended("enc", x)

    def layer(self, prefix: str, x: Array, bias: Array | float, states: Array | None) -> Array:
        """One layer of the encoder, or with its states one of the decoder."""

        def attend(x: Array) -> Array:
            return self.attention(f"{prefix}attn", x, x, bias, rotate=True)

        def cross(x: Array) -> Array:
            return self.attention(f"{prefix}cross_attn", x, states, 0.0, rotate=False)

        def ffn(x: Array) -> Array:
            return self.ffn(prefix, x, self.activation(decoder=states is not None))

        x = self.added((f"{prefix}attn_norm", f"{prefix}attn_output_norm"), x, attend)
        if states is not None:
            x = self.added((f"{prefix}cross_attn_norm", f"{prefix}cross_attn_output_norm"), x, cross)
        return self.added((f"{prefix}ffn_norm", f"{prefix}layer_output_norm"), x, ffn)

    def ended(self, side: str, x: Array) -> Array:
        return self.norm(f"{side}.output_norm", x) if f"{side}.output_norm.weight" in self.w else x

    def decode(self, tokens: Array, states: Array) -> Array:
        """The decoder's normed states [n, d]."""
        n = len(tokens)
        x = self.placed("dec", self.looked_up(tokens), np.arange(n))
        later = np.triu(np.full((n, n), -np.inf), 1)
        for layer in range(self.key("decoder_block_count", self.key("block_count"))):
            bias = later + self.position_bias("dec", layer, np.arange(n))
            x = self.layer(f"dec.blk.{layer}.", x, bias, states)
        return self.ended("dec", x)

    def logits(self, tokens: Array, states: Array) -> Array:
        """[n, n_vocab]."""
        x = self.decode(tokens, states)
        if "output.weight" in self.w:
            return self.linear("output", x)
        head = (x * x.shape[1] ** -0.5 if self.arch == "t5" else x) @ self.w["token_embd.weight"].T
        return head + self.w.get("output.bias", 0.0)
