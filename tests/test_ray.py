# SPDX-License-Identifier: Apache-2.0
"""slimrt serve --ray and Ray Data on a cluster of two nodes with a CPU each: the texts of the model alone, and a killed
replica breaks its own streams and no others."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
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
# seconds of text in which the best token is 0.09 ahead everywhere: whatever is computed beside it, it stays the same
LONG_PROMPTS = ["The king", "The key of", "The hat"]
LONG = {"max_tokens": 6000, "temperature": 0, "ignore_eos": True, "on_overflow": "shift"}
MOST_STREAMS = 12  # that a replica makes together


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # Ray's 15 leaves replicas nothing beside tests that run at the same time
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


@pytest.fixture(scope="module")
def long_alone() -> dict[str, str]:
    with slimrt.Model(MODEL, n_ctx=256, progress=False) as model:
        return {prompt: model.generate(prompt, **LONG).text for prompt in LONG_PROMPTS}


@pytest.fixture
def served(cluster: Cluster) -> Iterator[Served]:
    made = Served(cluster)
    try:
        yield made
        made.end()
    finally:
        made.process.kill()
        made.process.wait()


class Served:
    """`slimrt serve --ray 2` on the cluster."""

    def __init__(self, cluster: Cluster):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--ray", "2", "--parallel", str(MOST_STREAMS), "-c", "256", "--port", str(port)]
        command = [sys.executable, "-m", "slimrt", "serve", str(MODEL), *flags]
        self.process = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": cluster.address})

    def open(self, prompt: str, **options: Any) -> http.client.HTTPResponse:
        """Ask for a completion, of whichever replica Ray chooses."""
        body = json.dumps({"model": "tale", "prompt": prompt} | options).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60)
        return answer

    def text(self, prompt: str) -> str:
        with self.open(prompt, **GREEDY) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def end(self) -> None:
        """As its user ends it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        assert not replica_processes()
        serve.shutdown()  # here too: the next one has another controller to ask

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


class Stream(threading.Thread):
    """A client that reads a long text as it comes.

    Attributes:
        begun: set with the first event. whole: the answer's end came, and not that of the connection before it.
    """

    def __init__(self, served: Served, prompt: str):
        super().__init__(daemon=True)
        self.prompt, self.begun, self.whole = prompt, threading.Event(), False
        self._served, self._read = served, b""
        self.start()

    def run(self) -> None:
        with self._served.open(self.prompt, stream=True, **LONG) as answer:
            try:
                while part := answer.read1(65536):
                    self._read += part
                    self.begun.set()
                self.whole = True
            except (http.client.IncompleteRead, ConnectionError):
                pass

    def events(self) -> list[str]:
        """What those say that came as a whole."""
        parts = self._read.split(b"\n\n")[:-1]
        return [one.removeprefix(b"data: ").decode() for one in parts if one.startswith(b"data: ")]

    def text(self) -> str:
        return "".join(json.loads(one)["choices"][0]["text"] for one in self.events() if one != "[DONE]")


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


def replica_actors() -> dict[int, Any]:
    """By their processes."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    actors = [ray.get_actor(name, "serve") for name in names if name.startswith("SERVE_REPLICA::")]
    processes = ray.get([one.__ray_call__.remote(lambda _: os.getpid()) for one in actors], timeout=60)
    return dict(zip(processes, actors, strict=True))


def requests_of(actors: dict[int, Any]) -> dict[int, int]:
    """How many requests each replica has; Ray has this answered beside the streams, as it asks it itself."""
    asked = [one.get_num_ongoing_requests.remote() for one in actors.values()]
    return dict(zip(actors, ray.get(asked, timeout=60), strict=True))


def test_replicas_answer_as_the_model_alone_and_any_may_die(served: Served, alone: list[str]) -> None:
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


def test_a_killed_replica_breaks_its_own_streams_alone(served: Served, long_alone: dict[str, str]) -> None:
    served.wait_for_both()
    streams = dict[Stream, int]()  # and the process that has each
    actors = replica_actors()
    have = requests_of(actors)
    while min(have.values()) < 3 and len(streams) < MOST_STREAMS:
        stream = Stream(served, LONG_PROMPTS[len(streams) % 3])
        assert stream.begun.wait(60)
        had, have = have, requests_of(actors)
        (streams[stream],) = [process for process in have if have[process] > had[process]]
    assert min(have.values()) >= 3, f"the processes of the replicas have these requests: {have}"
    killed = next(iter(streams.values()))
    os.kill(killed, signal.SIGKILL)
    for stream, process in streams.items():
        stream.join(180)
        assert not stream.is_alive()
        text, alone = stream.text(), long_alone[stream.prompt]
        if process == killed:
            assert not stream.whole and alone.startswith(text) and text != alone
        else:
            assert stream.whole and stream.events()[-1] == "[DONE]" and text == alone


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
