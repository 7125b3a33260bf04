# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX and Llama whose layers and heads may share K and V, in torch, on the tensors of a GGUF file.

Layers that read another's K and V take them as the file says: with K before RoPE, which they never rotate (MLKV as
trained, Zuhri et al., 2024), or with K rotated (cross-layer attention, Brandon et al., 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from slimrt.converter.quantize import stored_as
from slimrt.errors import UnsupportedError
from slimrt.modelfile.gguf import ModelData
from slimrt.modelfile.sharing import KEYS, NOT_UPTRAINED, owners_of

_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class SharedModel(nn.Module):
    """A language model that a text is predicted with all at once: nothing is cached.

    Raises:
        UnsupportedError: another architecture; something in the file that this forward pass does not compute; weights
            that are no floats.
    """

    def __init__(self, model: ModelData) -> None:
        super().__init__()
        _refuse(model)
        self.data, self.owners = model, owners_of(model)
        self.rotates_shared = model.value(KEYS, "rotated") != "unrotated"
        self.neox = model.arch == "gptneox"
        self.n_heads = model.size("attention.head_count")
        self.head_dim = model.size("attention.key_length", model.size("embedding_length") // self.n_heads)
        self.parallel = self.neox and model.size("use_parallel_residual", True)
        self.eps = model.size("attention.layer_norm_epsilon" if self.neox else "attention.layer_norm_rms_epsilon")
        self.activation = _ACTIVATIONS[model.value("slimrt.activation", "gelu_erf" if self.neox else "silu")]
        self.n_rot = model.size("rope.dimension_count", self.head_dim)
        self.base = model.size("rope.freq_base", 10000.0)
        self.names = list(model.tensors)
        values = [torch.from_numpy(tensor.values().copy()) for tensor in model.tensors.values()]
        self.weights = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, tokens, vocabulary] of token ids [rows, tokens]."""
        w: dict[str, Tensor] = dict(zip(self.names, self.weights, strict=True))
        x = w["token_embd.weight"][ids]
        turn = self._turn(ids.shape[1])
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, owner in enumerate(self.owners):
            at = f"blk.{layer}."
            h = self._norm(w, f"{at}attn_norm", x)
            q, *own = self._projected(w, at, h, owns=owner == layer)
            if own:
                shared[layer] = own[0], own[1]
            k, v = shared[owner]
            if owner == layer or self.rotates_shared:
                k = self._rotated(k, turn)
            y = F.scaled_dot_product_attention(self._rotated(q, turn), k, v, is_causal=True, enable_gqa=True)
            attended = _linear(w, f"{at}attn_output", y.transpose(1, 2).flatten(2))
            x = x + attended + self._mlp(w, at, x if self.parallel else x + attended)
        x = self._norm(w, "output_norm", x)
        return x @ w.get("output.weight", w["token_embd.weight"]).T

    def _projected(self, w: dict[str, Tensor], at: str, h: Tensor, *, owns: bool) -> list[Tensor]:
        """q, and of an owner k and v, each [rows, heads, tokens, head_dim]."""
        if f"{at}attn_qkv.weight" in w:
            q = self.n_heads * self.head_dim
            fused = _linear(w, f"{at}attn_qkv", h)
            kv = (fused.shape[-1] - q) // 2
            parts = list(fused.split([q, kv, kv], -1))[: 3 if owns else 1]
        else:
            parts = [_linear(w, f"{at}attn_{part}", h) for part in ("qkv" if owns else "q")]
        return [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts]

    def _turn(self, n: int) -> Tensor:
        """cos and sin [2, tokens, pairs]."""
        half = self.n_rot // 2
        angle = torch.arange(n)[:, None] * self.base ** (-torch.arange(half, dtype=torch.float64) / half)
        return torch.stack([angle.cos(), angle.sin()]).float()

    def _rotated(self, x: Tensor, turn: Tensor) -> Tensor:
        """The first n_rot dimensions of heads turned: in GPT-NeoX i with i + n_rot / 2, in a Llama neighbours."""
        turned, rest = x[..., : self.n_rot], x[..., self.n_rot :]
        a, b = turned.chunk(2, -1) if self.neox else (turned[..., ::2], turned[..., 1::2])
        cos, sin = turn
        pair = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat([*pair, rest], -1) if self.neox else torch.cat([torch.stack(pair, -1).flatten(-2), rest], -1)

    def _norm(self, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        weight = w[f"{name}.weight"]
        if self.neox:
            return F.layer_norm(x, weight.shape, weight, w[f"{name}.bias"], self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _mlp(self, w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
        h = self._norm(w, f"{at}ffn_norm", x)
        up = _linear(w, f"{at}ffn_up", h)
        gated = f"{at}ffn_gate.weight" in w
        inner = self.activation(_linear(w, f"{at}ffn_gate", h)) * up if gated else self.activation(up)
        return _linear(w, f"{at}ffn_down", inner)

    def exported(self) -> ModelData:
        """The model with these weights, in the types that the file had."""
        tensors = [
            stored_as(name, tuple(weight.shape), self.data.tensors[name].type, weight.detach().numpy)
            for name, weight in zip(self.names, self.weights, strict=True)
        ]
        kept = {key: value for key, value in self.data.metadata.items() if key != NOT_UPTRAINED}
        return ModelData(kept, self.data.tensors).with_tensors(*tensors)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _refuse(model: ModelData) -> None:
    if model.arch not in ("gptneox", "llama"):
        raise UnsupportedError(f"architecture '{model.arch}' cannot be trained here; gptneox and llama can")
    if model.size("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in model.tensors:
        raise UnsupportedError("RoPE that is scaled cannot be trained here")
    if 0 < (model.size("attention.sliding_window", 0) or 0) < model.size("context_length"):
        raise UnsupportedError("a sliding window cannot be trained here")
    for tensor in model.tensors.values():
        if tensor.type not in _FLOATS:
            raise UnsupportedError(
                f"tensor '{tensor.name}' is {tensor.type.name.lower()}: train float weights "
                "(slimrt convert --outtype f32)"
            )
