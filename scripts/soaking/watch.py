"""Memory, open files, object store and disk of a run, role by role, sampled while it goes on."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from ray._private.internal_api import node_stats

from soaking.cluster import TITLES, Driver, Nodes

MIB = 2**20
ROLES = {
    **TITLES,
    "encoder": "ray::EncoderActor",
    "serve": "ray::ServeController",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}
"""Role -> what its processes are called; all others of the cluster are ``other``."""
LASTING = ("driver", "encoder", "gcs", "raylet", "rank", "replica", "serve", "worker")
"""Roles of which some process is there at any moment; the largest one counts."""


def role_of(command: str) -> str:
    """Of a process, from its command line."""
    return next((role for role, title in ROLES.items() if title in command), "other")


def processes(nodes: Nodes, driver: Driver) -> Iterator[tuple[str, psutil.Process]]:
    """The driver, the cluster's servers, and all that the raylets have started."""
    with suppress(psutil.NoSuchProcess):
        yield "driver", psutil.Process(driver.process.pid)
    with suppress(psutil.NoSuchProcess, KeyError):
        gcs = nodes.cluster.head_node.all_processes["gcs_server"][0]
        yield "gcs", psutil.Process(gcs.process.pid)
    for process in nodes.processes():
        with suppress(psutil.NoSuchProcess):
            # Not the arguments after it: an agent is told its raylet's name.
            yield role_of(process.cmdline()[0] if process.cmdline() else ""), process


def sample(nodes: Nodes, driver: Driver) -> dict[str, Any]:
    """By role ``pss`` and ``rss`` (MiB of the largest process), ``files`` (of the one with most)
    and ``count``; all PSS, the objects of both stores, bytes on the disk."""
    roles: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for role, process in processes(nodes, driver):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            memory, files = process.memory_full_info(), process.num_fds()
            values = roles[role]
            values["pss"] = max(values["pss"], memory.pss / MIB)
            values["rss"] = max(values["rss"], memory.rss / MIB)
            values["files"] = max(values["files"], files)
            values["threads"] = max(values["threads"], process.num_threads())
            values["count"] += 1
            values["sum_pss"] += memory.pss / MIB
    stores = [
        node_stats(node.node_ip_address, node.node_manager_port, False).store_stats
        for node in (nodes.cluster.head_node, nodes.second)
    ]
    return {
        "roles": {role: dict(values) for role, values in sorted(roles.items())},
        "pss": sum(values["sum_pss"] for values in roles.values()),
        "store": sum(store.object_store_bytes_used for store in stores) / MIB,
        "objects": sum(store.num_local_objects for store in stores),
        "disk": size_of(driver.run_dir) / MIB,
        "ray_logs": size_of(Path(nodes.cluster.head_node.get_logs_dir_path())) / MIB,
    }


def size_of(folder: Path) -> int:
    """Bytes of a folder's files; files may go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).stat().st_size
    return total


def column(samples: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Values over time: ``pss``, ``store``, ... or ``<role> <what>``, where the role was there."""
    role, _, what = name.partition(" ")
    if not what:
        return [it[name] for it in samples]
    return [it["roles"][role][what] for it in samples if role in it["roles"]]


def growth(samples: Sequence[dict[str, Any]], first: int) -> dict[str, dict[str, float]]:
    """Name -> median of the fifth of the samples after iteration ``first``, and of the last."""
    later = [it for it in samples if it["iteration"] >= first]
    part = max(1, len(later) // 5)
    names = [f"{role} {what}" for role in LASTING for what in ("pss", "rss", "files", "threads")]
    found = {}
    for name in [*names, "pss", "store", "objects", "disk", "ray_logs"]:
        before, after = column(later[:part], name), column(later[-part:], name)
        if before and after:
            found[name] = {"early": round(median(before), 2), "late": round(median(after), 2)}
    return found
