"""Runs on Ray's own autoscaler, both versions: nodes come on demand and go when they are idle.

``pytest -s`` prints the table of docs/reliability.md.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.tracking.metrics import read_metrics
from tests.cluster.autoscaling import IDLE_NODE_S, Autoscaled, autoscaled
from tests.integration.command import TIMEOUT_S, Command, g2rpo, train, wait_until
from tests.tiny import CAPTIONS, tiny_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

STORE_BYTES = 100_000_000
NODE: dict[str, Any] = {
    "resources": {"CPU": 1, "object_store_memory": STORE_BYTES},
    "max_workers": 6,
}
"""Room for one worker or replica."""
HEAD_CPUS = 1.0
"""For the learner; nobody else finds room there."""
WORKER, REPLICA = "ray::RolloutActor", "ray::ServeReplica"

SETTINGS = [
    "rollout.workers=1",
    "learner.ranks=1",
    "checkpoint.every=1",
    "cluster.start_timeout_s=240",
    "rewards={slow: {kind: python, options: "
    "{target: 'tests.rewards.fakes:SlowScorer', options: {seconds: 0}}}}",
]
ELASTIC = [
    "rollout.max_workers=3",
    "rollout.idle_timeout_s=3",
    "rollout.cpus_per_worker=1",
    "learner.cpus_per_rank=1",
    "rewards.slow.cpus_per_replica=1",
    "rewards.slow.options.options.seconds=1.5",
    "rewards.slow.max_replicas=3",
    "rewards.slow.requests_per_replica=0.5",
    "rewards.slow.upscale_delay_s=0.5",
    "rewards.slow.downscale_delay_s=3",
]
ALONE = ["rollout.cpus_per_worker=0.5", "rewards.slow.cpus_per_replica=0.1"]
LOAD_AND_CALM = ["iterations=8", "sampling.prompts_per_iteration=1", "evaluation.prompts=40"]
"""Held-out pictures before and after training are work for three workers, an iteration for one."""
PREEMPTED = ["iterations=3", "sampling.prompts_per_iteration=6", "evaluation.prompts=1"]
MUCH_AT_ONCE = ["iterations=1", "sampling.prompts_per_iteration=12", "evaluation.prompts=1"]


@dataclass(frozen=True)
class Moment:
    """What there was from then on."""

    at_s: float
    nodes: int
    workers: int
    replicas: int
    iteration: int
    """Last one on record."""

    def is_like(self, other: "Moment | None") -> bool:
        """Whether only time and iteration have gone on."""
        return other is not None and (self.nodes, self.workers, self.replicas) == (
            other.nodes, other.workers, other.replicas
        )  # fmt: skip


def elastic(folder: Path, cluster: Autoscaled, *overrides: str) -> Command:
    folder.mkdir(exist_ok=True)
    config = tiny_config(
        folder / "elastic", *SETTINGS, *ELASTIC, *overrides, f"cluster.address={cluster.address}"
    )
    return train(config, RAY_AUTH_MODE="disabled")


def records(run_dir: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        return [record for record in read_metrics(run_dir) if record["kind"] == "train"]
    return []


class Timeline:
    """Nodes, workers and replicas while a run goes on and after it, at every change."""

    def __init__(self, cluster: Autoscaled, run_dir: Path) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        self.started_s = time.monotonic()
        self.moments: list[Moment] = []

    def look(self) -> Moment:
        done = records(self.run_dir)
        cluster = self.cluster
        found = (
            cluster.nodes(),
            len(cluster.processes(WORKER)),
            len(cluster.processes(REPLICA)),
            done[-1]["iteration"] if done else 0,
        )
        moment = Moment(round(time.monotonic() - self.started_s, 1), *found)
        last = self.moments[-1] if self.moments else None
        if last is None or (last.nodes, last.workers, last.replicas, last.iteration) != found:
            self.moments.append(moment)
        return moment

    def most(self, what: str) -> int:
        return max(getattr(moment, what) for moment in self.moments)

    def print(self, title: str) -> None:
        """Rows of a table: what there was before, while and after the run trained."""
        last = self.moments[-1].iteration
        phases = {"before": lambda i: i == 0, "training": lambda i: 0 < i < last}
        phases["after"] = lambda i: i == last
        for phase, within in phases.items():
            parts = [
                f"{m.at_s:.0f}: {m.nodes}/{m.workers}/{m.replicas}"
                for before, m in pairwise([None, *self.moments])
                if m is not None and within(m.iteration) and not m.is_like(before)
            ]
            print(f"| {title}, {phase} | {', '.join(parts)} |")


def finish(command: Command, timeline: Timeline) -> None:
    """Watch a run to its end; then the cluster until it is as before."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while command.process.poll() is None:
        timeline.look()
        assert time.monotonic() < deadline_s, command.text + timeline.cluster.logs()
        time.sleep(0.5)
    assert command.process.returncode == 0, command.text + timeline.cluster.logs()
    wait_until(lambda: timeline.look().nodes == 1, "idle nodes to go", 10 * IDLE_NODE_S, 0.5)


