"""The compiled core: the one door to it. The rest of the package imports this module, never slimrt._core."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NotRequired, TypedDict

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
from slimrt._core import token_logprobs as token_logprobs
from slimrt._core import tune as tune
from slimrt._core import why_refused as why_refused


def _cublas_lt_of_pip() -> list[str]:
    """cuBLASLt of the wheels nvidia-cublas and nvidia-cublas-cu12, where the system's loader does not look."""
    try:
        spec = find_spec("nvidia")
    except ValueError:  # a module of that name without one
        return []
    folders = spec.submodule_search_locations or () if spec else ()
    found = [str(path) for folder in folders for path in Path(folder).glob("*/lib/libcublasLt.so.1[23]")]
    return sorted(found, key=lambda path: path[-2:], reverse=True)


_core.look_for_cublas_lt(_cublas_lt_of_pip())


class LayerOptions(TypedDict):
    """A layer's options, resolved. owner: the layer whose rows it reads, itself or one before it. rank, residual_type:
    of a mode with a residual; -1 and "": nothing says it. v_heads: KV heads that keep V beside K."""

    owner: int
    mode: str
    type_k: str
    type_v: str
    rank: int
    residual_type: str
    v_heads: int


class LayerInfo(TypedDict):
    """A layer's cache. type: of its rows; rank, residual_type: of the residual, 0 and "" without one; bytes_per_token:
    what a token leaves behind, in the end; max_rows: of a sequence, fewer than n_ctx behind a sliding window;
    bytes_held: of the rows of a sequence of n_ctx tokens, scales included; v_heads: KV heads that keep V beside K."""

    layer: int
    mode: str
    type: str
    rank: int
    residual_type: str
    bytes_per_token: int
    max_rows: int
    bytes_held: int
    v_heads: int


class EncoderInfo(TypedDict):
    """n_source: most rows of its output; inputs: "tokens", "mel" or "audio"; n_inputs: their width, 0 for tokens."""

    n_layers: int
    n_source: int
    inputs: str
    n_inputs: int


class CrossInfo(TypedDict):
    """The cache of cross-attention. reason: why this one, for people; of a loaded model."""

    mode: str
    type: str
    bytes_per_row: int
    reason: NotRequired[str]


class Info(TypedDict):
    """A model's sizes, and what options resolved to."""

    name: str
    architecture: str
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    n_ctx: int
    n_batch: int
    n_seqs: int
    cache_tokens: int
    sparse_threshold: float
    sparse_delta: float
    n_threads: int
    device: str
    layers: list[LayerInfo]
    parts: list[Part]
    encoder: EncoderInfo | None
    cross: CrossInfo | None
    decoder_start_token_id: NotRequired[int]


def encoder_of(info: Info) -> EncoderInfo:
    """Of a model that has an encoder."""
    assert info["encoder"] is not None
    return info["encoder"]


def cross_of(info: Info) -> CrossInfo:
    """Of a model that has an encoder."""
    assert info["cross"] is not None
    return info["cross"]


class Part(TypedDict):
    """Layers `begin` to `end` - 1, their device by its name, and the bytes that they take there."""

    device: str
    begin: int
    end: int
    bytes: int


class Memory(TypedDict):
    """Bytes: allocated weights, derived, cache, scratch and their total; of the mapped file; of a token's rows."""

    weights: int
    derived: int
    cache: int
    scratch: int
    total: int
    mapped: int
    cache_bytes_per_token: int


class Plan(Info, Memory):
    """What Engine would have and take with the same arguments."""


@dataclass(frozen=True)
class Architecture:
    """What an architecture is (csrc/model/architecture.h).

    Attributes:
        name: general.architecture of its files.
        positions: "learned", "rope_interleaved" (RoPE turns neighbours), "rope_neox" (halves), "relative" or
            "alibi".
        norms: of attention and FFN: "before", "shared" (one for both), "after" or "both". norm: "rms" or "layer".
        qk_norm: norms of q and k, of the kind `norm`: "none", "row" (of whole rows) or "head" (of each head).
        v_norm: each head of V is normed too, without a weight. scaled_scores: by 1 / sqrt(head width).
        qkv_bias: "never", "optional" or "required". latent: K and V are made of a latent (MLA).
        sliding_window: whether its layers may see a window. full_period: every so many-th of them sees all, where
            neither file nor config says which; 0: none does.
        window_rope: how layers with a window turn q and k: the "same" as the others, by their "own" base (window_base;
            0: that of the others) without scaling, or they "only".
        unturned_period: in every so many-th layer q and k know no positions; 0: in none.
        whole_ramp: YaRN's ramp begins and ends at a pair, else between pairs.
        encoder: what it reads: "none", "tokens", "mel" or "audio".
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


@dataclass(frozen=True)
class Plane:
    """One stored part of a row: `heads` equal shares with scales of their own. bytes: of a token."""

    name: str
    width: int
    heads: int
    type: str
    bytes: int


@dataclass(frozen=True)
class Fold:
    """A tensor that folding makes for a mode, blk.<layer>.<suffix> [rows, cols]. required: else it may be missing."""

    suffix: str
    rows: int
    cols: int
    required: bool


@dataclass(frozen=True)
class Unread:
    """A tensor of a layer that decoding a token does not read. replaced: something as large, made of it, is read."""

    suffix: str
    replaced: bool


@dataclass(frozen=True)
class Mode:
    """What a cache mode is for one attention (csrc/cache/cache_mode.h).

    Attributes:
        cross: of cross-attention, over the rows of an encoder's output.
        refusal: why it is not exact there; "" where it is legal.
        planes: what a token leaves behind; where rows age, in the end. ages: they do.
        folds: the tensors that it needs beyond a plain file's. unread: what decoding leaves unread.
        residual: rows have a part of a width and type of its own. sparse: a sparse_threshold has something to skip;
        of_all: a sparse_delta too, since its values are rows that all heads read.
        shared: one layer's rows serve all. latent: it is for latent attention (MLA), else for any other.
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
        """Bytes of a token."""
        return sum(plane.bytes for plane in self.planes)


