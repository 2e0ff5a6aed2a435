"""Probe: an actor on a node, which runs what a check asks for; and what a node says of itself."""

import hashlib
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import g2rpo_ray
from g2rpo_ray.cluster.cards import Gpu, node_gpus
from g2rpo_ray.cluster.demand import Node
from g2rpo_ray.doctor.findings import Finding, fail
from g2rpo_ray.run.versions import versions

T = TypeVar("T")
ANSWER_TIMEOUT_S = 120.0
"""A node that does not answer within this time is a finding. Starting an actor imports torch."""


@dataclass(frozen=True)
class NodeFacts:
    """What a node says about itself."""

    versions: dict[str, str]
    """Python, packages, and the CUDA that torch was built for."""
    source: str
    """Digest of this package's own source files."""
    gpus: list[Gpu] | None
    """None where there is no nvidia-smi."""
    memory_gib: float
    memory_free_gib: float
    shm_gib: float
    object_store_gib: float
    open_files: int


class Probe:
    """Runs on one node."""

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Of a module of this package, which the node imports."""
        return function(*arguments)


def start_probe(node: Node, gpus: int = 0) -> ActorHandle:
    """A probe on that node, with so many of its cards."""
    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    probe: ActorHandle = (
        ray.remote(Probe).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=here).remote()
    )
    return probe


def name_of(node: Node) -> str:
    """Short and unique, also where several nodes share a host."""
    return f"{node.address} ({node.node_id[:4]})"


def ask(
    probes: Mapping[str, ActorHandle],
    check: str,
    remedy: str,
    function: Callable[..., Any],
    *arguments: object,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> tuple[dict[str, Any], list[Finding]]:
    """What a function gives on each node, and a finding for each node that gave nothing."""
    refs = {name: probe.run.remote(function, *arguments) for name, probe in probes.items()}
    done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    answers, findings = {}, []
    for name, ref in refs.items():
        if ref not in done:
            findings.append(fail(check, f"{name}: no answer within {timeout_s:g} s", remedy))
            continue
        try:
            answers[name] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            findings.append(fail(check, f"{name}: {error.cause}", remedy))
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[-1]
            findings.append(fail(check, f"{name}: {cause}", remedy))
    return answers, findings


def node_facts() -> NodeFacts:
    """Of the node where it is called."""
    memory = psutil.virtual_memory()
    return NodeFacts(
        versions=versions() | {"cuda": torch.version.cuda or "none"},
        source=_source_digest(),
        gpus=node_gpus(),
        memory_gib=memory.total / 2**30,
        memory_free_gib=memory.available / 2**30,
        shm_gib=shutil.disk_usage("/dev/shm").total / 2**30,
        object_store_gib=_object_store_gib(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _source_digest() -> str:
    folder = Path(g2rpo_ray.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _object_store_gib() -> float:
    here = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == here]
    return node["Resources"].get("object_store_memory", 0.0) / 2**30
