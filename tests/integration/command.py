"""The command line as a process of its own, and a way to find every process that it left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from g2rpo_ray.config import Config, save_config

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 480.0


def python_path(*first: Path) -> str:
    """PYTHONPATH of a process that has the project, and what this one was given beside it."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), str(ROOT), *([given] if given else [])])


@dataclass
class Command:
    """A started ``g2rpo train``."""

    process: subprocess.Popen[bytes]
    folder: Path
    """Its working directory, which all of its processes inherit and no other has. (Ray's processes
    overwrite their environment by their title, and form several sessions.)"""

    def wait(self) -> int:
        """Exit code; the output is in ``text``."""
        return self.process.wait(TIMEOUT_S)

    @property
    def text(self) -> str:
        return (self.folder / "log").read_text()

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left_over(self) -> list[str]:
        """Command lines of processes that live on, after they had time to end."""
        with suppress(TimeoutError):
            wait_until(lambda: not self.processes(), "the command's processes to end")
        return [path.joinpath("cmdline").read_text() for path in self.processes()]

    def kill(self) -> None:
        """End whatever is still there."""
        while processes := self.processes():
            for path in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait(TIMEOUT_S)

    def processes(self) -> list[Path]:
        """Folders in /proc of the command's living processes."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            # Others' processes, and those that end meanwhile, are not readable.
            with suppress(OSError):
                if path.joinpath("cwd").readlink() == self.folder:
                    found.append(path)
        return found


def train(config: Config, *options: str, **variables: str) -> Command:
    """Start ``g2rpo train`` in a session of its own, as a terminal would.

    Args:
        variables: added to its environment.
    """
    return g2rpo("train", config, *options, **variables)


def g2rpo(name: str, config: Config, *options: str, **variables: str) -> Command:
    """The same of any ``g2rpo NAME CONFIG``."""
    folder = Path(tempfile.mkdtemp(dir=Path(config.run_dir).parent)).resolve()
    save_config(config, folder / "settings.yaml")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "g2rpo_ray.cli", name, "settings.yaml", *options],
            cwd=folder,
            env=environment | {"PYTHONPATH": python_path()} | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Command(process, folder)


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S, poll_s: float = 0.1
) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(poll_s)