def _mode(fields: dict[str, Any]) -> Mode:
    parts: dict[str, tuple[type, Iterable[Any]]] = {
        "planes": (Plane, fields["planes"]),
        "folds": (Fold, fields["folds"]),
        "unread": (Unread, fields["unread"]),
    }
    return Mode(**fields | {key: tuple(kind(*row) for row in rows) for key, (kind, rows) in parts.items()})


def modes(file: GgufFile | str) -> tuple[Mode, ...]:
    """The modes of self-attention, and with an encoder of cross-attention, for a model file or its path; planes in f16.

    Raises:
        ModelFormatError, UnsupportedError: the file is broken, or of an architecture that slimrt does not have.
    """
    return tuple(map(_mode, _core.modes(file)))


def baseline(file: GgufFile | str) -> str:
    """The mode that keeps what attention itself makes of a token: kv, or latent where K and V are made of a latent.

    Raises:
        ModelFormatError, UnsupportedError: as `modes`.
    """
    return next(mode.name for mode in modes(file) if mode.legal)


def held(file: GgufFile | str) -> dict[str, tuple[str, int]]:
    """The matrices that a model has on the CPU, by name: the type of each there, in which it is multiplied, and its
    bytes: its own, or what it becomes at load.

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
    """The modes of self-attention, or of cross-attention, of such a shape; planes of these types.

    Args:
        n_rot: columns of a head that RoPE turns. window: tokens that a query sees; 0: all.
        rank, residual_type: of a mode with a residual. v_heads: KV heads that keep V, of modes that compute it.
        unrotated: other layers read its keys before RoPE. clamp: what q, k and v are clamped to; 0: not at all.
        layer_norm: QK-norm is LayerNorm, else RMS norm.
        score_cap: scores s become cap * tanh(s / cap); 0: they do not. sinks: softmax counts a logit without a value.
        latent: columns of what K and V are made of (MLA); 0: of the input.
        norms_v: each head of V is normed, without a weight. v_is_k: V is K before its norm and RoPE.

    Raises:
        UnsupportedError: an unknown type. ValueError: sizes that no attention has.
    """
    found = _core.attention_modes(
        d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, n_rot=n_rot, qk_norm=qk_norm,
        window=window, cross=cross, type=type, rank=rank, residual_type=residual_type,
        v_heads=v_heads, unrotated=unrotated, clamp=clamp, layer_norm=layer_norm,
        score_cap=score_cap, sinks=sinks, latent=latent, norms_v=norms_v, v_is_k=v_is_k,
    )  # fmt: skip
    return tuple(map(_mode, found))


@cache
def architectures() -> tuple[Architecture, ...]:
    """All that there are."""
    return tuple(Architecture(**fields) for fields in _core.architectures())


@dataclass(frozen=True)
class Level:
    """What rows of some age are stored in (csrc/cache/levels.h): types of K and V, the part of V's columns that is
    kept (0: the rows are forgotten), and the share of the rows that have aged, or how many (the oldest level has
    neither: what the others leave)."""

    type_k: str
    type_v: str
    part: float
    share: float
    rows: int = 0

    @property
    def bits(self) -> float:
        """Of an element of K and one of V together, by types alone."""
        return BITS[self.type_k] + self.part * BITS[self.type_v] if self.part else 0.0


@dataclass(frozen=True)
class Levels:
    """What rows become as they age. text: how it is written, less what is usual; of: the oldest first; sinks, recent:
    rows that stay as they are written, the first ones of a text and at least so many of the newest; eager: a prompt
    reads V as the newest level keeps it; predicts: of V only what K does not tell is kept."""

    text: str
    of: tuple[Level, ...]
    sinks: int
    recent: int
    eager: bool
    predicts: bool

    @property
    def bits(self) -> float:
        """Of an element of K and one of V together, by types and shares alone: without scales, sinks, recent rows and
        levels of some rows, as TALE counts (16 bits each: 32)."""
        oldest = 1 - sum(level.share for level in self.of)
        shares = [oldest, *(level.share for level in self.of[1:])]
        return sum(share * level.bits for share, level in zip(shares, self.of, strict=True))


@cache
def levels(mode: str, text: str = "") -> Levels:
    """The levels of a mode whose rows age; what the text leaves open is as usual.

    Raises:
        UnsupportedError: an unknown mode or type. ValueError: no such text, or a mode whose rows do not age.
    """
    found = _core.levels(mode, text)
    of = tuple(Level(*one) for one in found["levels"])
    return Levels(found["text"], of, found["sinks"], found["recent"], found["eager"], found["predicts"])


BITS: dict[str, int] = {one["name"]: one["bits"] for one in _core.cache_types()}
"""Of an element of cache rows, by type."""

CACHE_TYPES: tuple[str, ...] = tuple(BITS)
"""The element types that cache rows may have."""

FLOAT_TYPES: tuple[str, ...] = tuple(name for name, bits in BITS.items() if bits >= 16)
"""Those that are no codes."""
