"""Versions and source on every node: equal, or numbers and messages will not be."""

from collections.abc import Mapping

from g2rpo_ray.doctor.findings import Finding, fail, ok
from g2rpo_ray.doctor.probe import NodeFacts

REMEDY = (
    "use one image or one environment on all nodes (pip install -c constraints.txt), and restart "
    "Ray there"
)


def check_versions(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """The first node is the measure."""
    (first, *others) = facts
    here = facts[first].versions
    findings = []
    for node in others:
        there = facts[node].versions
        differing = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
        if differing:
            parts = ", ".join(f"{n} {there.get(n)} (not {here.get(n)})" for n in differing)
            findings.append(fail("versions", f"{node} differs from {first}: {parts}", REMEDY))
        elif facts[node].source != facts[first].source:
            what = (
                f"{node} has other source files of g2rpo_ray than {first}, though both call "
                f"themselves {here['g2rpo-ray']}"
            )
            findings.append(fail("versions", what, REMEDY))
    shown = ", ".join(f"{name} {version}" for name, version in here.items())
    nodes = f"{len(facts)} nodes alike" if others else "1 node"
    return findings or [ok("versions", f"{nodes}: {shown}")]
