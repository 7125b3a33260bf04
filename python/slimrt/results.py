"""What slimrt returns: frozen records, with `to_dict()` for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.plumbing.tables import table


class Record:
    """Base of the dataclasses below: to_dict()."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """Base of records with each layer's cache mode, row type, residual rank and residual type."""

    modes: tuple[str, ...]
    types: tuple[str, ...]
    ranks: tuple[int, ...]
    residual_types: tuple[str, ...]

    def layers(self) -> list[dict[str, Any]]:
        """One dict per layer with mode, type, rank and residual_type, named as in Model.info()."""
        columns = zip(self.modes, self.types, self.ranks, self.residual_types, strict=True)
        return [dict(zip(("mode", "type", "rank", "residual_type"), row, strict=True)) for row in columns]


@dataclass(frozen=True)
class Usage(Record):
    """Token counts.

    Attributes:
        cached_tokens: the part of the prompt whose rows were already in a session or the prompt cache.
        drafted_tokens: draft tokens (`lookup` or draft_model) that the model verified. accepted_tokens: those accepted.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Timings(Record):
    """Where the time went. The texts of a batch share their steps, so the rates are those of this one text, not of the
    batch.

    Attributes:
        ttft: seconds from the call to the first token (with max_tokens 0, to the end of the prompt).
        prefill_tok_s: prompt tokens computed per second.
        decode_tok_s: tokens generated per second after the first one; 0.0 if there is none.
    """

    ttft: float
    prefill_tok_s: float
    decode_tok_s: float


@dataclass(frozen=True, kw_only=True)
class CacheUse(PerLayer, Record):
    """The cache that one text occupies.

    Attributes:
        bytes: size of its rows; a layer with a sliding window holds the rows of the window and of one step before it.
        bytes_per_token: bytes of one token in all layers.
        modes, types: of each layer, such as "k" and "f16"; ranks, residual_types: of its residual, 0 and "" if none.
        skipped: fraction of (row, head) pairs that sparse_threshold or sparse_delta skipped while decoding, over all
            texts of a batch.
        cross: of an encoder-decoder, the cross-attention cache: mode, type, bytes_per_row (all layers) and reason.
        lossy: with allow_lossy, a sentence on what a mode that is otherwise refused loses; else "".
    """

    bytes: int
    bytes_per_token: int
    skipped: float
    cross: dict[str, Any] | None = None
    lossy: str = ""


@dataclass(frozen=True, slots=True)  # there may be 20 for each token
class TopLogprob(Record):
    """A token and its log-probability.

    Attributes:
        token: id. text: its text; U+FFFD stands for an incomplete UTF-8 character.
        logprob: natural logarithm of its probability in the model's own distribution, before temperature, penalties
            and filters.
    """

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(TopLogprob):
    """A generated token and its alternatives.

    Attributes:
        top: the most likely tokens at this position, best first.
        offset: where it starts in the generated text, in characters; a token that continues a character has that
            character's offset.
    """

    top: tuple[TopLogprob, ...]
    offset: int = 0


@dataclass(frozen=True)
class Generation(Record):
    """A generated text.

    Attributes:
        text: what follows the prompt, without the stop string or end token that ended it.
        tokens: the generated ids, as they are in the model's context. The end token is not included. The tokens of a
            stop string are, although `text` ends before it: a stop string may begin inside a token.
        finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the context is full),
            "unfinished" (a stream that was not read to its end).
        truncated: the context was full (finish_reason "context").
        seed: the seed that reproduces it.
        logprobs: one entry per token, or None if not requested.
        shifted: tokens of prompt and text that were dropped from a full context (on_overflow="shift"); 0: none.
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
    shifted: int = 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Score(Record):
    """How likely a model finds a text.

    Attributes:
        tokens: the ids of the text.
        logprobs: float32 (len(tokens) - 1,), nats; the first token has no context and so no probability.
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Score):
            return NotImplemented
        return self.tokens == other.tokens and np.array_equal(self.logprobs, other.logprobs)

    def __hash__(self) -> int:
        return hash(self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Tokens, logprobs, log_likelihood and perplexity as plain JSON-ready values."""
        numbers = {"log_likelihood": self.log_likelihood, "perplexity": self.perplexity}
        return {"tokens": list(self.tokens), "logprobs": self.logprobs.tolist()} | numbers

    def __str__(self) -> str:
        return f"log-likelihood {self.log_likelihood:.4f}, perplexity {self.perplexity:.4f}, {len(self.tokens)} tokens"


@dataclass(frozen=True, kw_only=True)
class CacheQuality(PerLayer, Record):
    """How one cache changes a model's next-token distributions, over all scored tokens.

    Attributes:
        cache: a label, such as "k+r q8 + 64 q4".
        modes, types, ranks, residual_types: of each layer.
        perplexity: exp of the mean negative log-probability, decoding through the cache.
        kl_mean, kl_p99, kl_max: KL divergence from kv f32, nats: mean, 99 % quantile and maximum.
        same_top: fraction of positions at which the most likely next token is the same as with kv f32.
        bytes_per_token: bytes of the rows of a full window in all layers, divided by its tokens.
        cache_bytes: bytes allocated for one window.
        extra_weights: bytes of weights beyond those of mode kv, such as the matrix that computes V from K.
        too_imprecise: why loading refuses it without allow_lossy; "": it does not.
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
        path: the model. tokens: number of tokens scored.
        windows: number of windows. window: tokens in each. prefix: tokens of a window that are prefilled, unscored.
            chunk: tokens per step after the prefix.
        rows: kv f32, the reference, then the other caches in the order given.
    """

    path: str
    tokens: int
    windows: int
    window: int
    prefix: int
    chunk: int
    rows: tuple[CacheQuality, ...]

    def front(self) -> tuple[CacheQuality, ...]:
        """The Pareto front of bytes_per_token and kl_mean, fewest bytes first. Caches that loading refuses as too
        imprecise are ignored."""
        found: list[CacheQuality] = []
        for row in sorted(self.rows, key=lambda row: (row.bytes_per_token, row.kl_mean)):
            if not row.too_imprecise and (not found or row.kl_mean < found[-1].kl_mean):
                found.append(row)
        return tuple(found)

    def table(self) -> str:
        """A text table, one row per cache. "*": on the Pareto front; "refused": loading refuses it. KL in nats; W^:
        extra_weights, bytes."""
        head = (
            "cache",
            "perplexity",
            "KL mean",
            "KL 99 %",
            "KL max",
            "same top",
            "bytes/token",
            "cache",
            "W^",
            "front",
        )
        front = self.front()
        rows = [
            (
                row.cache,
                f"{row.perplexity:.4f}",
                *(f"{value:.2e}" if math.isfinite(value) else "inf" for value in (row.kl_mean, row.kl_p99, row.kl_max)),
                f"{100 * row.same_top:.2f} %",
                str(row.bytes_per_token),
                str(row.cache_bytes),
                str(row.extra_weights),
                "refused" if row.too_imprecise else "*" if row in front else "",
            )
            for row in self.rows
        ]
        return table(head, rows)

    __str__ = table

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values; NaN and infinity become None."""
        found = super().to_dict()
        rows = [
            {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}
            for row in found["rows"]
        ]
        return found | {"rows": rows, "front": [row.cache for row in self.front()]}
