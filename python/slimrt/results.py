"""What slimrt returns: frozen records, with `to_dict()` for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Record:
    """Adds to_dict() to the dataclasses below."""

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True)
class _PerLayer:
    """What each layer's cache is."""

    modes: tuple[str, ...]
    types: tuple[str, ...]
    ranks: tuple[int, ...]
    residual_types: tuple[str, ...]

    def layers(self) -> list[dict[str, Any]]:
        """One entry a layer: mode, type, rank, residual_type; as in Model.info()."""
        columns = zip(self.modes, self.types, self.ranks, self.residual_types, strict=True)
        return [dict(zip(("mode", "type", "rank", "residual_type"), row, strict=True)) for row in columns]


@dataclass(frozen=True)
class Usage(Record):
    """Counts of tokens. cached_tokens: the part of the prompt that a session already held."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings(Record):
    """Where the time went. In a batch the texts share their steps, so the rates are those of one text among them.

    Attributes:
        ttft: seconds from the call to the first token (to the end of the prompt when none was asked for).
        prefill_tok_s: prompt tokens computed a second.
        decode_tok_s: tokens generated a second after the first one; 0.0 when there is none.
    """

    ttft: float
    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True, kw_only=True)
class CacheUse(_PerLayer, Record):
    """The context rows of one text.

    Attributes:
        bytes: of the rows it holds; layers with a sliding window hold those of the window and of a step before it.
        bytes_per_token: of one token in all layers.
        modes, types: of each layer, such as "k" and "f16"; ranks, residual_types: of its residual, 0 and "" without.
        skipped: share of the rows, for each head, that sparse_threshold or sparse_delta left unread while decoding,
            over all texts of a batch.
        cross: of an encoder-decoder, the mode, type, bytes_per_row (of all layers) and reason of its output's rows.
        lossy: what is lost where allow_lossy insisted on a mode that loses too much, for people; "" else.
    """

    bytes: int
    bytes_per_token: int
    skipped: float
    cross: dict[str, Any] | None = None
    lossy: str = ""


@dataclass(frozen=True)
class TokenLogprob(Record):
    """A generated token and the likeliest ones in its place: natural logarithms of the model's own distribution,
    before temperature, penalties and filters."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generation(Record):
    """A generated text.

    Attributes:
        text: what follows the prompt, without the stop string or end token that ended it.
        tokens: ids generated; an end token is not among them, the tokens of a stop string are.
        finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the context is full),
            "unfinished" (a stream read before its end).
        truncated: the full context cut it off (finish_reason "context").
        seed: the seed that reproduces it.
        logprobs: one entry a token, or None when not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    truncated: bool
    seed: int
    usage: Usage
    timings: Timings
    cache: CacheUse
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text.

    Attributes:
        tokens: the ids of the text.
        logprobs: float32 (len(tokens) - 1,), nats; the first token has nothing before it and no probability.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]

    @property
    def log_likelihood(self) -> float:
        """Sum of logprobs, nats."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logprob."""
        return float(np.exp(-self.logprobs.mean(dtype=np.float64)))


@dataclass(frozen=True, kw_only=True)
class MemorySizes(_PerLayer, Record):
    """What a model takes in memory, in bytes.

    Attributes:
        modes, types: of each layer's cache; ranks, residual_types: of its residual, 0 and "" without one.
        mapped: weights read in place from the file.
        weights, derived, cache_bytes, scratch: what is allocated beside them.
        total: the sum of these five, which a limit is compared with.
        bytes_per_token: cache of one token in all layers, in the end where rows age.
        held_bytes: of the rows of one text that fills its context; what is allocated for it is more.
    """

    mapped: int
    weights: int
    derived: int
    cache_bytes: int
    scratch: int
    total: int
    bytes_per_token: int
    held_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanRow(MemorySizes):
    """What one choice of cache would take.

    Attributes:
        cache: mode of all layers, or "mixed".
        max_n_ctx: the largest context that fits the limit, 0 if none does.
        fits: the asked context fits.
        smaller_from: the context from which it takes less memory than kv of the same type, derived weights and scratch
            counted; None for kv itself, and where it never does.
        too_imprecise: why loading refuses it though it may fit; "": it does not; None: not looked at, since that would
            take long (what was asked for always is). Predicted for white inputs, or by the file's conversion; of mode
            k+r loading predicts for the text that it folds on, and near the limit that may decide otherwise.
        times_by_types: where rows of all layers age, how many times smaller than kv f16 they are by types and shares
            alone, as TALE counts: without scales, sinks and newest rows; else None.
        times_held: the same of held_bytes, with all of these, in any mode.
    """

    cache: str
    max_n_ctx: int
    fits: bool
    smaller_from: int | None
    times_by_types: float | None
    times_held: float
    too_imprecise: str | None = ""


