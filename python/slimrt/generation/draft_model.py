"""A smaller model of the same vocabulary, which goes on with texts faster than the one that they are for.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023. It proposes its likeliest tokens.
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
        runtime: of the model that drafts, which is closed with this.

    Attributes:
        taken: bytes, of its file and beside it.

    Raises:
        UnsupportedError: its rows age, so that they cannot be taken back.
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
        """name, n_ctx and bytes."""
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
        """What a text lacks is computed first; of what is long only a part, for all texts wait for it. Where there is
        no room for all, the last ones go without."""
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
        """The session of a text, and the tokens that it lacks: one that begins shares the rows of the text that begins
        most alike, such as another answer to the same prompt."""
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
    """The model that drafts for a loaded one.

    Args:
        planner: of the target, which names it: the device, threads and sequences are the target's, and so is the
            memory that it leaves.

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
