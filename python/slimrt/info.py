"""What the core says of a model that is loaded or planned: its sizes, resolved options and memory."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class LayerOptions(TypedDict):
    """A layer's cache options, resolved. owner: the layer whose rows it reads, itself or an earlier one. rank,
    residual_type: of a mode with a residual; -1 and "" if neither arguments nor file specify them. v_heads: number of
    KV heads that store V beside K."""

    owner: int
    mode: str
    type_k: str
    type_v: str
    rank: int
    residual_type: str
    v_heads: int


class LayerInfo(TypedDict):
    """A layer's cache. type: of its rows; rank, residual_type: of the residual, 0 and "" without one; bytes_per_token:
    of a token's row, in aging modes of its oldest level; max_rows: most rows of a sequence, with a sliding window fewer
    than n_ctx; bytes_held: of all rows of a sequence of n_ctx tokens, scales included; v_heads: as LayerOptions."""

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
    """An encoder. n_source: most rows of its output; inputs: "tokens", "mel", "audio" or "series" (patches, in a
    model without a decoder: n_layers is 0, layers is empty, and cross None); n_inputs: their width, 0 for tokens and
    patches."""

    n_layers: int
    n_source: int
    inputs: str
    n_inputs: int


class CrossInfo(TypedDict):
    """The cache of cross-attention. reason: a sentence on why this mode; only in Model.info()."""

    mode: str
    type: str
    bytes_per_row: int
    reason: NotRequired[str]


class Info(TypedDict):
    """A model's sizes and resolved options."""

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
    """info["encoder"] of a model that has an encoder."""
    assert info["encoder"] is not None
    return info["encoder"]


def cross_of(info: Info) -> CrossInfo:
    """info["cross"] of a model that has an encoder and a decoder."""
    assert info["cross"] is not None
    return info["cross"]


class Part(TypedDict):
    """Layers `begin` to `end` - 1, the name of their device, and the bytes that they take there."""

    device: str
    begin: int
    end: int
    bytes: int


class Memory(TypedDict):
    """Memory in bytes. weights, derived, cache, scratch: allocated; total: their sum; mapped: weights read in place
    from the file; cache_bytes_per_token: one token's rows in all layers."""

    weights: int
    derived: int
    cache: int
    scratch: int
    total: int
    mapped: int
    cache_bytes_per_token: int


class Plan(Info, Memory):
    """The sizes and memory of an Engine with the same arguments, without creating it."""