@dataclass(frozen=True, kw_only=True)
class EncoderRow(_PerLayer, Record):
    """The cache of an encoder-decoder, in one of slim attention's options (slimrt.plan_encoder).

    Attributes:
        name: "baseline", "option 1", "option 2, x", "option 2, k", or "this choice".
        modes, types, ranks, residual_types: of each layer's self-attention; cross, cross_type: of cross-attention.
        self_bytes, cross_bytes: allocated for full contexts of all texts.
        shared: cross-attention's rows are one encoder output (or the first layer's K) for all layers.
        read: bytes that a token reads where every layer reads shared rows from memory; read_on_chip: where none does.
    """

    name: str
    cross: str
    cross_type: str
    self_bytes: int
    cross_bytes: int
    shared: bool
    read: int
    read_on_chip: int

    @property
    def cache_bytes(self) -> int:
        """Allocated in all."""
        return self.self_bytes + self.cross_bytes

    @property
    def uncounted(self) -> int:
        """The same without shared rows."""
        return self.self_bytes + (0 if self.shared else self.cross_bytes)


@dataclass(frozen=True)
class PlanResult(Record):
    """What a model would take in memory, for every cache mode that is legal for it.

    Attributes:
        path: the model, as given.
        n_ctx, n_seqs, n_batch: what was planned for; n_ctx_train: what the model was trained on.
        memory_limit: bytes.
        asked: the cache that was asked for; rows: every legal mode.
        refused: (mode, reason) of the others.
        fits: the cache that was asked for fits, and loading does not refuse it.
        encoder: of a model with an encoder, slim attention's options for both of its decoder's attentions.
    """

    path: str
    n_ctx: int
    n_ctx_train: int
    n_seqs: int
    n_batch: int
    memory_limit: int
    asked: PlanRow
    rows: tuple[PlanRow, ...]
    refused: tuple[tuple[str, str], ...]
    encoder: tuple[EncoderRow, ...] = ()

    @property
    def fits(self) -> bool:
        return self.asked.fits and not self.asked.too_imprecise

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values, with fits."""
        return super().to_dict() | {"fits": self.fits}


@dataclass(frozen=True, kw_only=True)
class CacheQuality(_PerLayer, Record):
    """What one cache does to a model's next-token distributions, over all scored tokens.

    Attributes:
        cache: for people, such as "k+r q8 + 64 q4".
        modes, types, ranks, residual_types: of each layer.
        perplexity: exp of the mean surprise, through cached decoding.
        kl_mean, kl_p99, kl_max: KL divergence from kv f32, nats: mean, 99 % quantile and largest.
        same_top: share of tokens after which the likeliest one is the same as with kv f32.
        bytes_per_token: of the rows that a full window holds, in all layers, a token.
        cache_bytes: allocated for a window.
        extra_weights: bytes of weights beyond those of mode kv, such as the matrix that makes V from K.
        too_imprecise: why loading refuses it unless one insists; "": it does not.
    """

    cache: str
    perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    same_top: float
    bytes_per_token: int
    cache_bytes: int
    extra_weights: int
    too_imprecise: str = ""


@dataclass(frozen=True)
class CacheComparison(Record):
    """Caches of one model on one text, decoded token by token.

    Attributes:
        path: the model. tokens: scored. windows: how many; window, prefix, chunk: their tokens, those of them that were
            prefilled, and those fed at once after that.
        rows: kv f32, which the others are compared with, then the others as they were given.
    """

    path: str
    tokens: int
    windows: int
    window: int
    prefix: int
    chunk: int
    rows: tuple[CacheQuality, ...]

    def front(self) -> tuple[CacheQuality, ...]:
        """The Pareto front, smallest first: no other row has fewer bytes a token and no more divergence. A cache that
        loading refuses as too imprecise is not on it, and takes nothing from it."""
        found: list[CacheQuality] = []
        for row in sorted(self.rows, key=lambda row: (row.bytes_per_token, row.kl_mean)):
            if not row.too_imprecise and (not found or row.kl_mean < found[-1].kl_mean):
                found.append(row)
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values: what is not finite becomes None."""
        rows = [
            {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}
            for row in super().to_dict()["rows"]
        ]
        return super().to_dict() | {"rows": rows, "front": [row.cache for row in self.front()]}
