# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's attention, and which cache modes are exact for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import CacheUnsupportedError, UnsupportedError
from slimrt.modelfile.gguf import ModelData
from slimrt.modelfile.positions import Positions, positions_of
from slimrt.modelfile.sharing import KEYS, owners_of
from slimrt.modes import DEFAULT_TYPE


@dataclass(frozen=True)
class Attention:
    """The shape of a model's attention, or of one layer's (in_layer()), and which cache modes are exact for it.

    Attributes:
        d: width of the layer's input.
        n_rot: columns of a head that RoPE rotates; 0 without RoPE.
        interleaved: RoPE rotates pairs of neighbouring columns, not of columns half a head apart.
        qk_norm: q and k are normed after the projection and before RoPE: "none", "row" (the whole row, OLMo-2) or
            "head" (each head, Qwen3). layer_norm: by LayerNorm (OpenLM), else by RMS norm.
        blocks, part: prefixes of tensor names: "<blocks><layer>.<part>_q.weight".
        input_norm: name of the norm of the input, without ".weight" or ".bias"; {} stands for the layer's number.
        norms_sums: it is of a layer's last sum, which the next one reads (the first: normed embeddings).
        scaled: scores are multiplied by 1 / sqrt(head_dim) (all but T5's), or by score_scale if that is not 0.
        alibi: ALiBi's largest bias, from which the slopes of heads follow; 0: no ALiBi.
        clamp: bound on |q|, |k| and |v|; 0: none.
        whole_ramp: YaRN's ramp begins and ends at whole pairs of columns.
        score_cap: scaled scores s become cap * tanh(s / cap); 0: no cap.
        sinks: each head has an attention sink, a logit in the softmax's denominator (attn_sinks).
        norms_v: each head of V is normed, without a weight.
        window: of sliding-window attention, tokens; 0: full attention. own_base: base of an unscaled RoPE; 0: RoPE as
            the metadata says for all layers. v_is_k: V is K before its norm and RoPE. These three are set for one layer
            only: layers of a model may differ. n_kv_heads, head_dim and n_rot of a model are those of its first layer.
        positions: the properties that may differ, for each layer; () of one layer.
        latent: MLA: width of the latent from which K and V are computed; 0: they are computed from the input.
        owners: for each layer, the layer whose rows it reads; (): its own.
        unrotated: readers use the keys of their owner before RoPE (MLKV).
    """

    d: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: bool
    n_rot: int = 0
    interleaved: bool = False
    qk_norm: str = "none"
    layer_norm: bool = False
    window: int = 0
    own_base: float = 0.0
    eps: float = 0.0
    blocks: str = "blk."
    part: str = "attn"
    input_norm: str = "blk.{}.attn_norm"
    norms_sums: bool = False
    scaled: bool = True
    score_scale: float = 0.0
    owners: tuple[int, ...] = ()
    unrotated: bool = False
    alibi: float = 0.0
    clamp: float = 0.0
    whole_ramp: bool = True
    latent: int = 0
    score_cap: float = 0.0
    sinks: bool = False
    norms_v: bool = False
    v_is_k: bool = False
    positions: tuple[Positions, ...] = ()

    @classmethod
    def of(cls, model: ModelData) -> Attention:
        """The decoder's self-attention, read from metadata.

        Raises:
            UnsupportedError: an architecture that slimrt does not run.
        """
        traits = _architecture(model)
        if traits.has_encoder:
            return cls._of_encoder_decoder(model)
        d, n_heads = model.size("embedding_length"), model.size("attention.head_count")
        positions = positions_of(model, traits)
        return cls(
            d=d,
            n_layers=model.size("block_count") - model.size("nextn_predict_layers", 0),
            n_heads=n_heads,
            n_kv_heads=positions[0].n_kv_heads,
            head_dim=positions[0].head_dim,
            rope=traits.rope,
            n_rot=positions[0].n_rot,
            interleaved=traits.interleaved,
            qk_norm=traits.qk_norm,
            layer_norm=traits.norm == "layer",
            positions=positions,
            whole_ramp=traits.whole_ramp,
            norms_v=traits.v_norm,
            eps=model.size(f"attention.layer_norm_{'' if traits.norm == 'layer' else 'rms_'}epsilon", 0.0),
            owners=tuple(owners_of(model)),
            unrotated=model.value(KEYS, "") == "unrotated",
            alibi=model.size("attention.max_alibi_bias", 8.0) if traits.alibi else 0.0,
            clamp=model.size("attention.clamp_kqv", 0.0),
            score_scale=model.size("attention.scale", 0.0),
            score_cap=model.size("attn_logit_softcapping", traits.usual_score_cap),
            sinks="blk.0.attn_sinks.weight" in model.tensors,
            latent=model.size("attention.kv_lora_rank") if traits.latent else 0,
        )

    @classmethod
    def _of_encoder_decoder(cls, model: ModelData) -> Attention:
        traits = _architecture(model)
        d, n_heads = model.size("embedding_length"), model.size("attention.head_count")
        n_rot = model.size("rope.dimension_count", 0) if traits.rope else 0
        return cls(
            d=d,
            n_layers=model.size("decoder_block_count", model.size("block_count")) if traits.has_decoder else 0,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=model.size("attention.key_length", d // n_heads),
            rope=n_rot > 0,
            n_rot=n_rot,
            interleaved=traits.interleaved,
            blocks="dec.blk.",
            input_norm=f"dec.blk.{{}}.{'layer_output_norm' if traits.norms == 'sums' else 'attn_norm'}",
            norms_sums=traits.norms == "sums",
            scaled=traits.scaled_scores,
        )

    @classmethod
    def cross(cls, model: ModelData) -> Attention:
        """The decoder's cross-attention: without positions, and with the same input, the encoder's output, in all
        layers.

        Raises:
            UnsupportedError: an architecture without an encoder.
        """
        if not _architecture(model).has_encoder:
            raise UnsupportedError(f"architecture '{model.arch}' has no encoder, and so no cross-attention")
        own = cls._of_encoder_decoder(model)
        last = f"enc.blk.{model.size('block_count') - 1}.layer_output_norm" if own.norms_sums else "enc.output_norm"
        return replace(own, rope=False, n_rot=0, part="cross_attn", input_norm=last, norms_sums=False)

    def input_norm_of(self, layer: int) -> str:
        """Name of the norm whose output a layer's attention reads, without ".weight" or ".bias"."""
        if not self.norms_sums:
            return self.input_norm.format(layer)
        return self.input_norm.format(layer - 1) if layer else "dec.token_embd_norm"

    @property
    def encoder_decoder(self) -> bool:
        """Whether this is an attention of a decoder with an encoder."""
        return self.blocks != "blk."

    def in_layer(self, layer: int) -> Attention:
        """The attention of one layer."""
        if not self.positions:
            return self
        own = self.positions[layer]
        return replace(
            self, window=own.window, rope=own.rope, own_base=own.base, n_kv_heads=own.n_kv_heads,
            head_dim=own.head_dim, n_rot=own.n_rot, v_is_k=own.v_is_k, positions=(),
        )  # fmt: skip

    def _kinds(self) -> dict[int, Attention]:
        """The distinct kinds of layers: index of the first layer of each kind -> its attention."""
        first = {own: i for i, own in reversed(list(enumerate(self.positions)))}
        return {i: self.in_layer(i) for i in sorted(first.values())} or {0: self}

    def prefix(self, layer: int) -> str:
        """Prefix of the names of a layer's tensors."""
        return f"{self.blocks}{layer}."

    def owner(self, layer: int) -> int:
        """The layer whose rows a layer reads: itself, or an earlier one."""
        return self.owners[layer] if self.owners else layer

    def owning(self, layers: Iterable[int] | None = None) -> list[int]:
        """The layers (None: of all) that have K and V of their own; the others need no fold."""
        return [i for i in (range(self.n_layers) if layers is None else sorted(layers)) if self.owner(i) == i]

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor of the scores before the softmax."""
        return self.score_scale or (1 / sqrt(self.head_dim) if self.scaled else 1.0)

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def slopes(self) -> NDArray[np.float64]:
        """ALiBi's slopes [n_heads]: added to a score times (position of the row - position of the query)."""
        whole = 1 << self.n_heads.bit_length() - 1
        steps = [*range(2, 2 * whole + 1, 2), *range(1, 2 * (self.n_heads - whole), 2)]
        return np.exp2(-self.alibi / (2 * whole) * np.array(steps)) if self.alibi else np.zeros(self.n_heads)

    @property
    def rotated_width(self) -> int:
        """Number of columns of K that RoPE rotates."""
        return self.n_kv_heads * self.n_rot

    @property
    def rotated(self) -> NDArray[np.bool_]:
        """Mask of the columns of K that RoPE rotates [e_k]."""
        return np.tile(np.arange(self.head_dim) < self.n_rot, self.n_kv_heads)

    def modes(
        self, type: str = DEFAULT_TYPE, rank: int = 0, residual_type: str = DEFAULT_TYPE, v_heads: int = 0
    ) -> dict[str, core.Mode]:
        """The modes by name, with planes of these types. v_heads: KV heads that store V beside K. A mode is refused for
        a model if one of its layers refuses it."""
        if self.positions:
            kinds = [one.modes(type, rank, residual_type, v_heads) for one in self._kinds().values()]
            return {name: next((k[name] for k in kinds if k[name].refusal), mode) for name, mode in kinds[0].items()}
        found = core.attention_modes(
            d_model=self.d, n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim,
            n_rot=self.n_rot if self.rope else 0, qk_norm=self.qk_norm, window=self.window,
            cross=self.part == "cross_attn", type=type, rank=rank, residual_type=residual_type,
            v_heads=v_heads, unrotated=self.unrotated, clamp=self.clamp,
            layer_norm=self.layer_norm, score_cap=self.score_cap, sinks=self.sinks,
            latent=self.latent, norms_v=self.norms_v, v_is_k=self.v_is_k,
        )  # fmt: skip
        return {mode.name: mode for mode in found}

    def refusal(self, mode: str) -> str:
        """Why a mode is not exact here; "" if it is (docs/cache-math.md, section 1).

        "k+r" is exact for every attention: its residual can hold whatever K does not predict.
        """
        return self.modes()[mode].refusal

    def legal(self) -> list[str]:
        """The modes that are exact here."""
        return [name for name, mode in self.modes().items() if mode.legal]

    def predictable(self) -> list[str]:
        """Those of them whose rows do not age, so that the error of all rows is the same."""
        return [name for name, mode in self.modes().items() if mode.legal and not mode.ages]

    def refuse(self, mode: str, layer: int, reason: str) -> CacheUnsupportedError:
        """An error that names the layer, the reason and the modes that would work."""
        legal = ", ".join(other for other in self.legal() if other != mode)
        return CacheUnsupportedError(
            f"cache mode '{mode}' is not possible in layer {layer}: {reason}. Modes that work here: {legal}"
        )

    def require(self, mode: str) -> None:
        """Raise CacheUnsupportedError unless the mode is exact for this attention."""
        for layer, own in self._kinds().items():
            if reason := own.refusal(mode):
                raise self.refuse(mode, layer, reason)


def _architecture(model: ModelData) -> core.Architecture:
    """The traits of a model's architecture. UnsupportedError: slimrt does not support it."""
    known = core.architectures()
    if model.arch not in known:
        raise UnsupportedError(
            f"architecture '{model.arch}' is not supported; supported are: {', '.join(sorted(known))}"
        )
    return known[model.arch]
