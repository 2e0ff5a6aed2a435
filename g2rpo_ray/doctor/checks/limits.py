"""Object store, shared memory and open files of every node."""

from collections.abc import Mapping

from g2rpo_ray.doctor.findings import Finding, warn_if
from g2rpo_ray.doctor.probe import NodeFacts

OBJECT_STORE_GIB = 0.5
OPEN_FILES = 8192


def check_limits(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """One finding a node and limit."""
    findings = []
    for name, fact in facts.items():
        shm, store, files = fact.shm_gib, fact.object_store_gib, fact.open_files
        findings += [
            warn_if(
                store < OBJECT_STORE_GIB,
                "object store",
                f"{name}: {store:.2f} GiB",
                "give Ray more: 'ray start --object-store-memory' in bytes",
            ),
            warn_if(
                shm < store,
                "shared memory",
                f"{name}: /dev/shm has {shm:.2f} GiB, the object store wants {store:.2f} GiB of it",
                "Ray falls back to files in /tmp, far slower: docker run --shm-size, Kubernetes "
                "emptyDir with medium: Memory at /dev/shm, or mount -o remount,size=",
            ),
            warn_if(
                0 <= files < OPEN_FILES,
                "open files",
                f"{name}: {files} may be open in a process",
                f"many actors need more: ulimit -n 65536 before 'ray start' (least {OPEN_FILES})",
            ),
        ]
    return findings
