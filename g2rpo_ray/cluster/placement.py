"""Waiting for nodes, and for room on them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.cluster.demand import (
    ClusterError,
    Demand,
    autoscaler_says,
    living_nodes,
    overview,
    shortage,
)
from g2rpo_ray.common.stop import heed
from g2rpo_ray.config import Config

FIRST_LINE_S, WAIT_LINE_S = 5.0, 30.0
"""A line says what is waited for after so long, and then this often."""
POLL_S = 1.0
Tell = Callable[[str], None]


def wait_for_nodes(config: Config, tell: Tell) -> None:
    """Return when the cluster has ``cluster.min_nodes`` living nodes.

    Raises:
        ClusterError: not within ``cluster.start_timeout_s``.
    """
    wanted, timeout_s = config.cluster.min_nodes, config.cluster.start_timeout_s

    def addresses() -> str:
        return ", ".join(node.address for node in living_nodes())

    def line(waited_s: float) -> None:
        tell(f"waiting for nodes, {waited_s:.0f} of {timeout_s:g} s: there are {addresses()}")

    if not _until(lambda: len(living_nodes()) >= wanted, timeout_s, line):
        raise ClusterError(
            f"the cluster has not {wanted} nodes (cluster.min_nodes) after {timeout_s:g} s "
            f"(cluster.start_timeout_s), only {addresses()}. See why 'ray start' failed on the "
            "others, or ask for fewer (an autoscaler adds none for it, but for roles that ask for "
            "room)"
        )


@contextmanager
def placed(
    demands: Sequence[Demand], others: Sequence[Demand], timeout_s: float, tell: Tell
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
        tell(
            f"waiting for room, {waited_s:.0f} of {timeout_s:g} s: "
            f"{overview(everything, nodes)}; {' '.join(reasons)}{autoscaler_says()}"
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
        f"{overview(demands, nodes)}. {' '.join(reasons)}{autoscaler_says()}"
    )


def _until(done: Callable[[], bool], timeout_s: float, line: Callable[[float], None]) -> bool:
    """Poll until it is done or the time is over; call ``line`` with the seconds waited when due."""
    started_s, due_s = time.monotonic(), FIRST_LINE_S
    # Asked once a turn: on a busy machine even what is done may answer too late, and look undone.
    while not done():
        heed()
        waited_s = time.monotonic() - started_s
        if waited_s > timeout_s:
            return False
        if waited_s >= due_s:
            due_s = waited_s + WAIT_LINE_S
            line(waited_s)
        time.sleep(POLL_S / 4)
    return True
