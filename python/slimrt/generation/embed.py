"""Embeddings of texts: the final hidden states of their tokens, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.generation.loop import loop_of
from slimrt.generation.search import Encode, Read, Task
from slimrt.generation.sequences import Sequences
from slimrt.generation.tickets import Call, Ticket
from slimrt.info import encoder_of
from slimrt.plumbing import progress
from slimrt.runtime.kinds import require
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session, check_length

POOLINGS = ("auto", "mean", "last", None)

Vectors = NDArray[np.float32]


def embed(runtime: Runtime, texts: Sequence[Sequence[int]], pooling: str | None, normalize: bool) -> list[Vectors]:
    """The vector of each text (ids), or with pooling None those of its tokens; see Model.embed.

    Texts are computed together, n_seqs at a time.
    """
    tasks, loop, call, done = embeddings(runtime, texts, pooling, normalize), loop_of(runtime), Call(), 0
    with progress.bar(runtime.show_progress, len(texts), "embed", "text") as update:

        def on_step(ticket: Ticket[Any]) -> None:
            nonlocal done
            done += ticket.done
            update(done, len(texts))

        return loop.results([loop.submit(one, call=call, on_step=on_step) for one in tasks])


def embeddings(
    runtime: Runtime, texts: Sequence[Sequence[int]], pooling: str | None, normalize: bool
) -> list[Task[Vectors]]:
    """The same as one task for each text. The arguments are checked here, before any task runs."""
    if pooling not in POOLINGS:
        raise UnsupportedError(f"pooling {pooling!r} is not supported; supported: 'mean', 'last', 'auto' and None")
    encodes = require(runtime, "text", "text2text", to="embed a text") == "text2text"
    if pooling == "auto":
        pooling = runtime.source.pooling
    make = _embed_encoder if encodes else _embed_decoder
    for number, text in enumerate(texts):
        _check(runtime, text, number)
    return [make(runtime, text, _Pooling(pooling, normalize)) for text in texts]


def _check(runtime: Runtime, text: Sequence[int], number: int) -> None:
    if not text:
        raise ValueError(f"text {number} has no tokens: give some text, or a BOS token if the model has one")
    if not runtime.source.has_encoder:
        return check_length(len(text), runtime, f"text {number}")
    if len(text) > (most := encoder_of(runtime.info)["n_source"]):
        raise ContextOverflowError(f"text {number} has {len(text)} tokens, the encoder takes {most}: shorten it")


class _Pooling:
    """Pools the hidden states of a text as they are computed in pieces; pooling None keeps them all."""

    def __init__(self, pooling: str | None, normalize: bool):
        self._pooling, self._normalize = pooling, normalize
        self._kept: list[Vectors] = []
        self._sum: Any = 0.0  # float64 (d_model,)
        self._n = 0

    def add(self, states: Vectors) -> None:
        """Add hidden states (tokens, d_model) of the next tokens."""
        self._n += len(states)
        if self._pooling == "mean":
            self._sum = self._sum + states.sum(axis=0, dtype=np.float64)
        else:
            self._kept = [states[-1:].copy()] if self._pooling == "last" else [*self._kept, states.copy()]

    def result(self) -> Vectors:
        """The pooled vector (d_model,), or with pooling None the states (tokens, d_model)."""
        found = self._sum / self._n if self._pooling == "mean" else np.concatenate(self._kept)
        vectors = np.asarray(found[0] if self._pooling == "last" else found, np.float32)
        return _normalized(vectors) if self._normalize else vectors


def _embed_decoder(runtime: Runtime, text: Sequence[int], pooled: _Pooling) -> Task[Vectors]:
    """Embed with a decoder-only model: pools the states that the head reads."""
    with Session.new(runtime) as session:
        session.replaceable = True
        while text:
            states = yield Read(session, text, states=True)
            pooled.add(states)
            text = text[len(states) :]
    return pooled.result()


def _embed_encoder(runtime: Runtime, text: Sequence[int], pooled: _Pooling) -> Task[Vectors]:
    """Embed with an encoder-decoder: pools the encoder's output."""
    engine = Sequences(runtime)
    sequence = engine.new_sequence()
    try:
        pooled.add((yield Encode(sequence, np.array(text, np.int32), states=True)))
    finally:
        engine.free_sequence(sequence)
    return pooled.result()


def _normalized(vectors: Vectors) -> Vectors:
    """Each vector divided by its Euclidean norm; zero vectors stay zero."""
    norms = np.sqrt(np.sum(np.square(vectors, dtype=np.float64), axis=-1, keepdims=True))
    return np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)
