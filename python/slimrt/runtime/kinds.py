"""Kinds of models: checks that a model can do what is requested, and errors that say what it can do."""

from __future__ import annotations

from slimrt.cache.planner import BLOCK
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.modelfile.source import KINDS, ModelSource
from slimrt.runtime.runtime import Runtime

_USES = {
    "whisper": "slimrt transcribe (from Python transcribe(), over HTTP /v1/audio/transcriptions)",
    "moonshine": "slimrt transcribe (from Python transcribe(), over HTTP /v1/audio/transcriptions)",
    "text2text": "slimrt text2text or translate (from Python text2text() and translate(), over HTTP /v1/completions)",
    "chronos": "slimrt forecast (from Python predict_quantiles(), over HTTP /v1/forecasts)",
    "chronos-bolt": "slimrt forecast (from Python predict_quantiles(), over HTTP /v1/forecasts)",
    "chronos-2": "slimrt forecast (from Python predict_quantiles(), over HTTP /v1/forecasts)",
}
_TEXT = "slimrt generate or chat (from Python generate(), stream() and chat(), over HTTP /v1/completions)"


def require(runtime: Runtime, *kinds: str, to: str) -> str:
    """The model's kind, if it is one of `kinds`; else UnsupportedError, which says what the model is for.

    Args:
        to: what is requested, as a verb.
    """
    kind = runtime.source.kind
    if kind not in kinds:
        raise UnsupportedError(
            f"{runtime.source.name} is {runtime.source.described} and cannot {to}: that takes "
            f"{' or '.join(KINDS[one] for one in kinds)}; "
            f"use {_USES.get(kind, _TEXT)} with this one"
        )
    return kind


def continues_texts(source: ModelSource) -> None:
    """Raises UnsupportedError for a model with an encoder, whose decoder cannot continue a text without a source, if
    there is one."""
    if source.kind != "text":
        why = "it has no decoder"
        if source.has_decoder:
            why = "a decoder beside an encoder cannot continue a text by itself"
        raise UnsupportedError(
            f"{source.name} is {source.described}, and {why}: use {_USES[source.kind]} with this one"
        )


def places(runtime: Runtime, needed: int, most: int, shared: int = 0) -> int:
    """How many of the model's sequences a search (beams, or best_of) reserves: those that it needs, or more if the
    cache has fewer rows than n_seqs full contexts, so that concurrent searches never run out of rows.

    Args:
        most: rows of each of its sequences at the end. shared: rows of the prefix that its sequences share.

    Raises:
        ValueError: the model was loaded with fewer sequences.
        ContextOverflowError: the search may take more rows than the cache has.
    """
    n_seqs, n_ctx, tokens = (int(runtime.info[name]) for name in ("n_seqs", "n_ctx", "cache_tokens"))
    if needed > n_seqs:
        raise ValueError(
            f"num_beams or best_of {needed} needs {needed} sequences at once, the model has {n_seqs}: "
            f"load it with n_seqs={needed}, or a multiple of it for as many inputs at once"
        )
    if tokens == n_ctx * n_seqs:
        return needed
    together, there = shared // BLOCK, -(-tokens // BLOCK)
    taken = together + needed * (-(-most // BLOCK) - together)
    if taken > there:
        raise ContextOverflowError(
            f"{needed} texts at once of up to {most} tokens take {taken} blocks of {BLOCK} tokens, the cache has "
            f"{there}: give a larger cache_tokens (--cache-tokens), a smaller num_beams or best_of, or less room for "
            "the text"
        )
    return max(needed, -(-n_seqs * taken // there))
