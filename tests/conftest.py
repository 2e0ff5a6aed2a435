"""Shared by all tests: small paths, one thread, and one Ray cluster for those that need one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from g2rpo_ray.cluster.connect import worker_environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are the same code at true size; without a card they are skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA card here"))


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The networks are small: more threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A private Ray on this machine; CPUs are only numbers to it, and it has no GPU."""
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": worker_environment(())},
    )
    yield
    ray.shutdown()
