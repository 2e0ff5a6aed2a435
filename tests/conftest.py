"""Shared by all tests: small paths, one thread, and one Ray cluster for those that need one."""

import fcntl
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from g2rpo_ray.cluster.connect import start_again_if_late, worker_environment

# A pool of compilers starts a Python with PyTorch for each core, more than it saves on few cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


TOGETHER = (
    # One group of ranks, whose processes take seconds to start.
    ("learner/test_family_ranks.py", "learner/test_old_policy.py", "learner/test_ranks.py"),
    # Every published network is counted once.
    (
        "plan/test_plan.py",
        "plan/test_memory.py",
        "plan/test_networks.py",
        "test_docs_commands.py",
        "scripts/test_bench_families.py",
    ),
)
"""Files that share something dear: in parallel, one process runs them one after another."""


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, with the files of ``TOGETHER`` as one."""
    from xdist.scheduler import LoadFileScheduling

    first = {f"tests/{file}": f"tests/{files[0]}" for files in TOGETHER for file in files}

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return first.get(file, file)

    return Together(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are the same code at true size; without a card they are skipped.

    Files that take long come first: in parallel, none of them is then alone at the end.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA card here"))
    long = {item.path for item in items if _takes_long(item)}
    together = {Path(__file__).parent / file for files in TOGETHER for file in files}
    items.sort(key=lambda item: (item.path not in together, item.path not in long))


def _takes_long(item: pytest.Item) -> bool:
    needs_ray = "ray_cluster" in getattr(item, "fixturenames", ())
    return needs_ray or item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def _as_it_began() -> Iterator[None]:
    """No test sees what another left in the process: a number of threads, by which sums differ in
    their last bits, or compiled code, of which PyTorch refuses more than a few."""
    yield
    torch.set_num_threads(1)
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()
        compiler.config.recompile_limit = 8


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return Path(__file__).parent / "golden"


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes ``compute_the_same_bits`` and ``add_in_one_order``."""
    from torch._inductor import config as compiler

    # Set, so that what is set meanwhile is undone.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    compiler.deterministic = torch.backends.cudnn.deterministic = False


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The networks are small: more threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private Ray on this machine; CPUs are only numbers to it, and it has no GPU."""
    start = partial(
        ray.init,
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": worker_environment(())},
    )
    # One start at a time: Ray gives up a node that is not there within 30 s.
    with (
        (tmp_path_factory.getbasetemp().parent / "ray.lock").open("w") as lock,
        pytest.MonkeyPatch.context() as patch,
    ):
        # As a private Ray of ours: idle workers cost a hundredth of a core each.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        fcntl.flock(lock, fcntl.LOCK_EX)
        start_again_if_late(start)
    # It looks through all logs again and again, for drivers that print them.
    ray._private.worker._global_node.kill_log_monitor()
    yield
    ray.shutdown()
