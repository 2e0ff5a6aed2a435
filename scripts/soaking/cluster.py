"""A run and its cluster as others see them: two raylets, ``g2rpo train``, what is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.cluster_utils import Cluster

import measuring
from g2rpo_ray.config import Config, save_config
from g2rpo_ray.tracking.metrics import read_metrics

TITLES = {"worker": "ray::RolloutActor", "replica": "ray::ServeReplica", "rank": "ray::Learner"}
RECOVERY_LIMIT_S = 900.0
LEAVING_S = 90.0
"""For what a finished run had on the cluster to go."""
CPUS = {"num_cpus": 1}
"""Of a node; the roles take a quarter each."""
SHARED = Path("/dev/shm")
T = TypeVar("T")


class Nodes:
    """A head and a second raylet on this machine.

    Args:
        head: of ``ray start``, in its Python form; both have one CPU where nothing else is said.
        second: likewise.
    """

    def __init__(self, head: Mapping[str, Any] = CPUS, second: Mapping[str, Any] = CPUS) -> None:
        head_args = {"include_dashboard": False, **head}
        self.cluster = Cluster(initialize_head=True, head_node_args=head_args)
        self._second_args = second
        self.add_second()

    def add_second(self) -> None:
        self.second: Any = self.cluster.add_node(**self._second_args)

    def kill_second(self) -> None:
        """Power loss: raylet, its agents and all its workers at once."""
        for process in processes_of(self.second):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(self.second, allow_graceful=False)

    def processes(self) -> list[psutil.Process]:
        """Both raylets and all that they have started."""
        return [*processes_of(self.cluster.head_node), *processes_of(self.second)]

    def workers(self, title: str) -> list[psutil.Process]:
        """Processes of a role, by Ray's title for them."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found


def processes_of(node: Any) -> list[psutil.Process]:
    """A node's raylet and its descendants; none where Ray's own handler of SIGTERM has ended it."""
    for raylet in node.all_processes.get("raylet", []):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(raylet.process.pid)
            return [process, *process.children(recursive=True)]
    return []


class Driver:
    """``g2rpo train`` as a process, started again where it was left."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.run_dir, self.lives = folder, Path(config.run_dir), 0
        self.log = folder / f"{self.run_dir.name}.log"
        save_config(config, self.log.with_suffix(".yaml"))
        self.start()

    def start(self, *overrides: str) -> None:
        self.lives += 1
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
        environment["PYTHONPATH"] = f"{measuring.ROOT}:{environment.get('PYTHONPATH', '')}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "g2rpo_ray.cli", "train", f"{self.run_dir.name}.yaml",
                 "--resume", "auto", *overrides],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def iterations(self) -> int:
        """Iterations on record."""
        return max((record["iteration"] for record in read_metrics(self.run_dir)), default=0)

    def wait(self, limit_s: float) -> None:
        """Until the run has ended well; else RuntimeError with the last of its log."""
        code = self.process.wait(limit_s)
        if code != 0:
            log = self.log.read_text(errors="replace")
            raise RuntimeError(f"{self.run_dir.name}: ended with {code}\n{log[-3000:]}")

    def kill(self) -> None:
        """At once, with all that it has started itself."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def wait_for(find: Callable[[], T], limit_s: float, what: str) -> T:
    """The first answer that is true, or not empty."""
    deadline_s = time.monotonic() + limit_s
    while not (found := find()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)
    return found


def stop(driver: Driver, end: signal.Signals = signal.SIGTERM) -> dict[str, float]:
    """SIGTERM, as a scheduler sends it, or another signal; says how long the end took."""
    started_s = time.monotonic()
    driver.process.send_signal(end)
    code = driver.process.wait(RECOVERY_LIMIT_S)
    return {"exit_code": code, "seconds": round(time.monotonic() - started_s, 1)}


@contextmanager
def clean_nodes(
    leaks: dict[str, list[str]], head: Mapping[str, Any] = CPUS, second: Mapping[str, Any] = CPUS
) -> Iterator[Nodes]:
    """A cluster, as of ``Nodes``; ``leaks`` gets what is left of it at the end."""
    before, nodes = shared_memory(), Nodes(head, second)
    try:
        yield nodes
    finally:
        children = nodes.processes()
        nodes.cluster.shutdown()
    _, alive = psutil.wait_procs(children, timeout=120)
    leaks["processes_after_shutdown"] = [str(process) for process in alive]
    new = shared_memory() - before
    leaks["shared_memory"] = sorted(new - held_by_living(new) - made_with_a_card(new))


def left_at_last(nodes: Nodes, address: str) -> dict[str, list[str]]:
    """As ``left_behind``, once it is nothing or has had time to go."""
    deadline_s = time.monotonic() + LEAVING_S
    while any((found := left_behind(nodes, address)).values()) and time.monotonic() < deadline_s:
        time.sleep(1.0)
    return found


def left_behind(nodes: Nodes, address: str) -> dict[str, list[str]]:
    """What a finished run has left on the cluster."""
    from ray import serve

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        actors = [
            f"{actor['ActorClassName']} {actor['State']}"
            for actor in ray._private.state.actors().values()
            if actor["State"] != "DEAD" and not actor["ActorClassName"].startswith("Serve")
        ]
        groups = [
            entry["name"] or entry["placement_group_id"]
            for entry in ray.util.placement_group_table().values()
            if entry["state"] != "REMOVED"
        ]
        applications = list(serve.status().applications)
    finally:
        ray.shutdown()
        # Else Serve would ask this cluster's controller on the next one.
        serve.context._set_global_client(None)
    return {
        "actors": actors,
        "placement_groups": groups,
        "serve_applications": applications,
        "processes": [str(p) for title in TITLES.values() for p in nodes.workers(title)],
    }


def shared_memory() -> set[str]:
    return {path.name for path in SHARED.iterdir()}


def made_with_a_card(names: set[str]) -> set[str]:
    """Those of processes that used CUDA, whose driver leaves a file with their id: none of ours."""
    found = re.findall(r"^cuda\.shm\.\w+\.(\w+)\.", "\n".join(names), re.MULTILINE)
    starts = ("cuda.shm.", *(f"torch_{int(process, 16)}_" for process in found))
    return {name for name in names if name.startswith(starts)}


def held_by_living(names: set[str]) -> set[str]:
    """Those of the files that some process has open or mapped, or that are gone meanwhile: of
    others' runs beside this one.

    By inode: who makes a semaphore maps it under a name that it had for a moment.
    """
    held, left = set(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
            held |= {int(at[4]) for at in maps if at[5:] and at[5].startswith(f"{SHARED}/")}
            for link in (process / "fd").iterdir():
                # It may be closed meanwhile.
                with suppress(OSError):
                    if link.readlink().is_relative_to(SHARED):
                        held.add(link.stat().st_ino)
    for name in names:
        with suppress(FileNotFoundError):
            left[name] = (SHARED / name).stat().st_ino
    return {name for name in names if name not in left or left[name] in held}
