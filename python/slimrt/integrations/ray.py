"""slimrt over Ray: a server of whole replicas (slimrt serve --ray N), and texts for Ray Data (docs/adapters.md).

It takes more users or rows; models become no larger and answers no faster. The model's file is on every machine.
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
        model: as slimrt.Model takes it, on every machine. The model has the CPUs that Ray gives the actor.
        prompts, texts: the columns that are read and added.
        generate: options of Model.generate. options: of slimrt.Model; with n_seqs so many texts are made together.
    """

    def __init__(self, model: str, prompts: str = "prompt", texts: str = "text", generate: Any = None, **options: Any):
        self._model = slimrt.Model.from_pretrained(model, n_threads=cpus(), progress=False, **options)
        self._prompts, self._texts, self._options = prompts, texts, generate or {}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = self._model.generate([str(prompt) for prompt in batch[self._prompts]], **self._options)
        return {**batch, self._texts: np.array([one.text for one in made], object)}


def cpus() -> int:
    """The CPUs that Ray gave to this process; where it takes none away, one."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


class FewestRequests(RequestRouter):
    """Asks the replica with the fewest requests. Ray's own router fills those on the port's machine before others."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all are full
        return [candidate_replicas]


def run(load: Callable[[int], slimrt.Model], n: int, n_cpus: int | None, access: Any, port: int, limits: Any) -> None:
    """Serve n replicas of a model on the cluster that there is, else on this machine, until SIGTERM or Ctrl-C; texts
    under way are then ended. With a replica that dies its answers break; Ray starts it anew.

    load: makes a replica's model, for so many threads. n_cpus: of each; None: what there is, in equal parts. access,
    limits: as slimrt.server has them, of each replica.
    """
    serve.start(proxy_location="HeadOnly", http_options={"host": access.host, "port": port})
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has had them
        signal.signal(number, lambda *_: told.set())

    def build() -> Any:
        from slimrt.server.app import build_app
        from slimrt.server.service import Service

        model = load(cpus())  # a replica is ready with its model
        return build_app(Service(lambda: model, limits, lambda *_: os._exit(1)), access)

    options: Any = {"num_replicas": n, "graceful_shutdown_timeout_s": limits.drain_timeout}
    options |= {"ray_actor_options": {"num_cpus": n_cpus or max(1, int(ray.cluster_resources()["CPU"]) // n)}}
    options |= {"request_router_config": serve.config.RequestRouterConfig(request_router_class=FewestRequests)}
    # a replica itself says that it is full
    options |= {"max_ongoing_requests": limits.places + 1, "max_queued_requests": n * limits.places}
    serve.run(serve.deployment(serve.ingress(build)()).options(**options).bind())
    told.wait()
    serve.shutdown()
