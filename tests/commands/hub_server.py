"""A small server that speaks the API of the hub: listings, ranges, gates, broken connections."""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = 1000
"""Files of so many bytes and more are kept with LFS, as the hub does from 10 MB on."""


@dataclass
class Repository:
    """Files at one commit."""

    commit: str
    files: dict[str, bytes]
    gated: bool = False
    """Only with ``Hub.token``."""


@dataclass
class Hub:
    """What the server has, and what it was asked."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_secret_of_the_test"
    requests: list[str] = field(default_factory=list)
    """Method, path and range of every request."""
    cut_after: int | None = None
    """The next answer with more bytes breaks off after so many."""
    corrupt: bool = False
    """Files come with their last byte changed."""
    status: int | None = None
    """Answer everything with this."""
    another: threading.Event | None = None
    """The first file is held back until a second is asked for, which sets it."""
    waited_in_vain: bool = False
    """The second was not asked for meanwhile."""
    interrupts: bool = False
    """The first file comes after a Ctrl-C."""

    def fetched(self) -> list[str]:
        return [r for r in self.requests if r.startswith("GET") and "/resolve/" in r]


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve on a free port of 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.split("?")[0]
        hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if hub.status:
            self._send(hub.status, {}, b"{}")
            return
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {hub.token}"):
            message = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(401, message, b"{}")
            return
        is_listing = path.startswith("/api/models/")
        owner, name, kind, revision, *file = path.removeprefix("/api/models").strip("/").split("/")
        repository = hub.repositories.get(f"{owner}/{name}")
        if repository is None:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        elif revision not in ("main", repository.commit):
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        elif is_listing:
            listing = _tree(repository) if kind == "tree" else _info(f"{owner}/{name}", repository)
            self._send(200, {}, json.dumps(listing).encode())
        elif repository.gated and authorization is None:
            self._send(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        elif "/".join(file) not in repository.files:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
        else:
            self._send_file(hub, repository, repository.files["/".join(file)], with_body)

    def _send_file(self, hub: Hub, repository: Repository, content: bytes, body: bool) -> None:
        headers = {
            "X-Repo-Commit": repository.commit,
            "ETag": f'"{_sha256(content) if len(content) >= LARGE else _git_sha1(content)}"',
            "Accept-Ranges": "bytes",
        }
        if hub.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, first, size = 200, 0, len(content)
        if (wanted := self.headers.get("Range")) and body:
            status, first = 206, int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
        part = content[first:]
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(part))}).items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        if hub.interrupts:
            hub.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        if hub.another:
            if len(hub.fetched()) > 1:
                hub.another.set()
            hub.waited_in_vain |= not hub.another.wait(120)
        if hub.cut_after is not None and len(part) > hub.cut_after:
            part, hub.cut_after = part[: hub.cut_after], None
            self.close_connection = True
        self.wfile.write(part)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _info(name: str, repository: Repository) -> dict:
    """As ``/api/models/<name>/revision/<commit>?blobs=true`` answers."""
    siblings = []
    for file, content in repository.files.items():
        entry: dict = {"rfilename": file, "size": len(content), "blobId": _git_sha1(content)}
        if len(content) >= LARGE:
            entry["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
        siblings.append(entry)
    return {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}


def _tree(repository: Repository) -> list[dict]:
    """As ``/api/models/<name>/tree/<commit>?recursive=true`` answers."""
    entries = []
    for file, content in repository.files.items():
        size, oid = len(content), _git_sha1(content)
        entry: dict = {"type": "file", "path": file, "size": size, "oid": oid}
        if size >= LARGE:
            entry["lfs"] = {"oid": _sha256(content), "size": size, "pointerSize": 134}
        entries.append(entry)
    return entries


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
