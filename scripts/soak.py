"""Kill and freeze the roles of a tiny training run, again and again, and compare with a quiet one.

    python scripts/soak.py --faults 100 --json soak.json

A Ray cluster of two raylets is started on this machine, and ``g2rpo train`` on it. Faults come one
after another, from a seed; the next one as soon as the run has made an iteration after the last. At
the end the run is stopped with SIGTERM, resumed to its end, and compared with a run of as many
iterations that nobody disturbed: weights checksum, groups, and what is left behind.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
import ray
from ray.cluster_utils import Cluster

import measuring
from g2rpo_ray.config import Config, save_config
from g2rpo_ray.tracking.metrics import read_metrics

KINDS = {
    "worker_kill": 42,
    "worker_freeze": 9,
    "replica_kill": 20,
    "replica_freeze": 3,
    "rank_kill": 14,
    "rank_freeze": 3,
    "driver_kill": 5,
    "raylet_kill": 4,
}
"""Kind of fault -> how often, of 100."""
TITLES = {"worker": "ray::RolloutActor", "replica": "ray::ServeReplica", "rank": "ray::Learner"}
RECOVERY_LIMIT_S = 300.0
LEAST_FAULTS = 2
"""Whatever the time limit."""
LEAVING_S = 30.0
"""For what a finished run had on the cluster to go."""
T = TypeVar("T")
CPUS = 1
"""Of each of the two nodes; the roles take a quarter each, and there are five."""


def soak_config(run_dir: Path, address: str, iterations: int) -> Config:
    """The quickstart, made as small as it gets."""
    overrides = [f"run_dir={run_dir}", f"cluster.address={address}", f"iterations={iterations}"]
    return measuring.quickstart([*measuring.settings("soak"), *overrides], ["clip"])


class Nodes:
    """A head and a second raylet on this machine."""

    def __init__(self) -> None:
        head = {"num_cpus": CPUS, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.add_second()

    def add_second(self) -> None:
        self.second: Any = self.cluster.add_node(num_cpus=CPUS)

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


class Soak:
    """Injects faults into a run, and looks at it until it goes on."""

    def __init__(self, nodes: Nodes, seed: int) -> None:
        self.nodes, self.chance = nodes, random.Random(seed)
        self.faults: list[str] = []
        """Their kinds."""
        self.recovery_s: dict[str, list[float]] = defaultdict(list)
        """Kind -> times from a fault until an iteration that began after it was on record."""
        self.driver_deaths: list[str] = []
        """Fault after which the driver ended by itself, for each time."""

    def disturb(self, count: int, limit_s: float, driver: Driver) -> None:
        """Faults in a run, one after another, begun within ``limit_s`` of its first iteration."""
        wait_for(lambda: self.moved(driver, 0), RECOVERY_LIMIT_S, "the first iteration")
        first_s = time.monotonic()
        for kind in self.plan(count):
            if len(self.faults) >= LEAST_FAULTS and time.monotonic() - first_s > limit_s:
                print(f"out of time after {len(self.faults)} faults")
                break
            iteration, started_s = driver.iterations() + 1, time.monotonic()
            victim = self.inject(kind, driver)
            self.faults.append(kind)
            whole = partial(self.moved, driver, iteration)
            wait_for(whole, RECOVERY_LIMIT_S, f"a whole iteration after {kind}")
            seconds = time.monotonic() - started_s
            self.recovery_s[kind].append(seconds)
            print(
                f"{len(self.faults)}/{count} {kind} ({victim}) in iteration {iteration}: "
                f"{seconds:.1f} s"
            )

    def plan(self, count: int) -> list[str]:
        """One fault of each kind, then as many of each as their shares say, shuffled."""
        some_of_each = self.chance.sample(list(KINDS), len(KINDS))
        rest = [kind for kind, share in KINDS.items() for _ in range(share - 1)]
        plan = [*some_of_each, *self.chance.sample(rest, len(rest))]
        return [plan[place % len(plan)] for place in range(count)]

    def inject(self, kind: str, driver: Driver) -> str:
        role, _, deed = kind.partition("_")
        if role == "raylet":
            self.nodes.kill_second()
            self.nodes.add_second()
            return "second raylet"
        if role == "driver":
            driver.kill()
            driver.start()
            return f"pid {driver.process.pid}"
        find = partial(self.nodes.workers, TITLES[role])
        victims = wait_for(find, RECOVERY_LIMIT_S, f"a {role}")
        # At any moment of an iteration.
        time.sleep(self.chance.random())
        victim = self.chance.choice(victims)
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL if deed == "kill" else signal.SIGSTOP)
        return f"pid {victim.pid}"

    def moved(self, driver: Driver, iteration: int) -> bool:
        """Whether the run has gone beyond an iteration; a driver that ended is started again."""
        code = driver.process.poll()
        if code is not None:
            # A group that lay on a killed node may be needed at the fault after that, too.
            latest = ["start", *self.faults][-2:]
            cause = "raylet_kill" if "raylet_kill" in latest else latest[-1]
            self.driver_deaths.append(cause)
            print(f"the driver ended with {code} after {cause}: started again")
            driver.start()
        return driver.iterations() > iteration

    def report(self) -> dict[str, Any]:
        """The faults, what they cost, and how often the driver died of them."""
        recovery = dict(sorted(self.recovery_s.items()))
        return {
            "faults": len(self.faults),
            "faults_by_kind": {kind: len(seconds) for kind, seconds in recovery.items()},
            "recovery_s": {
                kind: {"median": round(median(seconds), 1), "max": round(max(seconds), 1)}
                for kind, seconds in recovery.items()
            },
            "driver_deaths": sum(cause != "raylet_kill" for cause in self.driver_deaths),
            "driver_deaths_after": dict(sorted(Counter(self.driver_deaths).items())),
        }


def wait_for(find: Callable[[], T], limit_s: float, what: str) -> T:
    """The first answer that is true, or not empty."""
    deadline_s = time.monotonic() + limit_s
    while not (found := find()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)
    return found


def stop(driver: Driver) -> dict[str, float]:
    """SIGTERM, as a scheduler sends it; says how long the end took."""
    started_s = time.monotonic()
    driver.process.send_signal(signal.SIGTERM)
    code = driver.process.wait(RECOVERY_LIMIT_S)
    return {"exit_code": code, "seconds": round(time.monotonic() - started_s, 1)}


def groups_of(run_dir: Path, iterations: int, expected: int) -> dict[str, int]:
    """Groups that are missing from the record, and those counted twice."""
    wanted = Counter(dict.fromkeys(range(1, iterations + 1), expected))
    trained = Counter[int]()
    for record in read_metrics(run_dir):
        if record["kind"] == "train":
            trained[record["iteration"]] += record["groups/trained"]
    return {"groups_lost": (wanted - trained).total(), "groups_doubled": (trained - wanted).total()}


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
    return {
        "actors": actors,
        "placement_groups": groups,
        "serve_applications": applications,
        "processes": [str(p) for title in TITLES.values() for p in nodes.workers(title)],
    }


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def held_by_living(names: set[str]) -> set[str]:
    """Those of the files that some process has open or mapped: others' runs beside this one."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = [str(link.readlink()) for link in (process / "fd").iterdir()]
            used = "\n".join([(process / "maps").read_text(), *links])
            held |= {name for name in names if f"/dev/shm/{name}" in used}
    return held


