"""slimrt serve and llama-server behind one face: processes that take turns, the idle one stopped.

A stopped process spends nothing: llama.cpp's threads would spin for a while after each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import client

LOADING = 300.0  # seconds that a server may take until it is healthy


@dataclass(frozen=True)
class Setup:
    """What a scenario wants of a server.

    parallel: requests computed at once. n_ctx: tokens that one of them may take. reuse: of prefixes. kept: tokens that
    are to be held of earlier requests, beside those of `parallel` requests.
    """

    model: Path
    parallel: int
    n_ctx: int
    reuse: bool = False
    kept: int = 0
    threads: int = 2


def slimrt_command(setup: Setup, settings: dict[str, Any], port: int) -> list[str]:
    """settings: cache (mode) and type of its rows; flags: more of them."""
    pool = setup.parallel * setup.n_ctx + setup.kept
    flags = ["--parallel", setup.parallel, "-c", setup.n_ctx, "--cache-tokens", pool, "-t", setup.threads]
    flags += ["--cache", settings["cache"], "--cache-type", settings["type"], "--port", port]
    flags += settings.get("flags", [])
    return [sys.executable, "-m", "slimrt", "serve", str(setup.model), *map(str, flags)]


def llama_command(setup: Setup, settings: dict[str, Any], port: int) -> list[str]:
    """settings: flash, n_batch: tokens that are planned together, at most 512 of them computed together.

    It holds what is reused beside its cache, in `--cache-ram` (8 GiB, its default).
    """
    flags = ["-np", setup.parallel, "-c", setup.parallel * setup.n_ctx, "-t", setup.threads, "--port", port]
    flags += ["-fa", "on" if settings["flash"] else "off", "-b", settings["n_batch"]]
    flags += ["-ub", min(settings["n_batch"], 512), "--log-verbosity", 2]
    if not setup.reuse:
        flags += ["--cache-ram", 0]
    return [os.environ["LLAMA_SERVER"], "-m", str(setup.model), *map(str, flags)]


COMMANDS = {"slimrt": slimrt_command, "llama-server": llama_command}


class Server:
    """A server's process, stopped (SIGSTOP) but for the time of `turn()`."""

    def __init__(self, engine: str, settings: dict[str, Any], setup: Setup):
        self.setup, self.engine = setup, engine
        self.port = free_port()
        self.command = COMMANDS[engine](setup, settings, self.port)
        self._log = Path(os.environ.get("TMPDIR", "/tmp")) / f"serve-{engine}-{self.port}.log"
        start = time.perf_counter()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)
        try:
            asyncio.run(self._ready())
        except BaseException:
            self.stop()
            raise
        self.loading = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    async def _ready(self) -> None:
        """Until it is healthy and has answered once: what is paid once is not counted."""
        end = time.perf_counter() + LOADING
        while (await client.fetch(self.port, "/health"))[0] != 200:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.engine} ended with code {self._process.returncode}: {self.said()}")
            if time.perf_counter() > end:
                raise RuntimeError(f"{self.engine} was not healthy after {LOADING:.0f} s: {self.said()}")
            await asyncio.sleep(0.1)
        answer = await client.complete(self.port, [3 + i for i in range(64)], 4)
        if not answer.whole:
            raise RuntimeError(f"{self.engine} did not answer (status {answer.status}): {answer.error}; {self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-600:].strip()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def memory(self) -> dict[str, int]:
        """Bytes resident: anonymous (what it allocated) and file (mapped weights and libraries)."""
        found = {"anonymous": 0, "file": 0}
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            name = {"RssAnon": "anonymous", "RssShmem": "anonymous", "RssFile": "file"}.get(key)
            if name:
                found[name] += int(value.split()[0]) * 1024
        return found

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        if self.alive:
            self._signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.unlink(missing_ok=True)

    def _signal(self, which: int) -> None:
        if self.alive:
            os.kill(self._process.pid, which)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
