"""The attention that a run asks for, on the nodes where its workers may be."""

import subprocess
from collections.abc import Mapping

from ray.actor import ActorHandle

from g2rpo_ray.cluster.demand import Node, selects
from g2rpo_ray.config import Config
from g2rpo_ray.config.rollout import FLASH3
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn
from g2rpo_ray.doctor.probe import NodeFacts, ask
from g2rpo_ray.models.attention import FLASH3_CAPABILITY, AttentionBackendError, check_attention

REMEDY = (
    "install g2rpo-ray[flash3] there, keep workers on H100 or H200 by rollout.label_selector, or "
    "leave rollout.attention out (cudnn)"
)


def check_flash3(
    config: Config,
    nodes: Mapping[str, Node],
    facts: Mapping[str, NodeFacts],
    probes: Mapping[str, ActorHandle],
) -> list[Finding]:
    """Nothing where the run asks for another attention."""
    if config.rollout.attention != FLASH3:
        return []
    asked = {
        name: probe
        for name, probe in probes.items()
        if facts[name].gpus and selects(config.rollout.label_selector, nodes[name].labels)
    }
    problems, silent = ask(asked, "attention", REMEDY, flash3_problem, config)
    return silent + judge_flash3(problems)


def judge_flash3(problems: Mapping[str, str | None]) -> list[Finding]:
    """Of each node's problem: a warning as long as there are nodes without one."""
    found = {node: problem for node, problem in problems.items() if problem}
    judge = fail if len(found) == len(problems) else warn
    findings = [judge("attention", f"{node}: {problem}", REMEDY) for node, problem in found.items()]
    if problems and not findings:
        return [ok("attention", f"{FLASH3} on {len(problems)} nodes")]
    return findings


def flash3_problem(config: Config) -> str | None:
    """Why a worker on this node could not compute attention so; none where it could."""
    try:
        check_attention(config)
    except AttentionBackendError as error:
        return str(error)
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        return f"nvidia-smi fails: {done.stdout}{done.stderr}".strip()
    needed = ".".join(map(str, FLASH3_CAPABILITY))
    others = sorted({line.strip() for line in done.stdout.splitlines()} - {needed})
    if not others:
        return None
    return f"cards of compute capability {', '.join(others)}; {FLASH3} is for {needed} (H100, H200)"
