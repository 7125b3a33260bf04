"""What slimrt returns: frozen records, with `to_dict()` for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.plumbing.tables import table


class Record:
    """Adds to_dict() to the dataclasses below."""

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-ready values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, kw_only=True)
class PerLayer:
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
    """Counts of tokens.

    Attributes:
        cached_tokens: the part of the prompt that a session already held.
        drafted_tokens: guesses (`lookup`) that the model has checked. accepted_tokens: those that came true.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


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
class CacheUse(PerLayer, Record):
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
class TopLogprob(Record):
    """A token (its id and its text; U+FFFD stands for part of a character), and the natural logarithm of its
    probability in the model's own distribution, before temperature, penalties and filters."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprob(TopLogprob):
    """A generated token, the likeliest ones in its place, best first, and where in the text it stands: the characters
    before the one that it begins or goes on with."""

    top: tuple[TopLogprob, ...]
    offset: int = 0


@dataclass(frozen=True)
class Generation(Record):
    """A generated text.

    Attributes:
        text: what follows the prompt, without the stop string or end token that ended it.
        tokens: ids generated: what the model's context holds. An end token is not among them; the tokens of a stop
            string are, though `text` ends before it (detokenize(tokens) has it), since it may begin within a token.
        finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the context is full),
            "unfinished" (a stream read before its end).
        truncated: the full context cut it off (finish_reason "context").
        seed: the seed that reproduces it.
        logprobs: one entry a token, or None when not asked for.
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

    def __str__(self) -> str:
        return f"log-likelihood {self.log_likelihood:.4f}, perplexity {self.perplexity:.4f}, {len(self.tokens)} tokens"


@dataclass(frozen=True, kw_only=True)
class CacheQuality(PerLayer, Record):
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

    def table(self) -> str:
        """A row a cache; a star: on the front; refused: loading it is. KL in nats; W^: bytes of weights beyond kv's."""
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
        """The record as plain JSON-ready values: what is not finite becomes None."""
        rows = [
            {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}
            for row in super().to_dict()["rows"]
        ]
        return super().to_dict() | {"rows": rows, "front": [row.cache for row in self.front()]}
