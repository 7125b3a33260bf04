"""Limits of requests, and admission: how many are accepted, and when others may retry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slimrt.cache.server_sizes import MAX_BODY, MAX_SOUND, places
from slimrt.server.errors import Refusal, wrong

PING_EVERY = 15.0  # seconds of silence after which a ping keeps a stream's connection alive
_PROXY = 60.0  # seconds of silence after which proxies usually close a connection


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        parallel: texts generated at once. max_queue: texts that may wait for these; None: 4 * parallel.
        queue_timeout: seconds that a request may wait for its first step. request_timeout: seconds for all of it.
        send_timeout: seconds that a client may read nothing. body_timeout: seconds for a body to arrive. drain_timeout:
            seconds that running texts have left when the server is stopped.
        max_body: bytes; max_sound: bytes of a body with audio. max_depth: nesting of lists and objects in a body.
        max_messages, max_tools, max_stops: most of each in a request. max_texts: prompts times n. max_biases: entries
            of logit_bias, and of suppress_tokens.
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

    @property
    def silence(self) -> float:
        """Seconds for which a stream in the queue says nothing, so that its end there has a status of its own; but none
        is silent for so long that proxies close the connection."""
        return _PROXY - PING_EVERY if self.queue_timeout > _PROXY else math.inf

    def body_of(self, path: str) -> int:
        """The most bytes of a body for this route."""
        return self.max_sound if path.startswith("/v1/audio/") else self.max_body

    @property
    def places(self) -> int:
        """Texts that may be generated or wait, in all."""
        return places(self.parallel, self.max_queue)


@dataclass(eq=False)  # compared by identity
class Place:
    """The share of one request. texts: that it generates, or for how many its answer counts. tokens: still to be
    computed for it, as estimated."""

    texts: int = 1
    tokens: int = 0


@dataclass
class Places:
    """The accepted requests. A request takes its place before its body is read, which bounds the bodies in memory and
    the prompts that wait to be tokenised.

    Attributes:
        computed: tokens of prompts and texts so far. rate: tokens per second, measured; 0: not yet.
    """

    limit: int
    computed: int = 0
    rate: float = 0.0
    _taken: list[Place] = field(default_factory=list)

    @property
    def texts(self) -> int:
        """Texts of all accepted requests."""
        return sum(one.texts for one in self._taken)

    @contextmanager
    def take(self) -> Iterator[Place]:
        """A place for one text, as a context manager. Refusal 429: the server is full."""
        self._require(1)
        place = Place()
        self._taken.append(place)
        try:
            yield place
        finally:
            self._taken.remove(place)

    def widen(self, place: Place, texts: int) -> None:
        """Raise the number of texts of a request, once it is known; more than the limit count as the limit. Refusal
        429: there is no room beside the other requests."""
        wanted = max(min(texts, self.limit), place.texts)
        self._require(wanted - place.texts)
        place.texts = wanted

    def hold(self, place: Place, n_bytes: int, param: str) -> None:
        """Count the answer of a request as the bodies that fill as much memory, since theirs is planned.

        Refusal: 400, for the field `param`, it is more than all of them; 429, there is no room beside other requests.
        """
        bodies = -(-n_bytes // MAX_BODY)
        if bodies > self.limit:
            raise wrong(
                param,
                f"the answer would take {n_bytes >> 20} MiB, and all requests have {self.limit * MAX_BODY >> 20} "
                "(--parallel and --max-queue): ask for less at once",
            )
        self.widen(place, bodies)

    def count(self, place: Place, tokens: int) -> None:
        """Record that tokens of a request were computed."""
        self.computed += tokens
        place.tokens = max(place.tokens - tokens, 0)

    def retry_after(self) -> int:
        """Seconds until the accepted work is likely to be done: its tokens / rate, from 1 to 600."""
        tokens = sum(one.tokens for one in self._taken)
        return min(max(math.ceil(tokens / self.rate), 1), 600) if self.rate else 1

    def _require(self, texts: int) -> None:
        if self.texts + texts > self.limit:
            raise Refusal(
                429,
                f"the server's queue is full, {self.texts} texts of {self.limit} (--parallel and "
                "--max-queue): try again later",
                "queue_full",
                retry_after=self.retry_after(),
            )