def nodes_go_while_a_checkpoint_is_written(command: Command, timeline: Timeline) -> None:
    """Hold the learner when it has begun to write one, until nodes have gone."""
    run_dir, seen = timeline.run_dir, 0
    while command.process.poll() is None:
        timeline.look()
        learners = timeline.cluster.processes("ray::Learner")
        until_s = time.monotonic() + 0.5
        while (iteration := len(records(run_dir))) == seen and time.monotonic() < until_s:
            time.sleep(0.01)
        if iteration == seen:
            continue
        # It begins right after the record.
        seen = iteration
        for learner in learners:
            learner.suspend()
        try:
            if not checkpoint_folder(run_dir, seen).exists():
                wait_until_nodes_go(timeline)
                assert not checkpoint_folder(run_dir, seen).exists()
                return
        finally:
            for learner in learners:
                learner.resume()
    raise AssertionError("no checkpoint was seen while it was written")


def wait_until_nodes_go(timeline: Timeline) -> None:
    before = timeline.look()
    wait_until(lambda: timeline.look().nodes < before.nodes, "idle nodes to go", 120, 0.5)
    print(f"checkpoint {before.iteration} held: {before.nodes} nodes, then {timeline.look().nodes}")


def summary(run_dir: Path) -> tuple[str, int]:
    """Checksum of the weights, and evaluations of the network."""
    values = json.loads((run_dir / "summary.json").read_text())
    return values["weights_checksum"], values["evaluations"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, int]]:
    """The summary of the same run with one worker and one replica on a private Ray."""

    @cache
    def summary_of(*overrides: str) -> tuple[str, int]:
        run_dir = tmp_path_factory.mktemp("alone") / "alone"
        command = train(tiny_config(run_dir, *SETTINGS, *ALONE, *overrides))
        assert command.wait() == 0, command.text
        return summary(run_dir)

    return summary_of


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[Autoscaled]:
    with autoscaled(request.param, HEAD_CPUS, {"small": NODE}) as running:
        yield running


def test_nodes_come_on_demand_and_go_when_idle(
    cluster: Autoscaled, alone: Callable[..., tuple[str, int]], tmp_path: Path
) -> None:
    command = elastic(tmp_path, cluster, *LOAD_AND_CALM)
    timeline = Timeline(cluster, tmp_path / "elastic")
    try:
        nodes_go_while_a_checkpoint_is_written(command, timeline)
        finish(command, timeline)
        timeline.print(f"v{cluster.version}")
        assert cluster.asked_for() == []
    finally:
        command.kill()
    assert timeline.moments[0].nodes == 1
    assert timeline.most("nodes") >= 5
    assert (timeline.most("workers"), timeline.most("replicas")) == (3, 3)
    training = [m for m in timeline.moments if 0 < m.iteration < 8]
    assert min(m.workers for m in training) == 1
    # The replicas have work of their own: two workers went, with their nodes.
    assert min(m.nodes for m in training) <= timeline.most("nodes") - 2
    recorded = records(tmp_path / "elastic")
    assert recorded[0]["cluster/nodes"] > recorded[-1]["cluster/nodes"]
    assert sum(record["rollout/replaced"] for record in recorded) == 0
    assert "proved weights 8" in command.text
    assert "(rollout.idle_timeout_s)" in command.text
    assert summary(tmp_path / "elastic") == alone(*LOAD_AND_CALM)


