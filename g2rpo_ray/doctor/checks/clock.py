"""Clocks of the nodes against this machine's."""

import time
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle

from g2rpo_ray.doctor.findings import Finding, fail, ok, warn

TRIES = 5
WARN_S, FAIL_S = 1.0, 60.0


def check_clock(probes: Mapping[str, ActorHandle]) -> list[Finding]:
    """Offset from the call with the shortest way there and back."""
    offsets = {}
    for name, probe in probes.items():
        calls = []
        for _ in range(TRIES):
            sent_s = time.time()
            there_s = ray.get(probe.run.remote(time.time), timeout=30)
            took_s = time.time() - sent_s
            calls.append((took_s, there_s - sent_s - took_s / 2))
        offsets[name] = min(calls)
    return judge_clock(offsets)


def judge_clock(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Of (seconds there and back, seconds that the node's clock is ahead) by node."""
    findings = []
    for name, (took_s, ahead_s) in offsets.items():
        # Half the way is what the measurement cannot tell.
        surely_s = abs(ahead_s) - took_s / 2
        if surely_s > WARN_S:
            judge = fail if surely_s > FAIL_S else warn
            what = f"{name}: its clock is {ahead_s:+.2f} s off"
            remedy = "tokens, logs and metrics go by the clock: start chrony or ntpd on that node"
            findings.append(judge("clock", what, remedy))
    largest = max(abs(ahead_s) for _, ahead_s in offsets.values())
    return findings or [ok("clock", f"all nodes within {largest * 1000:.1f} ms of this machine")]
