"""Object store, shared memory and open files of every node."""

from collections.abc import Mapping

from g2rpo_ray.doctor.findings import Finding, ok, warn
from g2rpo_ray.doctor.probe import NodeFacts

OBJECT_STORE_GIB = 0.5
OPEN_FILES = 8192


def check_limits(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """One finding a node and limit."""
    findings = []
    for name, fact in facts.items():
        shm, store, files = fact.shm_gib, fact.object_store_gib, fact.open_files
        what = f"{name}: {store:.2f} GiB"
        if store < OBJECT_STORE_GIB:
            remedy = "give Ray more: 'ray start --object-store-memory' in bytes"
            findings.append(warn("object store", what, remedy))
        else:
            findings.append(ok("object store", what))
        what = f"{name}: /dev/shm has {shm:.2f} GiB, the object store wants {store:.2f} GiB of it"
        if shm < store:
            remedy = (
                "Ray falls back to files in /tmp, far slower: docker run --shm-size, Kubernetes "
                "emptyDir with medium: Memory at /dev/shm, or mount -o remount,size="
            )
            findings.append(warn("shared memory", what, remedy))
        else:
            findings.append(ok("shared memory", what))
        what = f"{name}: {files} may be open in a process"
        if 0 <= files < OPEN_FILES:
            remedy = (
                f"many actors need more: ulimit -n 65536 before 'ray start' (least {OPEN_FILES})"
            )
            findings.append(warn("open files", what, remedy))
        else:
            findings.append(ok("open files", what))
    return findings
