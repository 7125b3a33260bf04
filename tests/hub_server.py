"""A server of this machine that speaks the protocol of Hugging Face's hub: its API, files with ranges, its errors."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good"


@dataclass
class Repository:
    """Its files, and what it asks for. commit: of its only branch, main."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: bool = False
    private: bool = False


@dataclass
class Hub:
    """What the server has, and what was asked of it.

    Attributes:
        requests: "METHOD path range" in order. breaks_after: bytes after which the connection of the next download of a
            file ends, once.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    breaks_after: dict[str, int] = field(default_factory=dict)
    is_down: bool = False
    url: str = ""

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for, by name."""
        return [line.split("/")[-1] for line in self.requests if line.startswith("GET") and "/resolve/" in line]

    def start(self) -> ThreadingHTTPServer:
        """Serves on a free port until the result is shut down."""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        said = f"{self.command} {path}"
        self.hub.requests.append(f"{said} {self.headers['Range']}" if self.headers["Range"] else said)
        if self.hub.is_down:
            return self._refuse(503, "")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:])
        if len(parts) > 4 and parts[2] == "resolve":
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self._refuse(404, "EntryNotFound")

    def _repository(self, name: str, revision: str) -> Repository | None:
        """The repository; None: refused, as the hub does it."""
        found = self.hub.repositories.get(name)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token and token != TOKEN:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and token != TOKEN):
            self._refuse(401 if not token else 404, "RepoNotFound")
        elif revision not in ("main", found.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return found
        return None

    def _api(self, name: str, rest: list[str]) -> None:
        repository = self._repository(name, rest[1] if rest else "main")
        if repository is None:
            return
        files = repository.files.items()
        siblings = [{"rfilename": file, "size": len(data), "blobId": _sha1(data)} for file, data in sorted(files)]
        about = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}
        return self._send(json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if repository.gated and self.headers["Authorization"] is None:
            return self._refuse(401, "GatedRepo")
        if file not in repository.files:
            return self._refuse(404, "EntryNotFound", commit=repository.commit)
        data = repository.files[file]
        self._send(data, {"ETag": f'"{_sha1(data)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes",
                          "X-Linked-Size": str(len(data))}, file)  # fmt: skip

    def _send(self, data: bytes, headers: dict[str, str], file: str = "") -> None:
        start = 0
        if self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self.send_response(206 if self.headers["Range"] else 200)
        for key, value in (headers | {"Content-Length": str(len(data) - start)}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = data[start:]
        if file in self.hub.breaks_after:
            sent, self.close_connection = sent[: self.hub.breaks_after.pop(file)], True
        self.wfile.write(sent)

    def _refuse(self, code: int, error: str, message: str = "", commit: str = "") -> None:
        self.send_response(code)
        for key, value in {"X-Error-Code": error, "X-Error-Message": message, "X-Repo-Commit": commit}.items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
