# SPDX-License-Identifier: Apache-2.0
"""The weights of one layer's attention, as NumPy arrays.

Vectors are rows, as in the papers: x [d], W_K [d, e_k], W_V [d, e_v]; k = x W_K and v = x W_V, without their biases.
GGUF stores weights transposed, [out, in], with the columns of K in the file's own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slimrt.errors import ModelFormatError
from slimrt.folding.attention import Attention
from slimrt.modelfile.gguf import ModelData, Tensor


def projections(model: ModelData, attention: Attention, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return W_K [d, e_k] and W_V [d, e_v] of a layer, float64: the values that will run (dequantised if quantised).

    Raises:
        ModelFormatError: a tensor is missing, of a wrong shape, or holds NaN or infinity.
    """
    _, w_k, w_v = _qkv(model, attention, layer)
    return w_k.T, w_v.T


def _qkv(model: ModelData, attention: Attention, layer: int) -> list[np.ndarray]:
    """Weights of q, k and v [out, d], float64."""
    prefix = f"{attention.prefix(layer)}{attention.part}"
    widths = (attention.q_width, attention.kv_width, attention.kv_width)
    if f"{prefix}_qkv.weight" in model.tensors:
        fused = _matrix(model, f"{prefix}_qkv.weight", (sum(widths), attention.d))
        return np.split(fused, np.cumsum(widths)[:2])
    names = (f"{prefix}_{part}.weight" for part in "qkv")
    return [_matrix(model, name, (width, attention.d)) for name, width in zip(names, widths, strict=True)]


def _matrix(model: ModelData, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = model.tensor(name)
    if tensor.shape != shape:
        raise ModelFormatError(f"tensor '{name}' is {list(tensor.shape)}, expected {list(shape)}")
    values = tensor.values().astype(np.float64)
    if not np.isfinite(values).all():
        raise ModelFormatError(f"tensor '{name}' holds values that are not finite; the model is damaged")
    return values


@dataclass(frozen=True)
class LayerWeights:
    """The attention weights of one layer, read when needed. attention: that of this layer."""

    model: ModelData
    attention: Attention
    layer: int

    @cached_property
    def _projections(self) -> list[np.ndarray]:
        w_q, w_k, w_v = _qkv(self.model, self.attention, self.layer)
        return [w_q.astype(np.float32).T, w_k.T, w_v.T]

    @property
    def w_q(self) -> np.ndarray:
        """float32 [d, q width]."""
        return self._projections[0]

    @property
    def w_k(self) -> np.ndarray:
        """float64 [d, e_k]."""
        return self._projections[1]

    @property
    def w_v(self) -> np.ndarray:
        """float64 [d, e_v]."""
        return self._projections[2]

    @property
    def w_o(self) -> np.ndarray:
        """float64 [d, q width]: the output projection as it is stored, [out, in]."""
        a = self.attention
        name = "o" if a.encoder_decoder else "output"
        return _matrix(self.model, f"{a.prefix(self.layer)}{a.part}_{name}.weight", (a.d, a.q_width))

    @cached_property
    def sinks(self) -> np.ndarray | None:
        """Attention sinks, a logit of each query head in the softmax's denominator only, float32 [n_heads]; or None."""
        return self._vector("attn_sinks.weight")

    def bias(self, part: str) -> np.ndarray | None:
        """The bias of "q" or "k", float32, or None."""
        if (own := self._vector(f"{self.attention.part}_{part}.bias")) is not None:
            return own
        fused, at = self._vector(f"{self.attention.part}_qkv.bias"), self.attention.q_width
        if fused is None:
            return None
        return fused[:at] if part == "q" else fused[at : at + self.attention.kv_width]

    def gain(self, part: str) -> np.ndarray | None:
        """QK-norm's weight for each column of "q" or "k", float32, or None."""
        found, a = self._vector(f"{self.attention.part}_{part}_norm.weight"), self.attention
        if found is None or a.qk_norm != "head":
            return found
        return np.tile(found, a.n_heads if part == "q" else a.n_kv_heads)

    def input_norm(self) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias of the norm before the attention, float64 [d]; ones and zeros if there is none."""
        name, d = self.attention.input_norm_of(self.layer), self.attention.d
        gain, shift = self._values(f"{name}.weight"), self._values(f"{name}.bias")
        return (
            np.ones(d) if gain is None else gain.astype(np.float64),
            np.zeros(d) if shift is None else shift.astype(np.float64),
        )

    def _vector(self, name: str) -> np.ndarray | None:
        return self._values(f"{self.attention.prefix(self.layer)}{name}")

    def _values(self, name: str) -> np.ndarray | None:
        tensor = self.model.tensors.get(name)
        return None if tensor is None else tensor.values()


def fold_value_bias(model: ModelData, attention: Attention) -> ModelData:
    """Move each layer's V bias into the output bias: c' = b_V W_O + c, b_V = 0.

    Softmax weights sum to 1, so every query head adds its KV head's b_V whatever it attends to. Without the bias V is
    linear in x, which every mode but "kv" needs (docs/cache-math.md, "Biases"). A layer that reads another's rows adds
    that layer's b_V. Two kinds of models are returned unchanged: encoder-decoders, for which the runtime does this
    while loading, and models with attention sinks, whose weights do not sum to 1 and whose modes all store V's bias.
    """
    if attention.encoder_decoder or attention.sinks:
        return model
    changed: list[Tensor] = []
    kv = attention.kv_width
    for layer in range(attention.n_layers):
        prefix, owner = f"blk.{layer}.", f"blk.{attention.owner(layer)}."
        fused = model.tensors.get(f"{owner}attn_qkv.bias")
        bias = fused or model.tensors.get(f"{owner}attn_v.bias")
        if bias is None:
            continue
        values = bias.values().copy()
        b_v = values[-kv:].astype(np.float64)
        if not b_v.any():
            continue
        values[-kv:] = 0
        group = attention.n_heads // attention.n_kv_heads
        per_query_head = b_v.reshape(attention.n_kv_heads, -1).repeat(group, axis=0).ravel()
        w_o = _matrix(model, f"{prefix}attn_output.weight", (attention.d, attention.q_width))
        old = model.tensors.get(f"{prefix}attn_output.bias")
        moved = w_o @ per_query_head + (0 if old is None else old.values().astype(np.float64))
        changed += [Tensor.of(bias.name, values), Tensor.of(f"{prefix}attn_output.bias", moved)]
    return model.with_tensors(*changed)
