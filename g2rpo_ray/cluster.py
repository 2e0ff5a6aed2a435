"""The Ray cluster of a run: reaching it, what it has, and waiting for room in it."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import ray
from ray._private.state import available_resources_per_node
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.config import ClusterSection, Config
from g2rpo_ray.device import HIDE_CARDS
from g2rpo_ray.errors import InputError
from g2rpo_ray.secrets import looks_secret

# Workers get only these and `cluster.environment`: a whole environment in runtime_env breaks Ray's
# agent, and Ray shows runtime environments in its dashboard and logs.
WORKER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | HIDE_CARDS

FIRST_LINE_S, WAIT_LINE_S = 5.0, 30.0
"""A line says what is waited for after so long, and then this often."""
POLL_S = 1.0
HEAD_TRIES, HEAD_TRY_S = 10, 3.0
"""A head that is just starting gets this many tries."""
KINDS = ("CPU", "GPU")
_ROUNDING = 1e-4
"""Ray counts resources in ten thousandths."""

Resources = dict[str, float]
Note = Callable[[str], None]


class ClusterError(InputError):
    """The cluster cannot hold the run; the message says what is wanted and what there is."""


@dataclass(frozen=True)
class Demand:
    """Equal processes of one role, each placed on one node."""

    setting: str
    """The setting that asks for them, as the user writes it."""
    count: int
    per_process: Resources
    """CPU and GPU of each."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have."""

    def total(self, kind: str) -> float:
        return self.count * self.per_process.get(kind, 0.0)


@dataclass
class Node:
    """A living node of the cluster."""

    node_id: str
    address: str
    labels: dict[str, str]
    total: Resources
    free: Resources


def reward_demands(config: Config) -> list[Demand]:
    return [
        Demand(
            f"rewards.{name}.min_replicas",
            reward.min_replicas,
            _resources(reward.cpus_per_replica, reward.gpus_per_replica),
            reward.label_selector,
        )
        for name, reward in config.rewards.items()
    ]


def encoder_demand(config: Config) -> list[Demand]:
    """Of the prompt encoder, where it asks for anything."""
    gpus = config.prompts.encoder_gpus
    return [Demand("prompts.encoder_gpus", 1, _resources(0.0, gpus))] if gpus else []


def rollout_demand(config: Config) -> Demand:
    rollout = config.rollout
    each = _resources(rollout.cpus_per_worker, rollout.gpus_per_worker)
    return Demand("rollout.workers", rollout.workers, each, rollout.label_selector)


def evaluation_demand(config: Config) -> list[Demand]:
    """Of the workers that evaluate while a run trains, where it has any."""
    count = config.evaluation.workers
    each = replace(rollout_demand(config), setting="evaluation.workers", count=count)
    return [each] if count else []


def learner_demand(config: Config) -> Demand:
    learner = config.learner
    each = _resources(learner.cpus_per_rank, learner.gpus_per_rank)
    return Demand("learner.ranks", learner.ranks, each, learner.label_selector)


