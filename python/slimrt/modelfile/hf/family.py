# SPDX-License-Identifier: Apache-2.0
"""How a Hugging Face model type is laid out, as data: what families.py and its neighbours fill in.

Shapes are written in symbols: d (width of the model), q (of all query heads), kv (of all key heads), dk (of a head),
qkv (q + 2 kv), ff (of the feed-forward network), 2d, 2ff, v (vocabulary), ctx (positions), heads, numbers, and what a
family adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from gguf.gguf_writer import GGUFValue

from slimrt.modelfile.hf.safetensors_files import Entry

ALWAYS = ""  # in place of a config key: the biases do not depend on the config


class Source(Protocol):
    """Tensors of a model by the names that they were saved under (`safetensors_files.Checkpoint`)."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def elements(self, name: str) -> np.ndarray:
        """Elements [shape], bfloat16 as its bits; of a quantised type its bytes, uint8 [..., bytes of a row]."""
        ...


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one on the other.

    Attributes:
        prefix: what GGUF calls a layer, with a place for its number.
        block: what the Hugging Face names of a layer's tensors begin with, after the stem.
        layer: GGUF module -> (Hugging Face module, shape of its weight), after the prefix; a module with a place for a
            number is one of each expert (symbol "experts"). What ends with ".weight" or ".bias" is one tensor, whose
            Hugging Face name is written out.
        count: config keys of the number of layers, in the usual spelling; the first that is set.
        only_first: modules that layer 0 alone has.
        halves: modules that are half of their Hugging Face module's rows: 0 the upper half, 1 the lower.
    """

    prefix: str
    block: str
    layer: Mapping[str, tuple[str, str]]
    count: tuple[str, ...] = ("num_hidden_layers",)
    only_first: tuple[str, ...] = ()
    halves: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type.

    Attributes:
        arch: GGUF architecture.
        stem: what the names of all tensors but the head begin with (a bare model leaves it out).
        block: what the names of a layer's tensors begin with, after the stem.
        outside: GGUF module -> (Hugging Face module, shape of its weight), outside the layers.
        layer: the same in each layer, after `blk.N.`.
        biases: config key -> modules that have a bias when it is true (ALWAYS: they do).
        spelling: the usual name of a config key -> this family's.
        defaults: what the model type means by a config key that is left out or, for sizes, null.
        only: config key -> the values that are supported.
        norm_eps: GGUF key, config key.
        head: the output matrix's module, beside the stem.
        activation: config key of the activation, where GGUF's architecture leaves it open.
        flags: GGUF key of a true or false -> config key.
        rope: positions are rotary.
        rope_aliases: other names this family has for a RoPE scaling.
        permuted: modules whose rows GGUF reorders, so that the two halves of a RoPE pair are neighbours.
        norms_less_one: the weights of norms are stored less one, which GGUF adds.
        ternary: modules whose weights run as one of -1, 0 and 1 times their mean size, and become that.
        by_head: modules of q, k, v whose rows are q | k | v in each head, which GGUF puts in order q | k | v.
        latent_parts: modules of K and V of a latent, which are one in each head of their Hugging Face module (of symbol
            "kvb" rows): K's rows, which GGUF turns, then V's.
        conv1d: the layers' matrices are stored [in, out].
        window: whether the runtime honours the model type's sliding window (None: the model type has none).
        window_rope: layers with a window turn q and k by parameters of their own.
        window_pattern: files always say which layers have one.
        lacking: modules that some layers do not have -> these layers.
        ignored: tensors (regular expressions) that are computed, not learned.
        leading: config key of how many first layers have `leading_layer` in place of `layer`.
        several: the stacks of layers, in place of `block` and `layer`, where there is more than one.
        symbols: further symbols of shapes -> config keys.
        numbers: further keys of GGUF -> config keys. scales: the same of numbers with a fraction, where they are not 0.
        of_generation: keys that generation_config.json may say in place of config.json, as it may those of numbers.
        equal: pairs of config keys that must agree, since GGUF has one key for both.
        copies: modules that are the token embedding again, where they are stored.
        unused_rows: modules whose first rows, so many, are never read.
        convolutions: modules whose weight [out, in, taps] becomes [out, taps * in], tap after tap.
        float32: modules whose weights are small, and never multiplied as a stored matrix.
        head_or_embedding: an untied head that is not stored is the token embedding.
        head_decides: what is stored says whether the head is tied, not the config.
        sharing: how layers share K and V, a key of `SHARING`; "": they do not.
        settle: the family and config values to use, where the layout depends on the config's.
        packed: what quantization_config may call weights that `stored` unpacks.
        stored: what the files hold -> the same tensors as `layer` names them.
        extra: config values, and those of generation_config.json -> what GGUF has no key for.
    """

    arch: str
    stem: str
    outside: Mapping[str, tuple[str, str]]
    block: str = ""
    layer: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    norm_eps: tuple[str, str] = ("layer_norm_rms_epsilon", "rms_norm_eps")
    head: str = "lm_head"
    activation: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    rope: bool = True
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    permuted: tuple[str, ...] = ()
    norms_less_one: bool = False
    ternary: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()
    latent_parts: tuple[str, ...] = ()
    conv1d: bool = False
    window: bool | None = None
    window_rope: bool = False
    window_pattern: bool = False
    lacking: Mapping[str, Collection[int]] = field(default_factory=dict)
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    leading: str = ""
    leading_layer: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    several: tuple[Stack, ...] = ()
    symbols: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    of_generation: tuple[str, ...] = ()
    equal: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()
    unused_rows: Mapping[str, int] = field(default_factory=dict)
    convolutions: tuple[str, ...] = ()
    float32: tuple[str, ...] = ("position_embd",)
    head_or_embedding: bool = False
    head_decides: bool = False
    sharing: str = ""
    settle: Callable[[Family, dict[str, Any]], tuple[Family, dict[str, Any]]] | None = None
    packed: tuple[str, ...] = ()
    stored: Callable[[Source], Source] | None = None
    extra: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, GGUFValue]] | None = None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of layers: of a decoder alone, one."""
        return self.several or (Stack("blk.{}.", self.block, self.layer),)
