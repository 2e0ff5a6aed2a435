"""What a run asks of a Ray cluster, what the cluster has, and what is missing."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node
from ray.autoscaler._private.commands import debug_status
from ray.experimental.internal_kv import _internal_kv_get

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config
from g2rpo_ray.config.scoring import ScoringConfig

KINDS = ("CPU", "GPU")
_ROUNDING = 1e-4
"""Ray counts resources in ten thousandths."""

Resources = dict[str, float]


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


def reward_demands(config: Config | ScoringConfig) -> list[Demand]:
    return [
        Demand(
            f"rewards.{name}.min_replicas",
            reward.min_replicas,
            _resources(reward.cpus_per_replica, reward.gpus_per_replica),
            reward.label_selector,
        )
        for name, reward in config.rewards.items()
        if reward.beside is None
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


def run_demands(config: Config) -> list[Demand]:
    """Of all roles of a run."""
    drawing = [rollout_demand(config), *evaluation_demand(config)]
    return [*drawing, learner_demand(config), *reward_demands(config), *encoder_demand(config)]


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


def _ray_status() -> str:
    """The text of ``ray status``, of both versions of Ray's autoscaler."""
    address = ray.get_runtime_context().gcs_address
    return debug_status(_internal_kv_get(DEBUG_AUTOSCALING_STATUS), b"", address=address)


def has_autoscaler() -> bool:
    """Whether somebody may add nodes: an autoscaler's have types, others Ray names by their ids.

    Nodes that say a type themselves, as KubeRay's may, are taken for an autoscaler's.
    """
    there = _ray_status().partition("Active:")[2].partition("Pending:")[0]
    return re.search(r"^ *\d+ (?!node_[0-9a-f]{56}$)", there, re.MULTILINE) is not None


def autoscaler_says() -> str:
    """Nodes that Ray's autoscaler has ordered or failed to get, as ``ray status`` has them."""
    ordered, _, rest = _ray_status().partition("Pending:")[2].partition("Recent failures:")
    failed = rest.partition("Resources")[0]
    told = [
        (word, " ".join(said.split())) for word, said in (("ordered", ordered), ("failed", failed))
    ]
    parts = [f"{word} {said}" for word, said in told if said and not said.startswith("(no ")]
    if parts and parts[0].startswith("ordered"):
        parts[0] += " (until it comes or fails, Ray takes its room for there and orders no other)"
    return f"; 'ray status' says: {', '.join(parts)}" if parts else ""


def shortage(demands: Sequence[Demand], nodes: Sequence[Node], which: str = "total") -> list[str]:
    """Why the demands cannot be met by these nodes' resources, all (``total``) or those that are
    ``free`` now; each reason with what would help."""
    word = "" if which == "total" else " free"
    if which == "total":
        nodes = [replace(node, free=node.total) for node in nodes]
    return (
        _too_few(demands, nodes, word)
        or _no_node_for_one(demands, nodes, word)
        or _no_packing(demands, nodes)
    )


def _too_few(demands: Sequence[Demand], nodes: Sequence[Node], word: str) -> list[str]:
    reasons = []
    for kind in KINDS:
        wanted = sum(demand.total(kind) for demand in demands)
        has = sum(node.free.get(kind, 0.0) for node in nodes)
        if wanted > has + _ROUNDING:
            parts = ", ".join(
                f"{d.setting}={d.count} asks for {d.total(kind):g}"
                for d in demands
                if d.total(kind)
            )
            reasons.append(
                f"the run wants {wanted:g} {kind} and the cluster has {has:g}{word}: {parts}. Use "
                f"fewer, ask for less with {kind.lower()}s_per_..., or take a larger cluster"
            )
    return reasons


def _no_node_for_one(demands: Sequence[Demand], nodes: Sequence[Node], word: str) -> list[str]:
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
        elif not any(_Room(node.free).take(demand.per_process) for node in labelled):
            reasons.append(
                f"{demand.setting}: one process asks for {_short(demand.per_process)} on one node, "
                f"and no node has that much{word}: {_rooms(labelled)}"
            )
    return reasons


def _no_packing(demands: Sequence[Demand], nodes: Sequence[Node]) -> list[str]:
    # First fit, largest first: a hint for people; Ray's own packing decides.
    left = [(node, _Room(node.free)) for node in nodes]
    unplaced: Counter[str] = Counter()
    for demand in sorted(
        demands, key=lambda d: (d.per_process.get("GPU", 0), d.per_process["CPU"]), reverse=True
    ):
        fitting = [room for node, room in left if selects(demand.label_selector, node.labels)]
        for _ in range(demand.count):
            if not any(room.take(demand.per_process) for room in fitting):
                unplaced[demand.setting] += 1
    if not unplaced:
        return []
    parts = ", ".join(f"{count} of {setting}" for setting, count in unplaced.items())
    return [
        f"together the nodes have enough, but no node has room for {parts}: {_rooms(nodes)}. "
        "Choose sizes or label selectors that divide the nodes"
    ]


def _rooms(nodes: Sequence[Node]) -> str:
    return "; ".join(f"{node.address} {_short(node.free)}" for node in nodes)


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
