"""How much the server takes on, and what it says to the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slimrt.cache.server_sizes import MAX_BODY, MAX_SOUND, places
from slimrt.server.errors import Refusal


@dataclass(frozen=True)
class Limits:
    """Bounds of requests.

    Attributes:
        parallel: texts made at once. max_queue: texts that may wait for these; None: 4 times as many.
        queue_timeout: seconds that a request may wait for its first step. request_timeout: that it may take as a whole.
        send_timeout: seconds that a reader may take nothing. body_timeout: for a request to arrive. drain_timeout: that
            texts under way have when the server is told to end.
        max_body: bytes; max_sound: of a body with a sound. max_depth: of nested lists and objects in a body. max_texts:
            prompts times n.
    """

    parallel: int = 1
    max_queue: int | None = None
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    send_timeout: float = 60.0
    body_timeout: float = 30.0
    drain_timeout: float = 30.0
    max_body: int = MAX_BODY
    max_sound: int = MAX_SOUND
    max_depth: int = 64
    max_messages: int = 4096
    max_texts: int = 256
    max_tools: int = 128
    max_stops: int = 32
    max_biases: int = 4096

    def body_of(self, path: str) -> int:
        """Bytes that the body of a request to a route may have."""
        return self.max_sound if path.startswith("/v1/audio/") else self.max_body

    @property
    def places(self) -> int:
        """Texts that may be under way or wait."""
        return places(self.parallel, self.max_queue)


@dataclass(eq=False)  # another of the same size is another
class Place:
    """What one request counts for. texts: those that it makes. tokens: that are still to be computed for it."""

    texts: int = 1
    tokens: int = 0


@dataclass
class Places:
    """The requests that were taken on. One takes its place before its body is read, so that no more bodies lie in
    memory, and no more prompts wait to be tokenised, than may wait for the model.

    Attributes:
        computed: tokens so far, of prompts and texts. rate: those a second, as measured; 0: not yet.
    """

    limit: int
    computed: int = 0
    rate: float = 0.0
    _taken: list[Place] = field(default_factory=list)

    @property
    def texts(self) -> int:
        """Taken places."""
        return sum(one.texts for one in self._taken)

    @contextmanager
    def take(self) -> Iterator[Place]:
        """A place for one request, while its block runs. Refusal 429: there is none."""
        self._require(1)
        place = Place()
        self._taken.append(place)
        try:
            yield place
        finally:
            self._taken.remove(place)

    def widen(self, place: Place, texts: int) -> None:
        """Make a place as wide as its request turned out to be; one for more than all places takes all. Refusal 429:
        there is no room beside the others."""
        wanted = min(texts, self.limit)
        self._require(wanted - place.texts)
        place.texts = wanted

    def count(self, place: Place, tokens: int) -> None:
        """So many tokens of a request were computed."""
        self.computed += tokens
        place.tokens = max(place.tokens - tokens, 0)

    def retry_after(self) -> int:
        """Seconds until what is taken on is likely to be done: its tokens over the rate."""
        tokens = sum(one.tokens for one in self._taken)
        return min(max(math.ceil(tokens / self.rate), 1), 600) if self.rate else 1

    def _require(self, texts: int) -> None:
        if self.texts + texts > self.limit:
            raise Refusal(
                429,
                f"the server has all the work it takes on, {self.texts} texts of {self.limit} (--parallel and "
                "--max-queue): ask again later",
                "queue_full",
                retry_after=self.retry_after(),
            )
