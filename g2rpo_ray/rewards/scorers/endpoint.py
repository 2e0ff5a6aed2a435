"""Asking an HTTP endpoint: deadlines, retries, a limit on what runs at once; TLS is verified."""

import base64
import io
import json
import os
import re
import time
from typing import Any
from urllib.parse import quote

from PIL import Image
from pydantic import Field

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.secrets import redacted
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import ScorerError, Tensor

MAX_ANSWER_BYTES = 16 * 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S, SHORTEST_TIMEOUT_S = 0.5, 8.0, 0.001
PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which another try may help."""


class EndpointOptions(Section):
    """Settings of every scorer behind HTTP."""

    url: str = Field(pattern=r"^https?://")
    """Address of the endpoint; ``${NAME}`` stands for an environment variable of the replica."""
    timeout_s: float = Field(60.0, gt=0)
    """A call with all its tries takes at most this."""
    tries: int = Field(4, ge=1)
    """Tries of a call, with pauses between that grow to 8 s; only after failures that may pass. To
    outlast an endpoint that is down for minutes give many, and a ``timeout_s`` that is longer."""
    concurrency: int = Field(8, ge=1)
    """Calls under way at once, for each replica."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; never the key. It is sent as a bearer token,
    or as it is where it begins with ``Basic``."""
    ca_file: str | None = None
    """Certificates to trust instead of the usual ones, such as a company's own."""


class _PassingError(Exception):
    """This try failed; the next may not."""

    def __init__(self, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.pause_s = pause_s


class Endpoint:
    """JSON in, JSON out."""

    def __init__(self, options: EndpointOptions, url: str) -> None:
        import requests

        self._options, self._shown, self._secrets = options, url, list[str]()
        self._url = re.sub(r"\$\{(\w+)\}", lambda m: quote(self._variable(m[1], "url"), ""), url)
        self._session = requests.Session()
        self._session.mount(
            self._url, requests.adapters.HTTPAdapter(pool_maxsize=options.concurrency)
        )
        # Given with each call: the session's own gives way to REQUESTS_CA_BUNDLE.
        self._verify: bool | str = True
        if options.ca_file is not None:
            ca_file = resolve_path(options.ca_file)
            if not ca_file.is_file():
                raise ScorerError(f"{ca_file}: no such file (options.ca_file)")
            self._verify = str(ca_file)
        if options.api_key_env is not None:
            key = self._variable(options.api_key_env, "api_key_env")
            self._session.headers["Authorization"] = (
                key if key.startswith("Basic ") else f"Bearer {key}"
            )

    def _variable(self, name: str, option: str) -> str:
        value = os.environ.get(name, "")
        if not value:
            raise ScorerError(
                f"environment variable {name} (options.{option}) is not set where the scorer runs"
            )
        self._secrets += [value, quote(value, "")]
        return value

    def post(self, payload: dict[str, Any]) -> Any:
        """The JSON that the endpoint answers.

        Raises:
            ScorerError: no usable answer within tries and time-out, with the last cause.
        """
        deadline_s, growing_s = time.monotonic() + self._options.timeout_s, FIRST_PAUSE_S
        for attempt in range(1, self._options.tries + 1):
            try:
                return self._try(payload, deadline_s)
            except _PassingError as error:
                # Bounded: one that was down for minutes is asked soon after it is back.
                cause, pause_s = str(error), max(error.pause_s, growing_s)
                growing_s = min(2 * growing_s, LONGEST_PAUSE_S)
            if attempt == self._options.tries or time.monotonic() + pause_s > deadline_s:
                break
            time.sleep(pause_s)
        raise self.error(
            f"{cause}; gave up after try {attempt} of {self._options.tries} "
            f"(timeout_s {self._options.timeout_s:g})"
        )

    def error(self, cause: str) -> ScorerError:
        """Names the endpoint and the cause; what came from the environment is cut out."""
        message = f"{self._shown}: {cause}"
        for secret in self._secrets:
            message = message.replace(secret, "***")
        return ScorerError(redacted(message))

    def _try(self, payload: dict[str, Any], deadline_s: float) -> Any:
        import requests
        import urllib3

        try:
            with self._session.post(
                self._url,
                json=payload,
                timeout=max(deadline_s - time.monotonic(), SHORTEST_TIMEOUT_S),
                verify=self._verify,
                stream=True,
                allow_redirects=False,
            ) as response:
                body = self._read(response, deadline_s)
        except requests.exceptions.SSLError as error:
            raise self.error(f"TLS certificate refused: {error}") from error
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
            raise _PassingError("no answer in time") from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise _PassingError(f"no connection: {error}") from error
        if response.status_code in PASSING_STATUS:
            after = response.headers.get("Retry-After", "")
            pause_s = float(after) if after.isdigit() else 0.0
            raise _PassingError(f"status {response.status_code}: {_excerpt(body)}", pause_s)
        if response.status_code != 200:
            raise self.error(f"status {response.status_code}: {_excerpt(body)}")
        try:
            return json.loads(body)
        except ValueError as error:
            raise self.error(f"answered no JSON: {_excerpt(body)}") from error

    def _read(self, response: Any, deadline_s: float) -> bytes:
        # The time-out is for each piece that comes, and a server may trickle: iter_content waits
        # for as many bytes as it is asked for.
        body = b""
        while piece := response.raw.read1(64 * 1024, decode_content=True):
            body += piece
            if time.monotonic() > deadline_s:
                raise _PassingError("no whole answer in time")
            if len(body) > MAX_ANSWER_BYTES:
                raise self.error(f"answered more than {MAX_ANSWER_BYTES} bytes")
        return body


def png_base64(picture: Tensor) -> str:
    """uint8 ``[H, W, 3]`` as base64 of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture.numpy()).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _excerpt(body: bytes) -> str:
    return repr(body[:200].decode("utf-8", "replace"))
