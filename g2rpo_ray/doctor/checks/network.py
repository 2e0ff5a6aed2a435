"""All-reduce between nodes (gloo) and between GPUs (NCCL), with its bandwidth."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch

from g2rpo_ray.cluster.connect import free_address
from g2rpo_ray.cluster.demand import Node
from g2rpo_ray.cluster.postmortem import error_of
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn
from g2rpo_ray.doctor.probe import name_of, start_probe

MIB = {"gloo": 16, "nccl": 256}
"""Size of the tensor that is summed."""
REPEATS = 5
JOIN_TIMEOUT_S, TOTAL_TIMEOUT_S = 45, 120
SLOW_GB_PER_S = {"gloo": 0.05, "nccl": 1.0}
REMEDY = (
    "nodes must reach each other on all ports: firewall, and the right network card "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; cluster.environment passes them on)"
)


def check_network(nodes: Sequence[Node]) -> list[Finding]:
    """Gloo over one rank a node (two where there is one node), NCCL over every free GPU."""
    findings = _all_reduce("gloo", nodes if len(nodes) > 1 else [*nodes, *nodes])
    gpus = [node for node in nodes for _ in range(int(node.free.get("GPU", 0.0)))]
    taken = sum(node.total.get("GPU", 0.0) for node in nodes) - len(gpus)
    if taken > 0:
        what = f"{taken:g} GPUs are in use and take no part in the measurement"
        findings.append(warn("nccl", what, "run the doctor again when they are free"))
    if len(gpus) > 1:
        findings += _all_reduce("nccl", gpus)
    return findings


def _all_reduce(backend: str, seats: Sequence[Node]) -> list[Finding]:
    """Between ranks that sit on these nodes."""
    outcome = _measure(backend, seats)
    if isinstance(outcome, str):
        return [fail(backend, outcome, REMEDY), *_pairs(backend, seats)]
    # Bytes that each rank must send in a ring: 2 (n - 1) / n of the tensor.
    ranks, slowest_s = len(seats), max(outcome)
    gb_per_s = 2 * (ranks - 1) / ranks * MIB[backend] * 2**20 / slowest_s / 1e9
    places = len({node.node_id for node in seats})
    took = f"{MIB[backend]} MiB in {slowest_s * 1000:.1f} ms, {gb_per_s:.2f} GB/s"
    what = f"{ranks} ranks on {places} node(s): {took}"
    if places > 1 and gb_per_s < SLOW_GB_PER_S[backend]:
        return [warn(backend, f"{what}: slow", f"is it the fast network? {REMEDY}")]
    return [ok(backend, what)]


def _pairs(backend: str, seats: Sequence[Node]) -> list[Finding]:
    """Which node it is: the first one with each other."""
    firsts = list({node.node_id: node for node in seats}.values())
    if len(firsts) < 3:
        return []
    findings = []
    for other in firsts[1:]:
        outcome = _measure(backend, [firsts[0], other])
        if isinstance(outcome, str):
            what = f"{name_of(firsts[0])} with {name_of(other)}: {outcome}"
            findings.append(fail(backend, what, REMEDY))
    return findings


def _measure(backend: str, seats: Sequence[Node]) -> list[float] | str:
    """Seconds of each rank, or why there are none."""
    ranks = [start_probe(node, gpus=int(backend == "nccl")) for node in seats]
    refs: list[Any] = []
    try:
        address, port = ray.get(ranks[0].run.remote(free_address), timeout=TOTAL_TIMEOUT_S)
        refs = [
            actor.run.remote(_rank, rank, len(ranks), address, port, backend)
            for rank, actor in enumerate(ranks)
        ]
        return ray.get(refs, timeout=TOTAL_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        hanging = [name_of(n) for n, ref in zip(seats, refs, strict=False) if ref not in done]
        return f"no answer within {TOTAL_TIMEOUT_S} s from {', '.join(hanging) or 'rank 0'}"
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[-1]
    finally:
        # Ray prints a traceback of every failure that nobody has asked for.
        for ref in ray.wait(refs, num_returns=len(refs), timeout=1.0)[0] if refs else []:
            error_of(ref)
        for actor in ranks:
            ray.kill(actor)


def _rank(rank: int, ranks: int, address: str, port: int, backend: str) -> float:
    """Seconds of one all-reduce on one of the ranks, after one that does not count.

    Raises:
        RuntimeError: the sum is wrong, or the group does not come together.
    """
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    torch.distributed.init_process_group(
        backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
    )
    try:
        device = "cuda" if backend == "nccl" else "cpu"
        ones = torch.ones(MIB[backend] << 18, device=device)
        torch.distributed.all_reduce(ones)
        if not bool((ones == ranks).all()):
            raise RuntimeError(f"the sum of {ranks} ones is wrong over {backend}")
        torch.distributed.barrier()
        started_s = time.perf_counter()
        for _ in range(REPEATS):
            torch.distributed.all_reduce(ones)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started_s) / REPEATS
    finally:
        torch.distributed.destroy_process_group()
