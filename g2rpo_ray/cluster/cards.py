"""The cards of a node, as nvidia-smi there shows them."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from g2rpo_ray.cluster.demand import Node
from g2rpo_ray.cluster.postmortem import first_line

ANSWER_TIMEOUT_S = 60.0
"""A node that does not say its cards within this time is left out."""


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    total_mib: int
    used_mib: int


def node_gpus() -> list[Gpu] | None:
    """Of the node where it is called; None where there is no nvidia-smi.

    Raises:
        RuntimeError: nvidia-smi fails, or shows a card whose memory it does not know.
    """
    query = "--query-gpu=name,driver_version,memory.total,memory.used"
    try:
        lines = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.splitlines()
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"nvidia-smi fails: {error}") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"nvidia-smi fails: {error.stdout}{error.stderr}".strip()) from error
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if unknown := [row for row in rows if not (row[2].isdigit() and row[3].isdigit())]:
        raise RuntimeError(f"nvidia-smi does not know the memory of a card: {unknown[0]}")
    return [Gpu(name, driver, int(total), int(used)) for name, driver, total, used in rows]


def memory_of_cards(nodes: Sequence[Node]) -> tuple[list[float], list[str]]:
    """GiB of every card of the nodes that Ray counts cards on, and why some are not known."""
    refs = {
        node.address: ray.remote(node_gpus)
        .options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        )
        .remote()
        for node in nodes
        if node.total.get("GPU", 0.0) > 0
    }
    if not refs:
        return [], []
    # One limit for all: a cluster has hundreds of nodes, and a run waits for them.
    done, _ = ray.wait([*refs.values()], num_returns=len(refs), timeout=ANSWER_TIMEOUT_S)
    gib, unknown = list[float](), list[str]()
    for address, ref in refs.items():
        if ref not in done:
            unknown.append(f"{address}: no answer within {ANSWER_TIMEOUT_S:g} s")
            continue
        try:
            gpus = ray.get(ref)
        except ray.exceptions.RayError as error:
            unknown.append(f"{address}: {getattr(error, 'cause', None) or first_line(error)}")
            continue
        gib += [gpu.total_mib / 1024 for gpu in gpus or []]
        unknown += [f"{address}: no nvidia-smi"] if gpus is None else []
    return gib, unknown
