"""Texts as vectors: what a model makes of their tokens, before its head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.plumbing import progress
from slimrt.runtime.kinds import require
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import check_length

POOLINGS = ("mean", "last", None)

Vectors = NDArray[np.float32]


def embed(runtime: Runtime, texts: Sequence[Sequence[int]], pooling: str | None, normalize: bool) -> list[Vectors]:
    """The vector of each text (ids), or with pooling None those of its tokens; see Model.embed.

    Texts are computed together, n_seqs at a time.
    """
    if pooling not in POOLINGS:
        raise UnsupportedError(f"pooling {pooling!r} is not supported; supported: 'mean', 'last' and None")
    compute = _encoded if require(runtime, "text", "t5", to="embed a text") == "t5" else _decoded
    for number, text in enumerate(texts):
        _check(runtime, text, number)
    found: list[Vectors] = []
    with progress.bar(runtime.show_progress, len(texts), "embed", "text") as update:
        for start in range(0, len(texts), int(runtime.info["n_seqs"])):
            together = [np.array(text, np.int32) for text in texts[start : start + int(runtime.info["n_seqs"])]]
            found += [_pooled(states, pooling) for states in compute(runtime, together)]
            update(len(found), len(texts))
    return [_of_length_one(vectors) for vectors in found] if normalize else found


def _check(runtime: Runtime, text: Sequence[int], number: int) -> None:
    if not text:
        raise ValueError(f"text {number} has no tokens, and the model has no BOS token: give some text")
    if not runtime.source.has_encoder:
        return check_length(len(text), runtime, f"text {number}")
    if len(text) > (most := core.encoder_of(runtime.info)["n_source"]):
        raise ContextOverflowError(f"text {number} has {len(text)} tokens, the encoder takes {most}: shorten it")


def _decoded(runtime: Runtime, texts: Sequence[NDArray[np.int32]]) -> list[Vectors]:
    """The states that the head reads, (tokens, d_model), of each."""
    with _sequences(runtime, len(texts)) as (engine, sequences):
        states = engine.append(list(zip(sequences, texts, strict=True)), all_logits=True, states=True)
    return np.split(states, np.cumsum([len(text) for text in texts])[:-1])


def _encoded(runtime: Runtime, texts: Sequence[NDArray[np.int32]]) -> list[Vectors]:
    """The encoder's output, (tokens, d_model), of each."""
    with _sequences(runtime, len(texts)) as (engine, sequences):
        states = engine.encode(list(zip(sequences, texts, strict=True)), states=True)
    assert states is not None
    return states


@contextmanager
def _sequences(runtime: Runtime, count: int) -> Iterator[tuple[core.Engine, list[int]]]:
    """The engine, and so many empty sequences, which are freed in the end."""
    with runtime.use() as engine:
        sequences: list[int] = []
        try:
            sequences += [engine.new_sequence() for _ in range(count)]
            yield engine, sequences
        finally:
            for sequence in sequences:
                engine.free_sequence(sequence)


def _pooled(states: Vectors, pooling: str | None) -> Vectors:
    if pooling is None:
        return states
    pooled = states[-1] if pooling == "last" else states.mean(axis=0, dtype=np.float64)
    return np.asarray(pooled, np.float32)


def _of_length_one(vectors: Vectors) -> Vectors:
    """Divided by their Euclidean norms; zeros stay."""
    norms = np.sqrt(np.sum(np.square(vectors, dtype=np.float64), axis=-1, keepdims=True))
    return np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)
