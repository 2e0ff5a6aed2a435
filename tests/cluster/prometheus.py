"""Debian's Prometheus on 127.0.0.1, in a folder of its own, and what it answers."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITORING = Path(__file__).parents[2] / "cluster" / "monitoring"
START_S = 30.0


def missing() -> str | None:
    """Why Prometheus cannot be run here."""
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (apt-get install prometheus)" if absent else None


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, each with ``metric`` (labels) and ``value``."""
        return self._get("query", query=expression)["result"]

    def query_range(self, expression: str, start_s: float, end_s: float, step_s: float) -> Any:
        """The series between two times, each with ``metric`` and ``values``."""
        times = {"start": str(start_s), "end": str(end_s), "step": str(step_s)}
        return self._get("query_range", query=expression, **times)["result"]

    def rules(self) -> list[dict[str, Any]]:
        """Every alert rule with its ``state``, ``health`` and ``lastError``."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **parameters: str) -> Any:
        address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, discovery: Sequence[str]) -> Iterator[Prometheus]:
    """Scrape the targets that Ray's discovery files (globs) name, with the project's alerts."""
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": "ray",
                "file_sd_configs": [{"files": list(discovery), "refresh_interval": "2s"}],
            }
        ],
    }
    (folder / "prometheus.json").write_text(json.dumps(configuration))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.json'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(f"http://{address}", process, folder / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"Prometheus did not start within {START_S:g} s:\n{log.read_text()}")
