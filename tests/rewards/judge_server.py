"""A real HTTP server that answers as a test tells it to."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    """One answer of the server."""

    body: bytes | dict[str, Any] | list[Any] | str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    trickle_s: float = 0.0
    """Pause before each byte of the body."""

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class FakeEndpoint:
    """Gives its answers in turn, the last one again and again, and keeps what it was asked."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            self.paths.append(path)
            self.headers.append(headers)
            self.requests.append(json.loads(body))
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def done(self) -> None:
        with self._lock:
            self._open -= 1


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[FakeEndpoint]:
    """A server on this machine; with TLS where a certificate (and its key) is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = endpoint.take(self.path, dict(self.headers), body)
            time.sleep(answer.delay_s)
            endpoint.done()
            try:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                if not answer.trickle_s:
                    self.wfile.write(answer.content)
                    return
                for byte in answer.content:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(answer.trickle_s)
            except (BrokenPipeError, ConnectionResetError):
                pass  # The other side gave up: that is what some tests are about.

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    endpoint = FakeEndpoint(f"{scheme}://localhost:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
