# SPDX-License-Identifier: Apache-2.0
"""Properties that may differ between the layers of a decoder: window, RoPE, and the shape of its heads (the runtime's
version is csrc/model/layers.cpp)."""

from __future__ import annotations

from dataclasses import dataclass

from slimrt import core
from slimrt.errors import ModelFormatError
from slimrt.modelfile.gguf import ModelData


@dataclass(frozen=True)
class Positions:
    """Properties of one layer. window: of sliding-window attention, tokens; 0: full attention. rope: whether it has
    RoPE. base: base of an unscaled RoPE; 0: RoPE as the metadata says for all layers. n_rot: columns of a head that
    RoPE rotates. v_is_k: V is K before its norm and RoPE."""

    window: int
    rope: bool
    base: float
    n_kv_heads: int
    head_dim: int
    n_rot: int
    v_is_k: bool


def by_period(period: int, n_layers: int) -> list[bool]:
    """Which layers have a window if every period-th has full attention; period 0: all have a window."""
    return [not period or (i + 1) % period != 0 for i in range(n_layers)]


def positions_of(model: ModelData, traits: core.Architecture) -> tuple[Positions, ...]:
    """The properties of each layer, from metadata.

    Raises:
        ModelFormatError: sliding_window_pattern is for another number of layers.
    """
    n = model.size("block_count")
    window = model.size("attention.sliding_window", traits.usual_window) or 0 if traits.sliding_window else 0
    pattern = model.value(f"{model.arch}.attention.sliding_window_pattern", traits.full_period)
    slides = by_period(pattern, n) if isinstance(pattern, int) else [bool(one) for one in pattern]
    if len(slides) != n:
        raise ModelFormatError(f"attention.sliding_window_pattern is of {len(slides)} layers, and there are {n}")
    windows = [window if one else 0 for one in slides]
    base = 0.0
    if traits.window_rope == "own":
        base = model.size("rope.freq_base_swa", traits.window_base or model.size("rope.freq_base", 10000.0))

    def turns(i: int) -> bool:
        unturned = traits.unturned_period and (i + 1) % traits.unturned_period == 0
        return traits.rope and not unturned and (bool(windows[i]) or traits.window_rope != "only" or not any(windows))

    each = model.size("attention.head_count_kv", model.size("attention.head_count"))
    if traits.latent:
        each = model.size("attention.head_count")
    full = model.size("attention.key_length", model.size("embedding_length") // model.size("attention.head_count"))
    full = model.size("attention.key_length_mla", full) if traits.latent else full
    n_rot = model.size("rope.dimension_count", full)

    def of(i: int) -> Positions:
        dim, turned = full, n_rot
        if windows[i]:
            dim = model.size("attention.key_length_swa", full)
        if windows[i] and traits.window_rope == "own":
            turned = model.size("rope.dimension_count_swa", min(n_rot, dim))
        return Positions(
            window=windows[i],
            rope=turns(i),
            base=base if windows[i] else 0.0,
            n_kv_heads=each if isinstance(each, int) else int(each[i]),
            head_dim=dim,
            n_rot=turned if turns(i) else 0,
            v_is_k=traits.v_norm and f"blk.{i}.attn_v.weight" not in model.tensors,
        )

    return tuple(map(of, range(n)))
