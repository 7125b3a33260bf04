"""slimrt on Ray: a server of several replicas (slimrt serve --ray N), and texts for Ray Data (docs/adapters.md).

Each replica holds the whole model: this adds throughput, not larger models or faster answers. The model's file must be
on every machine.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import ray
    from ray import serve
    from ray.serve.request_router import RequestRouter
except ImportError as error:
    raise ImportError("Ray is missing: pip install 'slimrt[ray]'") from error

import slimrt


class Generate:
    """Continues prompts: dataset.map_batches(Generate, fn_constructor_args=("model.gguf",), num_cpus=8, ...).

    Args:
        model: a path, as for slimrt.Model, on every machine. It uses the CPUs that Ray assigns to the actor.
        prompts, texts: names of the column to read and the column to add.
        generate: options of Model.generate. options: of slimrt.Model; n_seqs: texts generated together.
    """

    def __init__(self, model: str, prompts: str = "prompt", texts: str = "text", generate: Any = None, **options: Any):
        self._model = slimrt.Model.from_pretrained(model, n_threads=cpus(), progress=False, **options)
        self._prompts, self._texts, self._options = prompts, texts, generate or {}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = self._model.generate([str(prompt) for prompt in batch[self._prompts]], **self._options)
        return {**batch, self._texts: np.array([one.text for one in made], object)}


def cpus() -> int:
    """The CPUs that Ray assigned to this process, at least 1."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


class FewestRequests(RequestRouter):
    """Routes to the replica with the fewest requests; Ray's own router prefers replicas on the proxy's machine."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full
        return [candidate_replicas]


def run(load: Callable[[int], slimrt.Model], n: int, n_cpus: int | None, access: Any, port: int, limits: Any) -> None:
    """Serve n replicas of a model on the running cluster, else on this machine, until SIGTERM or Ctrl-C; running texts
    are then ended. If a replica dies its responses break off, and Ray restarts it.

    load: loads a replica's model, given a number of threads. n_cpus: for each; None: the cluster's CPUs in equal parts.
    access, limits: of each replica, as in slimrt.server.
    """
    serve.start(proxy_location="HeadOnly", http_options={"host": access.host, "port": port})
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own handlers
        signal.signal(number, lambda *_: told.set())

    def build() -> Any:
        from slimrt.server.app import build_app
        from slimrt.server.service import Service

        model = load(cpus())  # loaded before the replica reports that it is ready
        return build_app(Service(lambda: model, limits, lambda *_: os._exit(1)), access)

    options: Any = {"num_replicas": n, "graceful_shutdown_timeout_s": limits.drain_timeout}
    options |= {"ray_actor_options": {"num_cpus": n_cpus or max(1, int(ray.cluster_resources()["CPU"]) // n)}}
    options |= {"request_router_config": serve.config.RequestRouterConfig(request_router_class=FewestRequests)}
    # One more than a replica accepts, so that the replica itself responds that it is full.
    options |= {"max_ongoing_requests": limits.places + 1, "max_queued_requests": n * limits.places}
    serve.run(serve.deployment(serve.ingress(build)()).options(**options).bind())
    told.wait()
    serve.shutdown()