def test_a_node_is_taken_away_in_every_iteration(
    cluster: Autoscaled, alone: Callable[..., tuple[str, int]], tmp_path: Path
) -> None:
    command = elastic(tmp_path, cluster, *PREEMPTED)
    timeline = Timeline(cluster, tmp_path / "elastic")
    taken = 0
    try:
        while taken < 3 and command.process.poll() is None:
            at = timeline.look()
            if at.iteration == taken and (victims := cluster.nodes_with(WORKER)):
                time.sleep(1.0)
                take_away(victims[0])
                taken += 1
            time.sleep(0.5)
        finish(command, timeline)
        timeline.print(f"v{cluster.version}, a node taken away in each iteration")
        assert cluster.asked_for() == []
    finally:
        command.kill()
    assert taken == 3
    assert summary(tmp_path / "elastic") == alone(*PREEMPTED)


def take_away(raylet: psutil.Process) -> None:
    """A node with all that runs on it, without a word."""
    for process in [raylet, *raylet.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_embed_and_doctor_count_on_nodes_that_can_come(cluster: Autoscaled, tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path / "run", *SETTINGS, *ELASTIC, f"cluster.address={cluster.address}"
    )
    doctor = g2rpo("doctor", config, "--json=found.json", RAY_AUTH_MODE="disabled")
    assert doctor.wait() in (0, 1), doctor.text
    findings = json.loads((doctor.folder / "found.json").read_text())["findings"]
    (room,) = [finding for finding in findings if finding["check"] == "room"]
    assert room["level"] == "WARN"
    assert "an autoscaler may add nodes" in room["remedy"]
    (tmp_path / "prompts.txt").write_text("\n".join(CAPTIONS))
    cut = ("--workers=3", "--cpus-per-worker=1", "--shard-size=1")
    embed = g2rpo(
        "embed", config, str(tmp_path / "prompts.txt"), f"--out={tmp_path / 'embedded'}", *cut,
        RAY_AUTH_MODE="disabled",
    )  # fmt: skip
    timeline = Timeline(cluster, tmp_path / "run")
    finish(embed, timeline)
    print(f"{embed.text}\nnodes: {[(moment.at_s, moment.nodes) for moment in timeline.moments]}")
    assert "4 prompts, " in embed.text
    assert timeline.most("nodes") == 3
    assert cluster.asked_for() == []


@pytest.mark.parametrize("version", [1, 2])
def test_nodes_that_never_come_are_told_of(
    version: int, alone: Callable[..., tuple[str, int]], tmp_path: Path
) -> None:
    # So large that for few processes Ray takes the small ones, as long as it may order any.
    never = {"resources": NODE["resources"] | {"CPU": 16}}
    types = {"small": NODE | {"max_workers": 2}, "never": never}
    with autoscaled(version, HEAD_CPUS, types, order_timeout_s=15) as cluster:
        started_s = time.monotonic()
        command = elastic(
            tmp_path, cluster, "rollout.cpus_per_worker=2", "cluster.start_timeout_s=20"
        )
        assert command.wait() == 2, command.text
        print(f"refused after {time.monotonic() - started_s:.0f} s\n{command.text}")
        assert "waiting for room, " in command.text
        assert "no room for the run within 20 s (cluster.start_timeout_s)" in command.text
        assert "rollout.workers=1 asks for 2" in command.text
        if version == 2:
            # Version 1 takes it for there as soon as it has asked for it.
            assert "'ray status' says: ordered never, 1 launching" in command.text
        assert cluster.asked_for() == []
        # Room for the worker that it starts with and for a replica, but for no more.
        late = ("cluster.start_timeout_s=60", "rewards.slow.options.options.seconds=3")
        command = elastic(tmp_path / "few", cluster, *MUCH_AT_ONCE, *late)
        assert command.wait() == 0, command.text
        print(command.text)
        assert "no place yet for 2 more; going on with 1" in command.text
        assert cluster.asked_for() == []
    assert summary(tmp_path / "few" / "elastic") == alone(*MUCH_AT_ONCE)
