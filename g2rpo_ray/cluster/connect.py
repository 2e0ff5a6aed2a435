"""Reaching a Ray cluster, or starting one on this machine."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.job_config import JobConfig

from g2rpo_ray.cluster.demand import ClusterError
from g2rpo_ray.cluster.placement import POLL_S
from g2rpo_ray.cluster.private import (
    PrivateRayError,
    check_shared_memory,
    ensure_token,
    ray_folder,
    shorten_tmpdir,
)
from g2rpo_ray.common.device import HIDE_CARDS, KEEP_MEMORY
from g2rpo_ray.common.secrets import looks_secret
from g2rpo_ray.common.stop import heed
from g2rpo_ray.config.operation import ClusterSection

# Workers get only these and `cluster.environment`: a whole environment in runtime_env breaks Ray's
# agent, and Ray shows runtime environments in its dashboard and logs.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
WORKER_ENVIRONMENT = OFFLINE | KEEP_MEMORY | HIDE_CARDS

HEAD_TRIES, HEAD_TRY_S = 10, 3.0
"""A head that is just starting gets this many tries."""
REFUSALS = (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError)
"""What Ray raises where it cannot join a cluster."""
ONLY_THE_DRIVER = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that the processes of a private Ray do not hear; SIGINT Ray keeps from them itself."""
TOO_LATE = "node timed out during startup"
"""In what Ray raises where its own processes start slowly."""
LATE_TRIES = 4


@contextmanager
def ray_cluster(settings: ClusterSection) -> Iterator[bool]:
    """Connect to Ray, or start it on this machine; yields whether it is ours alone.

    Raises:
        PrivateRayError: it cannot start on this machine.
        ClusterError: there is no cluster at the address, or it does not let us in.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
    private = address == "local"
    _check_head(address)
    folder = _prepare_machine() if private else None
    # A job's runtime_env may set the same variables; Ray refuses that unless ours may replace them.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    # Of the roles, but not of this process, whose output is for people: so not by logging_config.
    json_logs = JobConfig()
    json_logs.set_py_logging_config(ray.LoggingConfig(encoding="JSON", log_level="INFO"))
    start = partial(
        ray.init,
        address=address,
        include_dashboard=settings.dashboard if private else None,
        runtime_env={"env_vars": worker_environment(settings.environment)},
        job_config=json_logs,
        logging_level=logging.WARNING,
        # Every role's output is in its own log file; what matters comes back as an answer.
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        if private:
            with _kept_from_children(ONLY_THE_DRIVER):
                start_again_if_late(start)
        else:
            start()
    except Exception as error:
        # Of any class: Ray raises a bare Exception, too.
        if private:
            logs = Path(folder or get_default_ray_temp_dir()) / "session_latest" / "logs"
            raise PrivateRayError(
                f"Ray did not start on this machine: {error}",
                f"its logs are in {logs}; 'df' says whether /dev/shm or that disk is full",
            ) from error
        if not isinstance(error, REFUSALS):
            raise
        raise ClusterError(
            f"no Ray cluster at {address!r} (cluster.address or RAY_ADDRESS): {error}"
        ) from error
    try:
        yield private
    finally:
        if private and ray.is_initialized():
            _end_private()
        else:
            ray.shutdown()


@contextmanager
def _kept_from_children(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Processes started inside, and theirs, never get these: a mask passes on to programs too.

    Service managers and schedulers send SIGTERM to every process of a group or control group, and
    without Ray there is nobody who could write the driver's checkpoint.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_private() -> None:
    """``ray.shutdown``, which else gives each process a second for a SIGTERM that none hears."""
    started: list[psutil.Process] = []
    for daemon in chain.from_iterable(ray._private.worker._global_node.all_processes.values()):
        with suppress(psutil.NoSuchProcess):
            started += psutil.Process(daemon.process.pid).children(recursive=True)
        daemon.process.terminate = daemon.process.kill
    ray.shutdown()
    # Workers go with their raylet; its agents would first wait a minute for the GCS.
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def start_again_if_late(start: Callable[[], object]) -> None:
    """Ray gives its own node 30 s, which no setting changes and a busy machine can miss."""
    others = set(psutil.Process().children(recursive=True))
    for left in reversed(range(LATE_TRIES)):
        try:
            start()
            return
        except Exception as error:
            if TOO_LATE not in str(error) or not left:
                raise
            print(
                "Ray's node needed more than Ray's 30 s, as on a busy machine; once more",
                flush=True,
            )
            for process in {*psutil.Process().children(recursive=True)} - others:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def _prepare_machine() -> str | None:
    """The folder for a private Ray, where it is not the one that Ray would take by itself."""
    folder, reason = ray_folder()
    told = [f"Ray's folder is {folder}. {reason}" if reason else "", shorten_tmpdir(folder)]
    for line in filter(None, told):
        print(line, file=sys.stderr, flush=True)
    check_shared_memory()
    ensure_token()
    # Ray would start a worker for each CPU before any is wanted, and wait for them; roles are few.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray refuses to be given one inside a virtual environment, though it would take it.
    return None if str(folder) == get_default_ray_temp_dir() else str(folder)


def _check_head(address: str) -> None:
    # Without anybody at the address, ray.init tries for more than two minutes without a word.
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address!r} is a Ray Client address; the driver must run on the cluster: use 'ray "
            "job submit' (cluster/submit.py), or the head's own address host:port"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    error: OSError | None = None
    for _ in range(HEAD_TRIES):
        try:
            socket.create_connection((host, int(port)), timeout=HEAD_TRY_S).close()
            return
        except OSError as refused:
            error = refused
            heed()
            time.sleep(POLL_S)
    raise ClusterError(
        f"nobody answers at {address!r} (cluster.address or RAY_ADDRESS): {error}. Is the head "
        "node running ('ray status' there), the port right (6379 unless 'ray start --port' says "
        "otherwise), and open to this machine?"
    )


def free_address(_actor: object = None) -> tuple[str, int]:
    """Address of this node and a free port on it; runs on any actor through ``__ray_call__``."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]


def worker_environment(allowed: Sequence[str]) -> dict[str, str]:
    """Environment of every worker: ours, and what ``cluster.environment`` lets through.

    Raises:
        ClusterError: a variable that it lets through looks like a secret.
    """
    passed = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in allowed)
    }
    for name in passed:
        if looks_secret(name):
            raise ClusterError(
                f"cluster.environment lets {name} through, which looks like a secret: Ray shows "
                "what it passes on in its dashboard and logs. Set it in the nodes' own environment "
                "(Kubernetes secret, Slurm's job environment) instead"
            )
    return WORKER_ENVIRONMENT | passed | HIDE_CARDS
