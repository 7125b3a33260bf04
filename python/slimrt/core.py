"""Interface to the compiled core: the rest of the package imports this module, never slimrt._core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import slimrt._core as _core
from slimrt._core import Engine as Engine
from slimrt._core import GgufFile as GgufFile
from slimrt._core import Sampler as Sampler
from slimrt._core import __version__ as __version__
from slimrt._core import access as access
from slimrt._core import available_memory as available_memory
from slimrt._core import cpu_info as cpu_info
from slimrt._core import cublas_lt_library as cublas_lt_library
from slimrt._core import cuda_devices as cuda_devices
from slimrt._core import huge_page_gain as huge_page_gain
from slimrt._core import ops as ops
from slimrt._core import plan as plan
from slimrt._core import plane_bytes as plane_bytes
from slimrt._core import quantize as quantize
from slimrt._core import read_bandwidth as read_bandwidth
from slimrt._core import resolve_layers as resolve_layers
from slimrt._core import set_access as set_access
from slimrt._core import take_notes as take_notes
from slimrt._core import token_logprobs as token_logprobs
from slimrt._core import tune as tune
from slimrt._core import why_refused as why_refused


def _cublas_lt_of_pip() -> list[str]:
    """Paths of cuBLASLt in the wheels nvidia-cublas and nvidia-cublas-cu12, newest version first: the dynamic linker
    does not search there."""
    try:
        spec = find_spec("nvidia")
    except ValueError:  # a loaded module of that name without a spec
        return []
    folders = spec.submodule_search_locations or () if spec else ()
    found = [str(path) for folder in folders for path in Path(folder).glob("*/lib/libcublasLt.so.1[23]")]
    return sorted(found, key=lambda path: path[-2:], reverse=True)


_core.look_for_cublas_lt(_cublas_lt_of_pip())


@dataclass(frozen=True)
class Architecture:
    """Traits of a model architecture (csrc/model/architecture.h).

    Attributes:
        name: general.architecture of its files.
        positions: "learned", "rope_interleaved" (RoPE rotates neighbouring columns), "rope_neox" (columns half a head
            apart), "relative" or "alibi".
        norms: of attention and FFN: of their inputs ("before"; "shared": one for both), their outputs ("after"),
            "both", or the sums of both ("sums"). norm: "rms" or "layer".
        qk_norm: norms of q and k, of the kind `norm`: "none", "row" (of whole rows) or "head" (of each head).
        v_norm: each head of V is normed too, without a weight. scaled_scores: by 1 / sqrt(head_dim).
        qkv_bias: "never", "optional" or "required". latent: K and V are computed from a latent (MLA).
        sliding_window: layers may have a sliding window. usual_window, usual_score_cap: of files that say none.
        own_longrope: factor of longrope in the published model, where a file has Phi-3's or none; 0: Phi-3's.
        full_period: where neither file nor config says which do, every full_period-th layer has full attention; 0:
            none has.
        window_rope: RoPE of layers with a window: the "same" as the others', their "own", unscaled with base
            window_base (0: the others' base), or "only" these layers have RoPE.
        unturned_period: every unturned_period-th layer has no position encoding (NoPE); 0: none.
        whole_ramp: YaRN's ramp begins and ends at whole pairs of columns.
        encoder: its inputs: "tokens", "mel", "audio" or "series" (then there is no decoder); "none": no encoder.
    """

    name: str
    positions: str
    norms: str
    norm: str
    qk_norm: str
    scaled_scores: bool
    v_norm: bool
    qkv_bias: str
    sliding_window: bool
    usual_window: int
    usual_score_cap: float
    own_longrope: float
    full_period: int
    window_rope: str
    window_base: float
    unturned_period: int
    whole_ramp: bool
    latent: bool
    encoder: str

    @property
    def rope(self) -> bool:
        return self.positions.startswith("rope_")

    @property
    def interleaved(self) -> bool:
        return self.positions == "rope_interleaved"

    @property
    def alibi(self) -> bool:
        return self.positions == "alibi"

    @property
    def has_encoder(self) -> bool:
        return self.encoder != "none"

    @property
    def has_decoder(self) -> bool:
        return self.encoder != "series"


@dataclass(frozen=True)
class Plane:
    """One stored part of a row: `heads` equal parts, each with its own scales. bytes: per token."""

    name: str
    width: int
    heads: int
    type: str
    bytes: int


@dataclass(frozen=True)
class Fold:
    """A tensor that folding computes for a mode, blk.<layer>.<suffix> [rows, cols]. required: False: it is optional."""

    suffix: str
    rows: int
    cols: int
    required: bool


@dataclass(frozen=True)
class Unread:
    """A tensor of a layer that decoding does not read. replaced: a derived tensor of about its size is read instead."""

    suffix: str
    replaced: bool


@dataclass(frozen=True)
class Mode:
    """Properties of a cache mode for one attention layer (csrc/cache/cache_mode.h).

    Attributes:
        cross: for cross-attention, over the rows of an encoder's output.
        refusal: why the mode is not exact for this attention; "": it is legal.
        ages: rows are requantised as they age. planes: what is stored of a token; with `ages`, in the oldest level.
        folds: tensors that it needs in addition to the model's own. unread: tensors that decoding does not read.
        residual: rows have a residual, with its own width and type. sparse: sparse_threshold applies. of_all:
            sparse_delta applies, since all heads read the same values.
        shared: one layer's rows serve all layers. latent: for latent attention (MLA) only, else not for it.
        inverts: the projection that folding inverts, "W_K" or "W_V"; or "".
    """

    name: str
    cross: bool
    refusal: str
    planes: tuple[Plane, ...]
    folds: tuple[Fold, ...]
    unread: tuple[Unread, ...]
    residual: bool
    sparse: bool
    of_all: bool
    ages: bool
    shared: bool
    latent: bool
    inverts: str

    @property
    def legal(self) -> bool:
        return not self.refusal

    @property
    def bytes(self) -> int:
        """Bytes per token."""
        return sum(plane.bytes for plane in self.planes)


def _mode(fields: dict[str, Any]) -> Mode:
    kinds: dict[str, type[Any]] = {"planes": Plane, "folds": Fold, "unread": Unread}
    return Mode(**fields | {key: tuple(kind(*row) for row in fields[key]) for key, kind in kinds.items()})


def modes(file: GgufFile | str) -> tuple[Mode, ...]:
    """The modes of a model's self-attention, and if it has an encoder of cross-attention; planes in f16.

    Raises:
        ModelFormatError, UnsupportedError: the file is broken, or of an architecture that slimrt does not have.
    """
    return tuple(map(_mode, _core.modes(file)))


def baseline(file: GgufFile | str) -> str:
    """The mode that stores what attention itself computes of a token: "kv", with MLA "latent"; "auto" without a
    decoder, which has no cache.

    Raises:
        ModelFormatError, UnsupportedError: as `modes`.
    """
    return next((mode.name for mode in modes(file) if mode.legal), "auto")


def held(file: GgufFile | str) -> dict[str, tuple[str, int]]:
    """A model's matrices as they are in memory on the CPU: name -> (type in which it is multiplied, bytes). The type is
    the file's, or that to which the matrix is converted at load.

    Raises:
        ModelFormatError, UnsupportedError: as `Engine`.
    """
    return _core.held(file, baseline(file))


@cache
def attention_modes(
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    n_rot: int,
    qk_norm: str,
    window: int = 0,
    cross: bool = False,
    type: str = "f16",
    rank: int = 0,
    residual_type: str = "f16",
    v_heads: int = 0,
    unrotated: bool = False,
    clamp: float = 0.0,
    layer_norm: bool = False,
    score_cap: float = 0.0,
    sinks: bool = False,
    latent: int = 0,
    norms_v: bool = False,
    v_is_k: bool = False,
) -> tuple[Mode, ...]:
    """The modes of self-attention, or of cross-attention, of a layer with this shape; planes of these types.

    Args:
        n_rot: columns of a head that RoPE rotates. window: of sliding-window attention, tokens; 0: full attention.
        rank, residual_type: of a mode with a residual. v_heads: KV heads that store V, of modes that compute V.
        unrotated: other layers read its keys before RoPE. clamp: bound on |q|, |k| and |v|; 0: none.
        layer_norm: QK-norm is LayerNorm, else RMS norm.
        score_cap: scores s become cap * tanh(s / cap); 0: no cap. sinks: heads have attention sinks, a logit in the
            softmax's denominator without a value.
        latent: MLA: width of the latent; 0: K and V are computed from the input.
        norms_v: each head of V is normed, without a weight. v_is_k: V is K before its norm and RoPE.

    Raises:
        UnsupportedError: an unknown type. ValueError: impossible sizes.
    """
    found = _core.attention_modes(
        d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, n_rot=n_rot, qk_norm=qk_norm,
        window=window, cross=cross, type=type, rank=rank, residual_type=residual_type,
        v_heads=v_heads, unrotated=unrotated, clamp=clamp, layer_norm=layer_norm,
        score_cap=score_cap, sinks=sinks, latent=latent, norms_v=norms_v, v_is_k=v_is_k,
    )  # fmt: skip
    return tuple(map(_mode, found))


@cache
def architectures() -> Mapping[str, Architecture]:
    """All architectures that the core supports, by name."""
    return {fields["name"]: Architecture(**fields) for fields in _core.architectures()}


@dataclass(frozen=True)
class Level:
    """How rows of a certain age are stored (csrc/cache/levels.h): types of K and V, the fraction `part` of V's columns
    that is kept (0: the rows are dropped), and which fraction `share` of the aged rows, or how many `rows`, are in this
    level (both 0 in the oldest, which has all that are left)."""

    type_k: str
    type_v: str
    part: float
    share: float
    rows: int = 0

    @property
    def bits(self) -> float:
        """Bits of one element of K and one of V together, without scales."""
        return BITS[self.type_k] + self.part * BITS[self.type_v] if self.part else 0.0


@dataclass(frozen=True)
class Levels:
    """How rows are requantised as they age. text: its notation, without defaults; of: levels, oldest first; sinks,
    recent: how many rows stay as written, the first ones of a text and at least this many of the newest; eager: a
    prefill reads V as the newest level stores it; predicts: V is stored as its difference from a prediction from K."""

    text: str
    of: tuple[Level, ...]
    sinks: int
    recent: int
    eager: bool
    predicts: bool

    @property
    def shares(self) -> list[float]:
        """The fraction of a long context in each level; the oldest has what the others leave."""
        return [1 - sum(level.share for level in self.of), *(level.share for level in self.of[1:])]

    @property
    def bits(self) -> float:
        """Mean bits of one element of K and one of V together, from types and shares alone, as TALE counts them (f16:
        32): without scales, sinks, recent rows and levels with a fixed number of rows."""
        return sum(share * level.bits for share, level in zip(self.shares, self.of, strict=True))


@cache
def levels(mode: str, text: str = "") -> Levels:
    """Parse the levels of an aging mode; what the text does not specify has the mode's default.

    Raises:
        UnsupportedError: an unknown mode or type. ValueError: an invalid text, or a mode whose rows do not age.
    """
    found = _core.levels(mode, text)
    of = tuple(Level(*one) for one in found["levels"])
    return Levels(found["text"], of, found["sinks"], found["recent"], found["eager"], found["predicts"])


BITS: dict[str, int] = {one["name"]: one["bits"] for one in _core.cache_types()}
"""Cache type -> bits of an element."""

CACHE_TYPES: tuple[str, ...] = tuple(BITS)
"""The element types of cache rows."""

FLOAT_TYPES: tuple[str, ...] = tuple(name for name, bits in BITS.items() if bits >= 16)
"""Those of them that are not quantised."""
