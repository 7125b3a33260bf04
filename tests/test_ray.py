# SPDX-License-Identifier: Apache-2.0
"""slimrt serve --ray and Ray Data on a cluster of two nodes with a CPU each: the texts of the model alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")

import ray.data  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import slimrt  # noqa: E402
from slimrt.integrations.ray import Generate  # noqa: E402

MODEL = Path(__file__).parents[1] / "models" / "tale-llama.gguf"
PROMPTS = ["Once upon a time", "The dog", "Tom was", "In a house"]
GREEDY = {"max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The model's texts without Ray."""
    with slimrt.Model(MODEL, n_ctx=256, progress=False) as model:
        return [one.text for one in model.generate(PROMPTS, **GREEDY)]


class Served:
    """`slimrt serve --ray 2` on the cluster."""

    def __init__(self, cluster: Cluster):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "slimrt", "serve", str(MODEL), "--ray", "2", "-c", "256", "--port", str(port)]
        self.process = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": cluster.address})

    def text(self, prompt: str) -> str:
        """Greedy; from whichever replica Ray chooses."""
        body = json.dumps({"model": "tale", "prompt": prompt} | GREEDY).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def wait_for_both(self, gone: int = 0) -> set[int]:
        """The processes of two replicas that run, without one that was killed."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            found = replica_processes()
            if len(found) == 2 and gone not in found and running_replicas() == 2:
                return found
            assert self.process.poll() is None
            time.sleep(0.2)
        raise AssertionError(f"{running_replicas()} replicas run, of the processes {replica_processes()}")


def running_replicas() -> int:
    """As Ray knows it; a replica runs once its model is loaded."""
    deployments = [one for app in serve.status().applications.values() for one in app.deployments.values()]
    return sum(one.replica_states.get("RUNNING", 0) for one in deployments)


def replica_processes() -> set[int]:
    """By the name that Ray gives them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ServeReplica"):
                found.add(int(path.parent.name))
        except OSError:
            pass  # it has ended
    return found


def test_replicas_answer_as_the_model_alone_and_any_may_die(cluster: Cluster, alone: list[str]) -> None:
    served = Served(cluster)
    try:
        first = served.wait_for_both()
        with ThreadPoolExecutor(8) as clients:
            assert list(clients.map(served.text, PROMPTS * 4)) == alone * 4
        for gone in first:  # so that at the end those answer that Ray has started
            os.kill(gone, signal.SIGKILL)
            time.sleep(2)  # Ray sees it
            assert [served.text(prompt) for prompt in PROMPTS] == alone
            served.wait_for_both(gone)
        assert not replica_processes() & first
        assert [served.text(prompt) for prompt in PROMPTS] == alone
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
        assert not replica_processes()
    finally:
        served.process.kill()
        served.process.wait()


def test_ray_data_has_the_texts_of_the_model_alone(cluster: Cluster, alone: list[str]) -> None:
    rows: Any = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS])
    options = {"generate": GREEDY, "n_ctx": 256, "n_seqs": 2}
    made = rows.map_batches(
        Generate,
        fn_constructor_args=[str(MODEL)],
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=2,
        num_cpus=1,
    )
    assert {row["prompt"]: row["text"] for row in made.take_all()} == dict(zip(PROMPTS, alone, strict=True))
