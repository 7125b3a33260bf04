"""Self-speculative decoding: a model drafts with its first and newest cached rows only, and verifies with all rows.

These rows get most of the attention weight (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
2024), and where the cache is larger than the weights a step that reads few rows is much faster (Sadhukhan et al.,
"MagicDec", 2024). The rows are shared with the text's own sequence, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from slimrt.cache.planner import BLOCK
from slimrt.errors import UnsupportedError
from slimrt.generation.guesser import Going, Guesser
from slimrt.generation.parts import FEW
from slimrt.generation.search import Guess, Logits
from slimrt.runtime.drafting import SELF
from slimrt.runtime.runtime import Runtime

_SINKS = 1  # blocks of first rows
_NEWEST = 31  # blocks of newest rows
_LEAST = 4  # a text has at least this many times the rows of a thin fork, else drafting is not worth it


class ThinForks(Guesser):
    """Drafts by forks of the texts without the rows in the middle.

    Args:
        newest: blocks of newest rows in a fork.

    Attributes:
        taken: bytes beyond the model's own: 0, since forks take blocks of its cache, for one round.

    Raises:
        UnsupportedError: rows cannot be left out: a cache mode other than kv, or a sliding window.
    """

    taken = 0

    def __init__(self, runtime: Runtime, newest: int = _NEWEST):
        super().__init__(runtime.n_vocab)
        self.runtime, self._newest = runtime, newest
        with runtime.use() as engine:
            empty = engine.new_sequence()
            try:
                engine.thin(empty, _SINKS, newest)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"{runtime.source.name} cannot draft for itself (draft_model={SELF!r}): {error}"
                ) from None
            except ValueError:  # supported, but an empty sequence has nothing to leave out
                pass
            finally:
                engine.free_sequence(empty)

    def info(self) -> dict[str, str | int]:
        """The drafter's name, n_ctx and bytes."""
        return {"name": SELF, "n_ctx": self.runtime.n_ctx, "bytes": self.taken}

    def __str__(self) -> str:
        rows = (_SINKS + self._newest) * BLOCK
        return f"drafts by {self.runtime.source.name} itself, over {rows} rows of texts of {_LEAST * rows} and more"

    def close(self) -> None:
        """Does nothing: no memory is kept between steps."""

    def can_guess(self, wish: Guess) -> bool:
        return len(wish.tokens) >= _LEAST * (_SINKS + self._newest) * BLOCK

    @contextmanager
    def begin(self, wishes: Sequence[Guess], n: int) -> Iterator[list[Going]]:
        """Thin forks of the texts that have their rows, as far as there is room for the drafts."""
        begun, room = list[Going](), list[tuple[int, int]]()
        try:
            with self.runtime.use() as engine:
                for wish in wishes:
                    sequence, most = wish.session.sequence, min(n, wish.most)
                    lacks = list(wish.tokens[engine.length(sequence) :])
                    if len(lacks) > FEW:  # its rows were given up
                        continue
                    begun.append(Going(wish, engine.thin(sequence, _SINKS, self._newest), lacks, most))
                    room.append((begun[-1].sequence, len(lacks) + most))
                    if not engine.has_room(room):
                        room.pop()
                        engine.free_sequence(begun.pop().sequence)
            yield begun
        finally:
            for one in begun:
                self.runtime.drop(one.sequence)

    def append(self, going: Sequence[Going]) -> Logits:
        items = [(one.sequence, np.array(one.tokens, np.int32)) for one in going]
        with self.runtime.use() as engine:
            return engine.append(items, outputs=[1] * len(items))
