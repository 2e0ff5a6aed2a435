"""Kill and freeze the roles of a tiny run, one after another, and compare with a quiet one."""

import json
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import measuring
from g2rpo_ray.config import Config
from g2rpo_ray.tracking.metrics import read_metrics
from soaking.cluster import (
    RECOVERY_LIMIT_S,
    TITLES,
    Driver,
    Nodes,
    clean_nodes,
    left_at_last,
    stop,
    wait_for,
)

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
LEAST_FAULTS = 2
"""Whatever the time limit."""


def soak_config(run_dir: Path, address: str, kinds: Sequence[str], *overrides: str) -> Config:
    """The quickstart, made as small as it gets; deadlines are short where roles are frozen."""
    names = ["soak", "soak_freeze"] if any(it.endswith("freeze") for it in kinds) else ["soak"]
    places = [f"run_dir={run_dir}", f"cluster.address={address}"]
    return measuring.run_config([*measuring.settings(*names), *places, *overrides], ["clip"])


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

    def disturb(self, kinds: Sequence[str], limit_s: float, driver: Driver) -> None:
        """Faults in a run, one after another, begun within ``limit_s`` of its first iteration."""
        wait_for(lambda: self.moved(driver, 0), RECOVERY_LIMIT_S, "the first iteration")
        first_s = time.monotonic()
        for kind in kinds:
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
                f"{len(self.faults)}/{len(kinds)} {kind} ({victim}) in iteration {iteration}: "
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


def groups_of(run_dir: Path, iterations: int, expected: int) -> dict[str, int]:
    """Groups that are missing from the record, and those counted twice."""
    wanted = Counter(dict.fromkeys(range(1, iterations + 1), expected))
    trained = Counter[int]()
    for record in read_metrics(run_dir):
        if record["kind"] == "train":
            trained[record["iteration"]] += record["groups/trained"]
    return {"groups_lost": (wanted - trained).total(), "groups_doubled": (trained - wanted).total()}


def run(
    count: int, seed: int, folder: Path, limit_s: float, end: signal.Signals = signal.SIGTERM
) -> dict[str, Any]:
    started_s, leaks = time.monotonic(), dict[str, list[str]]()
    with clean_nodes(leaks) as nodes, ExitStack() as ending:
        address, soak = nodes.cluster.address, Soak(nodes, seed)
        kinds = soak.plan(count)
        disturbed_dir, endless = folder / "disturbed", "iterations=100000"
        driver = Driver(folder, soak_config(disturbed_dir, address, kinds, endless))
        ending.callback(driver.kill)
        soak.disturb(kinds, limit_s, driver)
        disturbed_s = time.monotonic() - started_s
        stopped = stop(driver, end)
        iterations = driver.iterations() + 1
        print(f"{end.name}: {stopped}; now to the end, {iterations} iterations")
        driver.start(f"iterations={iterations}")
        driver.wait(RECOVERY_LIMIT_S)
        disturbed = json.loads((driver.run_dir / "summary.json").read_text())
        leaks |= left_at_last(nodes, address)
        # One worker draws what two have drawn.
        alone = (f"iterations={iterations}", "rollout.workers=1")
        quiet = Driver(folder, soak_config(folder / "quiet", address, (), *alone))
        ending.callback(quiet.kill)
        quiet.wait(RECOVERY_LIMIT_S + 20 * iterations)
        reference = json.loads((quiet.run_dir / "summary.json").read_text())
    result = {
        **soak.report(),
        "checksum_equal": disturbed["weights_checksum"] == reference["weights_checksum"],
        "checksum": disturbed["weights_checksum"],
        "evaluations_equal": disturbed["evaluations"] == reference["evaluations"],
        "iterations": iterations,
        **groups_of(driver.run_dir, iterations, expected=2),  # two prompts, one SDE step
        end.name.lower(): stopped,
        "driver_lives": driver.lives,
        "leaks": leaks,
        "leaked": sum(len(found) for found in leaks.values()),
        "disturbed_s": round(disturbed_s, 1),
        "total_s": round(time.monotonic() - started_s, 1),
        "seed": seed,
    }
    good = (
        result["checksum_equal"]
        and result["groups_lost"] == result["groups_doubled"] == 0
        and result["leaked"] == result["driver_deaths"] == 0
    )
    return {**result, "good": good}
