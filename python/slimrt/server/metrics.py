"""Prometheus metrics for /metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The metrics of one server.

    Attributes:
        first_token, between_tokens, queued, whole: seconds: to the first token, from one piece of text to the next, to
            the first step, and of the whole request.
        tokens: by kind: "prompt" (computed), "reused" (from the cache), "generated".
        drafts: by kind: "drafted" (and verified), "accepted".
        preempted: how often texts gave up their rows, which were computed again later.
        requests: by route and status. cancelled: by reason: "gone" (disconnected), "timeout", "queue". refused: by
            code.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.between_tokens = self._histogram("time_between_tokens_seconds", "From one piece of a text to the next.")
        self.queued = self._histogram("queue_seconds", "From a request to its first step.")
        self.whole = self._histogram("request_seconds", "From a request to the end of its answer.")
        self.tokens = self._counter("tokens", "Tokens of prompts computed and reused, and generated.", "kind")
        self.drafts = self._counter("drafts", "Tokens drafted, and of them accepted.", "kind")
        self.requests = self._counter("requests", "Requests by route and status.", "route", "status")
        self.cancelled = self._counter("cancelled", "Requests that were ended early.", "reason")
        self.preempted = Counter("slimrt_preemptions", "Times that a text gave up its rows.", registry=self._registry)
        self.refused = self._counter("refused", "Requests that were refused.", "code")

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed when metrics are read."""
        Gauge(f"slimrt_{name}", what, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"slimrt_{name}", what, registry=self._registry, buckets=_SECONDS)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"slimrt_{name}", what, labels, registry=self._registry)
