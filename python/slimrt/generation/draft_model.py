"""A smaller model of the same vocabulary, which goes on with texts faster than the one that they are for.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023. It proposes its likeliest tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from slimrt.cache.config import CacheChoice
from slimrt.cache.planner import Planner
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.generation.odds import Odds
from slimrt.generation.pace import Pace, Recent
from slimrt.generation.parts import FEW
from slimrt.modelfile.source import ModelSource
from slimrt.modes import AGING
from slimrt.plumbing.units import format_bytes
from slimrt.runtime.runtime import Runtime, load
from slimrt.runtime.session import Session

_PLAIN = 16  # of so many proposals one is left out, so that what a step takes without guesses is measured again


def check_draft(source: ModelSource, target: ModelSource) -> None:
    """UnsupportedError: a model that cannot draft for the target, because tokens are not the same; says which."""
    for one, what in ((target, "a draft_model is for"), (source, "a draft_model is one of")):
        if one.kind != "text":
            raise UnsupportedError(f"{what} models that continue texts: {one.name} is a {one.kind} model")
    mine, wanted = source.tokenizer.vocabulary, target.tokenizer.vocabulary
    difference = ""
    if len(mine.tokens) != len(wanted.tokens):
        difference = f"it has {len(mine.tokens)} tokens, not {len(wanted.tokens)}"
    elif mine.tokens != wanted.tokens:
        at = next(i for i, pair in enumerate(zip(mine.tokens, wanted.tokens, strict=True)) if pair[0] != pair[1])
        difference = f"its token {at} is {mine.tokens[at]!r}, not {wanted.tokens[at]!r}"
    elif mine.control != wanted.control:
        difference = f"other tokens are control tokens: {sorted(mine.control ^ wanted.control)[:8]}"
    elif mine.special_ids != wanted.special_ids:
        difference = f"its special tokens are {dict(mine.special_ids)}, not {dict(wanted.special_ids)}"
    if difference:
        raise UnsupportedError(
            f"{source.name} cannot draft for {target.name}, their tokenizers differ: {difference}. Give a draft_model "
            "of the same family, or none"
        )


class DraftModel:
    """A loaded model that drafts for the texts of another.

    Args:
        runtime: of the model that drafts, which is closed with this.

    Attributes:
        odds: of all guesses; of a new text nothing else is known.
        guess: what a guess takes. proposals: that were asked for.
        n_tokens: of the vocabulary; logits may be wider, by other numbers in the two models.
        taken: bytes, of its file and beside it.

    Raises:
        UnsupportedError: its rows age, so that they cannot be taken back.
    """

    def __init__(self, runtime: Runtime):
        refuse_aging(runtime)
        self.runtime = runtime
        self.odds = Odds()
        self.guess = Recent()
        self.proposals = 0
        self.n_tokens = runtime.source.tokenizer.vocab_size
        with runtime.use() as engine:
            memory = engine.memory()
        self.taken = int(memory["total"] + memory["mapped"])

    def info(self) -> dict[str, str | int]:
        """name, n_ctx and bytes."""
        return {"name": self.runtime.source.name, "n_ctx": self.runtime.n_ctx, "bytes": self.taken}

    def __str__(self) -> str:
        return f"drafts by {self.runtime.source.name}: {format_bytes(self.taken)}, counted in the memory limit"

    def drafter(self, biases: Mapping[int, float]) -> ModelDrafter:
        """For one text, with what is added to logits of tokens there."""
        return ModelDrafter(self, biases)

    def close(self) -> None:
        self.runtime.close()


class ModelDrafter:
    """A drafter that has a model go on with its text. Attributes: as Drafter."""

    def __init__(self, model: DraftModel, biases: Mapping[int, float]):
        self._model, self.odds, self.spent = model, model.odds, 0.0
        self._biases = biases
        self._session: Session | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """The text is seen as a whole when it is gone on with."""

    def cost(self, n: int, pace: Pace) -> float:
        """Every text there is has drafts of its own: they are made one after the other, and checked together."""
        if not pace.alone:  # steps without guesses are measured first
            return float("inf")
        return pace.cost(n * pace.n_texts) + n * pace.n_texts * self._model.guess.seconds / pace.alone

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        self._model.proposals += 1
        if self._model.proposals % _PLAIN == 0 or len(text) + most > self._model.runtime.n_ctx:
            return []
        started = time.perf_counter()
        try:
            return self._continued(text, most)
        except ContextOverflowError:  # drafts of other texts hold the rows
            self.close()
            return []
        finally:
            self.spent += time.perf_counter() - started

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _continued(self, text: Sequence[int], most: int) -> list[int]:
        """The likeliest tokens one after the other. What it lacks of the text is computed first, of a long one only a
        part, for all texts wait for it."""
        self._session = self._session or Session.new(self._model.runtime)
        tokens, guesses = self._session.keep_common(text), list[int]()
        n_batch = int(self._model.runtime.info["n_batch"])
        if len(tokens) > n_batch:
            self._session.append(tokens[:n_batch], last_only=True)
            return []
        for _ in range(most):
            started, few = time.perf_counter(), len(tokens) <= FEW
            logits = self._session.append(tokens, last_only=True)[0, : self._model.n_tokens]
            for token, bias in self._biases.items():
                if token < len(logits):
                    logits[token] += bias
            tokens = [int(np.argmax(logits))]
            guesses += tokens
            if few:
                self._model.guess.note(time.perf_counter() - started)
        return guesses


def load_draft(
    path: str | os.PathLike[str] | ModelSource, target: ModelSource, planner: Planner, n_ctx: int, progress: bool | None
) -> DraftModel:
    """The model at a path, to draft for a target.

    Args:
        planner: of the target: the device, threads and memory that it has, and as many sequences.
        n_ctx: of the target; the draft's own is no longer than it was trained for.

    Raises:
        UnsupportedError: as check_draft and DraftModel. WontFitError and others: as slimrt.Model.
    """
    source = ModelSource.of(path, progress)
    check_draft(source, target)
    n_ctx = min(n_ctx, source.n_ctx_train)
    tokens = max(planner.cache_tokens, n_ctx) if planner.cache_tokens else 0
    own = replace(planner, source=source, cache_tokens=tokens, max_queue=None)
    runtime = load(source, CacheChoice.of(), own, n_ctx=n_ctx, memory_limit=planner.limit, show_progress=progress)
    try:
        runtime.show_progress = False
        return DraftModel(runtime)
    except BaseException:
        runtime.close()
        raise


def refuse_aging(runtime: Runtime) -> None:
    """UnsupportedError: the model's rows age, and cannot be taken back where a guess was wrong."""
    if modes := {layer["mode"] for layer in runtime.info["layers"]} & set(AGING):
        raise UnsupportedError(
            f"drafts need rows that can be taken back, those of cache mode {', '.join(sorted(modes))} of "
            f"{runtime.source.name} age: choose another cache, or no draft_model"
        )
