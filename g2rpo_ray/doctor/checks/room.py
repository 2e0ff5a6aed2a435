"""Whether the cluster has room for the run."""

from collections.abc import Sequence

from g2rpo_ray.cluster.demand import Node, overview, run_demands, shortage
from g2rpo_ray.config import Config
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn


def check_room(config: Config, nodes: Sequence[Node], grows: bool = False) -> list[Finding]:
    """What ``g2rpo train`` would wait for; where it ``grows``, an autoscaler adds nodes."""
    demands = run_demands(config)
    what = overview(demands, nodes)
    if len(nodes) < config.cluster.min_nodes:
        remedy = "see why 'ray start' failed on the others, or lower cluster.min_nodes"
        return [fail("room", f"cluster.min_nodes is {config.cluster.min_nodes}; {what}", remedy)]
    reasons = shortage(demands, nodes)
    if reasons and grows:
        wait = f"waits {config.cluster.start_timeout_s:g} s for them (cluster.start_timeout_s)"
        remedy = f"an autoscaler may add nodes, and the run {wait}; without more: "
        return [warn("room", what, remedy + "; ".join(reasons))]
    if reasons:
        return [fail("room", what, "; ".join(reasons))]
    if reasons := shortage(demands, nodes, "free"):
        remedy = "others use the cluster: 'ray status' and 'ray list actors' show who; "
        return [warn("room", what, remedy + "; ".join(reasons))]
    return [ok("room", what)]