def _resources(cpus: float, gpus: float) -> Resources:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def living_nodes() -> list[Node]:
    """The nodes of the cluster that are alive, the head first."""
    free = available_resources_per_node()
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            dict(node.get("Labels", {})),
            dict(node["Resources"]),
            dict(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(
        nodes, key=lambda node: ("node:__internal_head__" not in node.total, node.address)
    )


def shortage(demands: Sequence[Demand], nodes: Sequence[Node], which: str = "total") -> list[str]:
    """Why the demands cannot be met by these nodes, each reason with what would help.

    Args:
        which: ``total`` resources of the nodes, or those that are ``free`` now.
    """
    return (
        _too_few(demands, nodes, which)
        or _no_node_for_one(demands, nodes, which)
        or _no_packing(demands, nodes, which)
    )


def _too_few(demands: Sequence[Demand], nodes: Sequence[Node], which: str) -> list[str]:
    reasons = []
    for kind in KINDS:
        wanted = sum(demand.total(kind) for demand in demands)
        has = sum(getattr(node, which).get(kind, 0.0) for node in nodes)
        if wanted > has + _ROUNDING:
            parts = ", ".join(
                f"{d.setting}={d.count} asks for {d.total(kind):g}"
                for d in demands
                if d.total(kind)
            )
            free = "" if which == "total" else " free"
            reasons.append(
                f"the run wants {wanted:g} {kind} and the cluster has {has:g}{free}: {parts}. Use "
                f"fewer, ask for less with {kind.lower()}s_per_..., or take a larger cluster"
            )
    return reasons


def _no_node_for_one(demands: Sequence[Demand], nodes: Sequence[Node], which: str) -> list[str]:
    reasons = []
    for demand in demands:
        labelled = [node for node in nodes if selects(demand.label_selector, node.labels)]
        if not labelled:
            section = demand.setting.rpartition(".")[0]
            if section == "evaluation":
                # Its workers are rollout workers, and go where those go.
                section = "rollout"
            known = sorted(
                {f"{k}={v}" for n in nodes for k, v in n.labels.items() if k != "ray.io/node-id"}
            )
            reasons.append(
                f"{section}.label_selector {demand.label_selector} fits no node; labels in the "
                f"cluster: {', '.join(known) or 'none'}. Correct it, or start a node with that "
                "label (ray start --labels)"
            )
        elif not any(_fits(demand.per_process, getattr(node, which)) for node in labelled):
            rooms = "; ".join(f"{n.address} {_short(getattr(n, which))}" for n in labelled)
            reasons.append(
                f"{demand.setting}: one process asks for {_short(demand.per_process)} on one node, "
                f"and no node has that much{'' if which == 'total' else ' free'}: {rooms}"
            )
    return reasons


def _no_packing(demands: Sequence[Demand], nodes: Sequence[Node], which: str) -> list[str]:
    # First fit, largest first: a hint for people; Ray's own packing decides.
    left = [_Room(getattr(node, which)) for node in nodes]
    unplaced: dict[str, int] = {}
    by_size = sorted(
        demands, key=lambda d: (d.per_process.get("GPU", 0), d.per_process["CPU"]), reverse=True
    )
    for demand in by_size:
        for _ in range(demand.count):
            for node, room in zip(nodes, left, strict=True):
                if selects(demand.label_selector, node.labels) and room.take(demand.per_process):
                    break
            else:
                unplaced[demand.setting] = unplaced.get(demand.setting, 0) + 1
    if not unplaced:
        return []
    parts = ", ".join(f"{count} of {setting}" for setting, count in unplaced.items())
    rooms = "; ".join(f"{n.address} {_short(getattr(n, which))}" for n in nodes)
    return [
        f"together the nodes have enough, but no node has room for {parts}: {rooms}. Choose sizes "
        "or label selectors that divide the nodes"
    ]


class _Room:
    """Of a node: CPUs, and cards one by one, since a share of a card is never split over two."""

    def __init__(self, amounts: Resources) -> None:
        whole, rest = divmod(amounts.get("GPU", 0.0), 1.0)
        self._cpus, self._cards = amounts.get("CPU", 0.0), [1.0] * int(whole) + [rest]

    def take(self, wanted: Resources) -> bool:
        """Take an amount if it fits; whether it did."""
        cpus, gpus = wanted.get("CPU", 0.0), wanted.get("GPU", 0.0)
        share = min(gpus, 1.0)
        fitting = [n for n, card in enumerate(self._cards) if card + _ROUNDING >= share]
        count = max(1, round(gpus)) if gpus else 0
        if cpus > self._cpus + _ROUNDING or len(fitting) < count:
            return False
        self._cpus -= cpus
        for card in sorted(fitting, key=lambda n: self._cards[n])[:count]:
            self._cards[card] -= share
        return True


def _fits(wanted: Resources, room: Resources) -> bool:
    return all(amount <= room.get(kind, 0.0) + _ROUNDING for kind, amount in wanted.items())


def _short(resources: Resources) -> str:
    return ", ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in KINDS)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is meant, by Ray's rules: ``x``, ``!x``, ``in(x, y)``."""
    for key, condition in selector.items():
        negated = condition.startswith("!")
        values = condition.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
        if (labels.get(key) in [value.strip() for value in values]) is negated:
            return False
    return True


def overview(demands: Sequence[Demand], nodes: Sequence[Node]) -> str:
    """One line: what is wanted, what there is, what is free."""

    def amounts(parts: Sequence[Resources]) -> str:
        return _short({kind: sum(part.get(kind, 0.0) for part in parts) for kind in KINDS})

    wanted = [{kind: demand.total(kind) for kind in KINDS} for demand in demands]
    return (
        f"wanted {amounts(wanted)}; the cluster has {amounts([n.total for n in nodes])} on "
        f"{len(nodes)} nodes, free {amounts([n.free for n in nodes])}"
    )


@contextmanager
def ray_cluster(settings: ClusterSection) -> Iterator[bool]:
    """Connect to Ray, or start it on this machine; yields whether it is ours alone.

    Raises:
        ClusterError: there is no cluster at the address, or it does not let us in.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    _check_head(address)
    # A job's runtime_env may set the same variables; Ray refuses that unless ours may replace them.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    try:
        ray.init(
            address=address,
            include_dashboard=settings.dashboard if address == "local" else None,
            runtime_env={"env_vars": worker_environment(settings.environment)},
            job_config=_json_logs(),
            logging_level=logging.WARNING,
            # Every role's output is in its own log file; what matters comes back as an answer.
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"no Ray cluster at {address!r} (cluster.address or RAY_ADDRESS): {error}"
        ) from error
    try:
        yield address == "local"
    finally:
        ray.shutdown()


def _json_logs() -> JobConfig:
    # Of the roles, but not of this process, whose output is for people: so not by logging_config.
    job = JobConfig()
    job.set_py_logging_config(ray.LoggingConfig(encoding="JSON", log_level="INFO"))
    return job


def _check_head(address: str) -> None:
    # Without anybody at the address, ray.init tries for more than two minutes without a word.
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address!r} is a Ray Client address; the driver must run on the cluster: use 'ray "
            "job submit' (cluster/submit.py), or the head's own address host:port"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    error: OSError | None = None
    for _ in range(HEAD_TRIES):
        try:
            socket.create_connection((host, int(port)), timeout=HEAD_TRY_S).close()
            return
        except OSError as refused:
            error = refused
            time.sleep(POLL_S)
    raise ClusterError(
        f"nobody answers at {address!r} (cluster.address or RAY_ADDRESS): {error}. Is the head "
        "node running ('ray status' there), the port right (6379 unless 'ray start --port' says "
        "otherwise), and open to this machine?"
    )


def worker_environment(allowed: Sequence[str]) -> dict[str, str]:
    """Environment of every worker: ours, and what ``cluster.environment`` lets through.

    Raises:
        ClusterError: a variable that it lets through looks like a secret.
    """
    passed = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in allowed)
    }
    for name in passed:
        if looks_secret(name):
            raise ClusterError(
                f"cluster.environment lets {name} through, which looks like a secret: Ray shows "
                "what it passes on in its dashboard and logs. Set it in the nodes' own environment "
                "(Kubernetes secret, Slurm's job environment) instead"
            )
    return WORKER_ENVIRONMENT | passed | HIDE_CARDS


def wait_for_nodes(config: Config, note: Note) -> None:
    """Return when the cluster has ``cluster.min_nodes`` living nodes.

    Raises:
        ClusterError: not within ``cluster.start_timeout_s``.
    """
    wanted, timeout_s = config.cluster.min_nodes, config.cluster.start_timeout_s

    def addresses() -> str:
        return ", ".join(node.address for node in living_nodes())

    def line(waited_s: float) -> None:
        note(f"waiting for nodes, {waited_s:.0f} of {timeout_s:g} s: there are {addresses()}")

    if not _until(lambda: len(living_nodes()) >= wanted, timeout_s, line):
        raise ClusterError(
            f"the cluster has not {wanted} nodes (cluster.min_nodes) after {timeout_s:g} s "
            f"(cluster.start_timeout_s), only {addresses()}. See why 'ray start' failed on the "
            "others, or ask for fewer"
        )


@contextmanager
def placed(
    demands: Sequence[Demand], others: Sequence[Demand], timeout_s: float, note: Note
) -> Iterator[PlacementGroup | None]:
    """Room for the demands in one placement group, a bundle a process; None without demands.

    Args:
        others: what else the run asks for; it counts in the diagnosis only.

    Raises:
        ClusterError: no room within the time; says why.
    """
    processes = [demand for demand in demands for _ in range(demand.count)]
    if not processes:
        yield None
        return
    group = placement_group(
        [demand.per_process for demand in processes],
        strategy="PACK",
        bundle_label_selector=[demand.label_selector for demand in processes],
    )
    everything = [*demands, *others]

    def line(waited_s: float) -> None:
        nodes = living_nodes()
        reasons = shortage(everything, nodes) or ["others use it"]
        note(
            f"waiting for room, {waited_s:.0f} of {timeout_s:g} s: "
            f"{overview(everything, nodes)}; {' '.join(reasons)}"
        )

    try:
        if not _until(lambda: group.wait(POLL_S), timeout_s, line):
            raise ClusterError(_no_room(everything, timeout_s))
        yield group
    finally:
        # Ends the actors in it, too.
        remove_placement_group(group)


def _no_room(demands: Sequence[Demand], timeout_s: float) -> str:
    nodes = living_nodes()
    reasons = shortage(demands, nodes)
    if not reasons:
        reasons = [
            *shortage(demands, nodes, "free"),
            "Others use the cluster: see 'ray status' and 'ray list actors', end what is left of "
            "old runs, or wait longer",
        ]
    return (
        f"no room for the run within {timeout_s:g} s (cluster.start_timeout_s): "
        f"{overview(demands, nodes)}. {' '.join(reasons)}"
    )


def _until(done: Callable[[], bool], timeout_s: float, line: Callable[[float], None]) -> bool:
    """Poll until it is done or the time is over; call ``line`` with the seconds waited when due."""
    started_s, due_s = time.monotonic(), FIRST_LINE_S
    # Asked once a turn: on a busy machine even what is done may answer too late, and look undone.
    while not done():
        waited_s = time.monotonic() - started_s
        if waited_s > timeout_s:
            return False
        if waited_s >= due_s:
            due_s = waited_s + WAIT_LINE_S
            line(waited_s)
        time.sleep(POLL_S / 4)
    return True
