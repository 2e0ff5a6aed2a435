"""Where an actor runs, and what can still be found out about it once it has failed."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LOG_LINES = 15
LOOK_TIMEOUT_S = 20.0
EXIT_WAIT_S = 2.0
GIB = 2**30


@dataclass(frozen=True)
class Place:
    """One actor's process."""

    node_id: str
    address: str
    pid: int
    logs: str
    """Path of the process's output on its node, without ``.out`` or ``.err``."""
    rss_gib: float
    """Resident memory when it was asked."""

    def __str__(self) -> str:
        return f"pid {self.pid} on node {self.address} ({self.node_id[:8]})"


def own_place(_actor: object = None) -> Place:
    """The place of this process; runs on any actor through ``__ray_call__``."""
    context = ray.get_runtime_context()
    return Place(
        node_id=context.get_node_id(),
        address=ray.util.get_node_ip_address(),
        pid=os.getpid(),
        logs=ray._private.worker.global_worker.get_err_file_path().removesuffix(".err"),
        rss_gib=psutil.Process().memory_info().rss / GIB,
    )


def error_of(ref: ray.ObjectRef) -> Exception | None:
    """Why a call that ended failed, in the callee's own words; None where it gave an answer."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause: Exception = error.cause
        return cause
    except ray.exceptions.RayError as error:
        return error
    return None


def first_line(error: BaseException) -> str:
    """What an error of Ray's says, without its stack of details."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    if lines and "raised in its creation task" in lines[0]:
        # A traceback follows, which ends with the error itself.
        causes = lines[-1:]
    return (causes or lines or [type(error).__name__])[0][:300]


def report(role: str, place: Place | None, cause: str) -> str:
    """Role, node, cause, memory and the last lines of the log, as far as they can be had."""
    if place is None:
        return f"{role}: {cause}; it was never placed on a node"
    lines = [f"{role}, {place}: {cause}", f"  memory when last asked: {place.rss_gib:.2f} GiB"]
    strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    look = ray.remote(_look).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    try:
        lines += ray.get(look.remote(place), timeout=LOOK_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        lines.append(f"  its node did not answer within {LOOK_TIMEOUT_S:g} s")
    except ray.exceptions.RayError as error:
        lines.append(f"  its node cannot be asked: {first_line(error)}")
    return "\n".join(lines)


def _look(place: Place) -> list[str]:
    """Runs on the actor's node."""
    memory = psutil.virtual_memory()
    lines = [
        f"  process: {_state(place.pid)}",
        f"  node's memory now: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free",
        f"  last lines of {place.logs}.err (and .out):",
    ]
    for end in (".out", ".err"):
        path = Path(place.logs + end)
        text = path.read_text(errors="replace") if path.exists() else ""
        lines += [f"    {line[:300]}" for line in text.splitlines()[-LOG_LINES:] if line.strip()]
    return lines


def _state(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # One that was just killed is still there for a moment, then a zombie until it is reaped.
        with suppress(psutil.TimeoutExpired):
            process.wait(EXIT_WAIT_S)
        state: str = process.status()
        if state != psutil.STATUS_ZOMBIE:
            return state
    return "gone"
