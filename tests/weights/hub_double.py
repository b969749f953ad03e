"""A Hub on loopback: just enough of the API for ``huggingface_hub`` to list and download a model, and to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """Repositories by name; what shall go wrong; what was asked."""

    repos: dict[str, dict[str, bytes]]
    large: tuple[str, ...] = (".safetensors", ".bin", "tokenizer.json")
    corrupt: set[str] = field(default_factory=set)
    truncate: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    status: int = 200
    silent: bool = False
    outwaited: bool = False
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.stopped = threading.Event()
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()

    def is_large(self, name: str) -> bool:
        return name.endswith(self.large)

    def listing(self, repo: str) -> dict[str, Any]:
        files = [self.entry(name, content) for name, content in self.repos[repo].items()]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": files, "tags": [], "downloads": 0}

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
        if self.is_large(name):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
        return entry


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *given: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.hub, self.path.split("?")[0].strip("/")
        hub.asked.append((self.command, path, self.headers.get("Authorization")))
        if hub.silent:
            hub.outwaited = not hub.stopped.wait(5)
            return
        repo = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if hub.status != 200:
            self.refuse(hub.status, None)
        elif repo not in hub.repos:
            self.refuse(401, "RepoNotFound")
        elif repo in hub.gated and self.headers.get("Authorization") != "Bearer hf_good":
            self.refuse(401, "GatedRepo")
        elif path.startswith("api/models/"):
            self.send(json.dumps(hub.listing(repo)).encode(), {"Content-Type": "application/json"}, body)
        else:
            self.send_file(repo, path.split("/resolve/")[-1].partition("/")[2], body)

    def refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, repo: str, name: str, body: bool) -> None:
        content = self.hub.repos[repo].get(name)
        if content is None:
            return self.refuse(404, "EntryNotFound")
        large = self.hub.is_large(name)
        digest = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}
        if name in self.hub.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        keep = len(content) // 2 if name in self.hub.truncate else None
        return self.send(content, headers, body, keep)

    def send(self, content: bytes, headers: dict[str, str], body: bool, keep: int | None = None) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[:keep])
        if keep is not None:
            self.close_connection = True
