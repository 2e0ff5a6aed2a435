"""A scorer behind HTTP (``kind: http``) with good days and bad ones; its scores never change."""

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import numpy as np
from PIL import Image

RANGE = (-1.0, 1.0)
"""Of its scores."""
SLOW_S = 1.5
"""An answer takes, while it is slow."""
ALLOWED = 3
"""While it limits the rate, every so-manieth request is answered."""
WRONG_ASKS = 2
"""While it is wrong, so many answers to a request are, then one is right."""


def right_scores(pictures: list[str]) -> list[float]:
    """Of PNG files in base64: how much redder than blue they are, in ``RANGE``."""
    colours = (np.asarray(Image.open(io.BytesIO(base64.b64decode(it)))) for it in pictures)
    return [float(it[..., 0].mean() - it[..., 2].mean()) / 255 for it in colours]


def wrong_answer(number: int, scores: list[float]) -> bytes:
    """One of the ways in which an answer is none."""
    answers: list[Any] = [
        {"scores": [None, *scores[1:]]},
        {"scores": [float("nan"), *scores[1:]]},
        {"scores": scores[:-1]},
        {"scores": [*scores, 0.0]},
        {"scores": [1e6, *scores[1:]]},
        {"scores": [str(it) for it in scores]},
        {"error": "overloaded"},
    ]
    place = number % (len(answers) + 1)
    return b"<html>502" if place == len(answers) else json.dumps(answers[place]).encode()


class Judge:
    """Answers on one port of this machine; ``mood`` is how, and may be set at any time.

    Moods: ``fair``, ``slow``, ``limiting`` (429), ``wrong``, ``silent`` (takes requests and never
    answers), ``down`` (nobody listens).
    """

    def __init__(self, port: int = 0) -> None:
        self._mood, self._changed = "fair", threading.Condition()
        self._numbers, self._wrong_asks = count(), Counter[bytes]()
        self.answers: Counter[str] = Counter()
        """Mood -> requests that it was asked in."""
        self._server: ThreadingHTTPServer | None = None
        self.port = port
        self._listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def mood(self) -> str:
        return self._mood

    @mood.setter
    def mood(self, mood: str) -> None:
        with self._changed:
            self._mood = mood
            self._changed.notify_all()
        if mood == "down":
            self.close()
        elif self._server is None:
            self._listen()

    def close(self) -> None:
        """Nobody listens any more."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _listen(self) -> None:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                # Who gave up waiting has closed the connection.
                with suppress(BrokenPipeError, ConnectionResetError):
                    judge._answer(self, body)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads, server.block_on_close = True, False
        self.port, self._server = server.server_port, server
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        mood, number = self._mood, next(self._numbers)
        self.answers[mood] += 1
        if mood == "silent":
            with self._changed:
                self._changed.wait_for(lambda: self._mood != "silent")
            return
        if mood == "limiting" and number % ALLOWED:
            request.send_response(429)
            request.send_header("Retry-After", "1")
            request.end_headers()
            return
        if mood == "slow":
            time.sleep(SLOW_S)
        scores = right_scores(json.loads(body)["pictures"])
        answer = json.dumps({"scores": scores}).encode()
        if mood == "wrong":
            self._wrong_asks[body] += 1
            if self._wrong_asks[body] <= WRONG_ASKS:
                answer = wrong_answer(number, scores)
        else:
            self._wrong_asks.clear()
        request.send_response(200)
        request.end_headers()
        request.wfile.write(answer)


@contextmanager
def judging(port: int = 0) -> Iterator[Judge]:
    """A judge that is fair until it is told otherwise."""
    judge = Judge(port)
    try:
        yield judge
    finally:
        judge.close()
