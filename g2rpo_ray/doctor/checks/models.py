"""Model and reward files on every node: complete, whole, the same."""

from collections.abc import Mapping

from ray.actor import ActorHandle

from g2rpo_ray.config import Config
from g2rpo_ray.doctor.findings import Finding, fail, ok
from g2rpo_ray.doctor.probe import ask

REMEDY = "copy or mount the folder on that node, and copy broken files again"


def check_models(config: Config, probes: Mapping[str, ActorHandle]) -> list[Finding]:
    """What each node would load."""
    problems, findings = ask(
        {n: probe.model_problems.remote(config) for n, probe in probes.items()}, "models", REMEDY
    )
    findings += [
        fail("models", f"{node}: {problem}", REMEDY)
        for node, found in problems.items()
        for problem in found
    ]
    digests, unread = ask(
        {n: probes[n].model_digests.remote(config) for n, found in problems.items() if not found},
        "models",
        REMEDY,
    )
    return findings + unread + judge_digests(digests)


def judge_digests(digests: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """
    Args:
        digests: digest by file, by node.
    """
    if not digests:
        return []
    (first, *others) = digests
    findings = []
    for node in others:
        here, there = digests[first], digests[node]
        differing = sorted(f for f in here.keys() | there.keys() if here.get(f) != there.get(f))
        if differing:
            what = f"{node} has other files than {first}: {', '.join(differing[:3])}"
            findings.append(fail("models", what, REMEDY))
    count = len(digests[first])
    return findings or [ok("models", f"{count} files, whole and alike on {len(digests)} nodes")]
