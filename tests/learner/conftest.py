"""Ranks that the tests of this room share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from g2rpo_ray.cluster.connect import free_address
from tests.learner.rank_groups import Rank, Ranks, small_config


@pytest.fixture(scope="package")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("run")
    return folder


@pytest.fixture(scope="package")
def ranks(ray_cluster: None, run_dir: Path) -> Iterator[dict[int, Ranks]]:  # noqa: ARG001
    """A group of one rank and a group of two, for all files here: their processes take seconds."""
    groups = {}
    for count in (1, 2):
        config = small_config(run_dir, f"learner.ranks={count}")
        actors = [ray.remote(Rank).options(num_cpus=0.5).remote(config, r) for r in range(count)]
        meeting = ray.get(actors[0].__ray_call__.remote(free_address))
        groups[count] = Ranks(run_dir, actors, meeting)
    yield groups
    for group in groups.values():
        for actor in group.actors:
            ray.kill(actor)
