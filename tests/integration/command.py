"""The command line as a process of its own, and a way to find every process that it left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from g2rpo_ray.config import Config, save_config

ROOT = Path(__file__).parents[2]
MARK = "G2RPO_TEST_COMMAND"
"""Environment variable that all processes of a command inherit."""
TIMEOUT_S = 240.0


@dataclass
class Command:
    """A started ``g2rpo train``."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    def wait(self) -> int:
        """Exit code; the output is in ``text``."""
        return self.process.wait(TIMEOUT_S)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left_over(self) -> list[str]:
        """Command lines of processes that live on, after they had time to end."""
        wait_until(
            lambda: not _marked(self.mark), "the command's processes to end", 20, strict=False
        )
        return [path.joinpath("cmdline").read_text() for path in _marked(self.mark)]

    def kill(self) -> None:
        """End whatever is still there."""
        for path in _marked(self.mark):
            os.kill(int(path.name), signal.SIGKILL)
        self.process.wait(TIMEOUT_S)


def train(config: Config, *options: str) -> Command:
    """Start ``g2rpo train`` in a session of its own, as a terminal would."""
    folder = Path(config.run_dir).parent
    mark = uuid.uuid4().hex
    settings, log = folder / f"{mark}.yaml", folder / f"{mark}.log"
    save_config(config, settings)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "g2rpo_ray.cli", "train", str(settings), *options],
            cwd=ROOT,
            env=environment | {MARK: mark, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Command(process, mark, log)


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S, *, strict: bool = True
) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            if not strict:
                return
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.1)


def _marked(mark: str) -> list[Path]:
    """Folders in /proc of the living processes that carry the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # A process that has ended and was not waited for has no environment any more.
            if wanted in path.joinpath("environ").read_bytes().split(b"\0"):
                found.append(path)
        except OSError:
            continue
    return found
