"""A Ray cluster of several raylets on this machine, with token authentication."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cluster.slurm import free_ports
from tests.integration.command import ROOT, wait_until


@dataclass
class Raylets:
    """A head and its workers, each ``ray start --block`` in a session of its own."""

    folder: Path
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def environment(self) -> dict[str, str]:
        """Of a client that may come in."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": self.dashboard,
        }

    def start(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """One more raylet; returns when it has started."""
        log = self.folder / f"ray_start_{len(self.processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
                 "--disable-usage-stats", "--object-store-memory=600000000", "--num-gpus=0",
                 "--min-worker-port=0", "--max-worker-port=0",
                 "--dashboard-agent-listen-port=0", *options],
                env=self.environment | environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        wait_until(
            lambda: b"Ray runtime started" in log.read_bytes() or process.poll() is not None,
            "ray start",
            120,
        )
        assert process.poll() is None, log.read_text()
        return process

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A client's command in the project's folder, with its output."""
        return subprocess.run(
            [sys.executable, *command],
            env=self.environment | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )


@contextmanager
def raylets(head_options: tuple[str, ...] = ()) -> Iterator[Raylets]:
    """Start a head, and end it and all that was added."""
    # Not pytest's folder: Ray's sockets lie in it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="g2rpo-ray-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    # Ports above each other; the dashboard's is the head's plus one, as cluster/slurm has it.
    (port,) = free_ports(1)
    cluster = Raylets(folder, port)
    try:
        cluster.start(
            "--head", f"--port={port}", f"--dashboard-port={port + 1}",
            f"--ray-client-server-port={port + 2}", f"--temp-dir={folder}/ray", *head_options,
        )  # fmt: skip
        yield cluster
    finally:
        for process in reversed(cluster.processes):
            end_tree(process)
        shutil.rmtree(folder)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a raylet with all of its processes, as a node that loses its power."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait(30)
    time.sleep(0.1)