def run(count: int, seed: int, folder: Path, limit_s: float) -> dict[str, Any]:
    started_s = time.monotonic()
    shared_before = shared_memory()
    nodes = Nodes()
    address = nodes.cluster.address
    soak = Soak(nodes, seed)
    drivers: list[Driver] = []
    try:
        driver = Driver(folder, soak_config(folder / "disturbed", address, 100_000))
        drivers.append(driver)
        soak.disturb(count, limit_s, driver)
        disturbed_s = time.monotonic() - started_s
        stopped = stop(driver)
        iterations = driver.iterations() + 1
        print(f"SIGTERM: {stopped}; now to the end, {iterations} iterations")
        driver.start(f"iterations={iterations}")
        driver.wait(RECOVERY_LIMIT_S)
        disturbed = json.loads((driver.run_dir / "summary.json").read_text())
        leaks = left_at_last(nodes, address)
        quiet = Driver(folder, soak_config(folder / "quiet", address, iterations))
        drivers.append(quiet)
        quiet.wait(RECOVERY_LIMIT_S + 20 * iterations)
        reference = json.loads((quiet.run_dir / "summary.json").read_text())
    finally:
        for one in drivers:
            one.kill()
        children = nodes.processes()
        nodes.cluster.shutdown()
    _, alive = psutil.wait_procs(children, timeout=30)
    leaks["processes_after_shutdown"] = [str(process) for process in alive]
    new = shared_memory() - shared_before
    leaks["shared_memory"] = sorted(new - held_by_living(new))
    return {
        **soak.report(),
        "checksum_equal": disturbed["weights_checksum"] == reference["weights_checksum"],
        "checksum": disturbed["weights_checksum"],
        "evaluations_equal": disturbed["evaluations"] == reference["evaluations"],
        "iterations": iterations,
        **groups_of(driver.run_dir, iterations, expected=2),  # two prompts, one SDE step
        "sigterm": stopped,
        "driver_lives": driver.lives,
        "leaks": leaks,
        "leaked": sum(len(found) for found in leaks.values()),
        "disturbed_s": round(disturbed_s, 1),
        "total_s": round(time.monotonic() - started_s, 1),
        "seed": seed,
    }


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep runs and logs here")
    late = "begin no fault so long after the first iteration, but for the first two"
    parser.add_argument("--limit-s", type=float, default=7200.0, help=late)
    options = parser.parse_args()
    # So that a time limit from outside ends all that was started, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="g2rpo-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = run(options.faults, options.seed, folder.resolve(), options.limit_s)
    print(json.dumps(result, indent=1))
    measuring.write_json(options.json, result)
    good = (
        result["checksum_equal"]
        and result["groups_lost"] == result["groups_doubled"] == 0
        and result["leaked"] == result["driver_deaths"] == 0
    )
    if good and options.folder is None:
        shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
