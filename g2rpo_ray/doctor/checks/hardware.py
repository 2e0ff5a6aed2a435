"""GPUs and memory of every node, as the machine and as Ray see them."""

from collections.abc import Mapping

from g2rpo_ray.cluster.demand import Node
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn, warn_if
from g2rpo_ray.doctor.probe import NodeFacts

BUSY_MIB = 1024
LOW_MEMORY_SHARE = 0.1


def check_hardware(nodes: Mapping[str, Node], facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """One finding a node, or several where something is odd."""
    findings = []
    for name, fact in facts.items():
        findings += _gpus(name, nodes[name], fact)
        low = fact.memory_free_gib < LOW_MEMORY_SHARE * fact.memory_gib
        what = f"{name}: {fact.memory_free_gib:.1f} of {fact.memory_gib:.1f} GiB free"
        remedy = "Ray kills workers above 95% use: end other programs, or take a larger node"
        findings.append(warn_if(low, "memory", what, remedy))
    return findings


def _gpus(name: str, node: Node, facts: NodeFacts) -> list[Finding]:
    rays, gpus = node.total.get("GPU", 0.0), facts.gpus or []
    if rays > len(gpus):
        what = f"{name}: Ray counts {rays:g} GPUs and nvidia-smi shows {len(gpus)}"
        remedy = (
            "a card fell off the bus (dmesg), or 'ray start --num-gpus' is too high; repair the "
            "node or restart Ray there"
        )
        return [fail("gpus", what, remedy)]
    if rays and facts.versions["cuda"] == "none":
        remedy = "install the CUDA build of torch there (constraints.txt), and restart Ray"
        return [fail("gpus", f"{name}: there are GPUs, and torch is built without CUDA", remedy)]
    if not gpus:
        return [ok("gpus", f"{name}: none")]
    kinds = ", ".join(sorted({f"{gpu.name} {gpu.total_mib / 1024:.0f} GiB" for gpu in gpus}))
    what = f"{name}: {len(gpus)} x {kinds}, driver {gpus[0].driver}, Ray counts {rays:g}"
    busy = [
        f"{i}: {g.used_mib / 1024:.1f} GiB" for i, g in enumerate(gpus) if g.used_mib > BUSY_MIB
    ]
    if not busy or node.free.get("GPU", 0.0) != rays:
        return [ok("gpus", what)]
    used = f"{name}: memory is in use on cards that are free to Ray ({', '.join(busy)})"
    remedy = "another program, or what an old run left, holds it: nvidia-smi on that node"
    return [ok("gpus", what), warn("gpus", used, remedy)]
