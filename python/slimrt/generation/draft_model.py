"""Speculative decoding with a draft model: a smaller model of the same vocabulary proposes tokens.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023. Drafts are greedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from slimrt.cache.config import CacheChoice
from slimrt.cache.planner import BLOCK, Planner
from slimrt.generation.guesser import Drafter, Going, Guesser
from slimrt.generation.parts import FEW
from slimrt.generation.search import Guess, Logits
from slimrt.plumbing.units import format_bytes
from slimrt.runtime.drafting import refuse_aging
from slimrt.runtime.runtime import Runtime, load
from slimrt.runtime.session import Session, append_together, common_length


class DraftModel(Guesser):
    """A loaded model that drafts for the texts of another.

    Args:
        runtime: the draft model's; close() closes it.

    Attributes:
        taken: bytes of memory, mapped weights included.

    Raises:
        UnsupportedError: a cache mode whose rows age, so that rejected drafts cannot be truncated.
    """

    def __init__(self, runtime: Runtime):
        refuse_aging(runtime.source, [layer["mode"] for layer in runtime.info["layers"]])
        super().__init__(runtime.source.tokenizer.vocab_size)
        self.runtime = runtime
        with runtime.use() as engine:
            memory = engine.memory()
        self.taken = int(memory["total"] + memory["mapped"])
        self._drafters: weakref.WeakSet[Drafter] = weakref.WeakSet()

    def info(self) -> dict[str, str | int]:
        """The draft model's name, n_ctx and bytes."""
        return {"name": self.runtime.source.name, "n_ctx": self.runtime.n_ctx, "bytes": self.taken}

    def __str__(self) -> str:
        return f"drafts by {self.runtime.source.name}: {format_bytes(self.taken)}, counted in the memory limit"

    def drafter(self, biases: Mapping[int, float], ends: frozenset[int], key: str) -> Drafter:
        one = super().drafter(biases, ends, key)
        self._drafters.add(one)
        return one

    def close(self) -> None:
        self.runtime.close()

    def can_guess(self, wish: Guess) -> bool:
        return len(wish.tokens) < self.runtime.n_ctx

    @contextmanager
    def begin(self, wishes: Sequence[Guess], n: int) -> Iterator[list[Going]]:
        """Tokens that a drafter has not computed are computed first; of many only one batch a round, since all texts
        wait for it. Texts for which the draft model's cache has no room get no drafts this round."""
        room, begun = list[tuple[int, int]](), list[Going]()
        budget = int(self.runtime.info["n_batch"])
        for wish in wishes:
            drafter, most = wish.drafter, min(n, wish.most)
            session, tokens = self._of(drafter, wish.tokens)
            room.append((session.sequence, len(tokens) + most))
            with self.runtime.use() as engine:
                if not engine.has_room(room):  # drafts of other texts hold the rows, or the context is full
                    room.pop()
                    drafter.close()
                    continue
            if len(tokens) > FEW and budget > 0:
                part = tokens[: min(len(tokens) - 1, budget)]
                append_together(self.runtime, [(session, part)])
                tokens, budget = tokens[len(part) :], budget - len(part)
                room[-1] = session.sequence, len(tokens) + most
            if len(tokens) <= FEW:
                begun.append(Going(wish, session, tokens, most))
        yield begun

    def append(self, going: Sequence[Going]) -> Logits:
        return append_together(self.runtime, [(one.sequence, one.tokens) for one in going])

    def _of(self, drafter: Drafter, text: Sequence[int]) -> tuple[Session, list[int]]:
        """The drafter's session, truncated to the common prefix with the text, and the tokens still to compute. A new
        session forks the one with the longest common prefix, such as that of another answer to the same prompt."""
        session = drafter.session = drafter.session or Session.new(self.runtime)
        tokens = session.keep_common(text)
        if len(tokens) > BLOCK:
            others = [one.session for one in self._drafters if one.key == drafter.key and one.session is not None]
            like = max(others, key=lambda one: common_length(one.tokens, text))
            if common_length(like.tokens, text) >= session.length + BLOCK:
                drafter.session = like.fork()
                session.close()
                session, tokens = drafter.session, drafter.session.keep_common(text)
        return session, tokens


def load_draft(planner: Planner, target: Runtime, progress: bool | None) -> DraftModel:
    """Load the draft model of a loaded model.

    Args:
        planner: of the target model; it names the draft model. The draft model gets the same device, threads and
            sequences, and the memory that the target leaves of the limit.

    Raises:
        UnsupportedError: as DraftModel. WontFitError and others: as slimrt.Model.
    """
    own, n_ctx = planner.of_draft(target.n_ctx)
    with target.use() as engine:
        memory = engine.memory()
    own = replace(own, limit=max(planner.limit - memory["total"] - memory["mapped"], 1))
    runtime = load(own.source, CacheChoice.of(), own, n_ctx=n_ctx, memory_limit=own.limit, show_progress=progress)
    try:
        runtime.show_progress = False
        return DraftModel(runtime)
    except BaseException:
        runtime.close()
        raise
