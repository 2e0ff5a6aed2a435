"""Frozen weights of a node's roles: one holder, who ends with whom, and what comes after."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, remove_placement_group

from g2rpo_ray.cluster.postmortem import error_of
from g2rpo_ray.config import Config
from g2rpo_ray.learner.ranks import LearnerGroup
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import DTYPES
from g2rpo_ray.models.sharing import Lent, SharingError
from g2rpo_ray.models.weights import word_sums
from g2rpo_ray.weight_sync.frozen import FrozenParts, frozen_keeper
from tests.tiny import copy_flux, draw_groups, encode, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

SHARED = ("model.share_frozen=true", "model.lora.rank=2", "learner.learning_rate=1e-3")
WAIT_S = 300.0
"""Only what goes wrong waits so long: a busy machine may take a minute to start an actor."""


def mapped_kib(_actor: object = None) -> tuple[int, int]:
    """Of the holder's memory that this process maps: all of it, and copies of its own."""
    parts = Path("/proc/self/smaps").read_text().split("memfd:frozen")[1:]
    sizes = [
        [int(re.search(rf"{key}: +(\d+) kB", part)[1]) for part in parts]  # type: ignore[index]
        for key in ("Size", "Private_Dirty")
    ]
    return sum(sizes[0]), sum(sizes[1])


class Role:
    """A role that does nothing but hold its networks."""

    def start(self, config: Config, refused: bool = False) -> str:
        refusal = SharingError("operation not permitted")
        with mock.patch.object(Lent, "open", side_effect=refusal) if refused else mock.MagicMock():
            parts = FrozenParts(torch.device("cpu"))
        self.network = parts(
            config.model, "transformer", DTYPES[config.model.dtype], torch.device("cpu")
        )
        return parts.description

    def sums(self) -> list[int]:
        return word_sums(list(self.network.state_dict().values()))

    def pid(self) -> int:
        return os.getpid()


User: Any = ray.remote(num_cpus=0)(Role)


@pytest.fixture(scope="module")
def config(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:  # noqa: ARG001
    """Of a run that shares, whose keeper is there; a job has one, so those of other runs are before
    this one in the file."""
    settings = tiny_config(tmp_path_factory.mktemp("shared") / "run", *SHARED)
    with frozen_keeper(settings):
        yield settings


@pytest.fixture(scope="module")
def first(config: Config) -> ActorHandle:
    """A user for several tests: each takes seconds to start."""
    (user,) = users(config, 1)
    return user


def users(config: Config, count: int, of_holder: str = "") -> list[ActorHandle]:
    started = [User.remote() for _ in range(count)]
    told = ray.get([user.start.remote(config) for user in started], timeout=WAIT_S)
    assert told == [f"frozen weights shared with its card's other roles{of_holder}"] * count
    return started


def holder_pid() -> int:
    """Of the one process of this test's Ray that has the title; others may run beside it."""
    (found,) = [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "".join(process.cmdline()).startswith("ray::FrozenHolder")
    ]
    return int(found)


def ended(user: ActorHandle) -> bool:
    return isinstance(error_of(user.pid.remote()), ray.exceptions.RayActorError)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.1)


def test_what_the_holder_cannot_load_is_said_as_without_it(tmp_path: Path) -> None:
    folder = copy_flux(tmp_path / "flux")
    (weights,) = (folder / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    settings = tiny_config(tmp_path / "run", *SHARED, f"model.path={folder}")
    with frozen_keeper(settings):
        error = error_of(User.remote().start.remote(settings))
    assert isinstance(error, ModelFolderError)
    assert str(weights) in str(error)


def trained(config: Config, groups: list[ray.ObjectRef], killed: bool = False) -> str:
    """Checksum after two updates on two ranks; with ``killed``, their holder ends between them."""
    told: list[str] = []
    room = placement_group([{"CPU": 0.25}] * 2)
    group = LearnerGroup(config, room, None, told.append)
    try:
        group.start()
        group.update(groups)
        sizes = ray.get([rank.__ray_call__.remote(mapped_kib) for rank in group.ranks])
        assert [copied for _, copied in sizes] == [0, 0], "DeepSpeed wrote into frozen weights"
        shares = group.coverage.endswith("; frozen weights shared with its card's other roles")
        assert shares is (min(mapped for mapped, _ in sizes) > 1000)
        assert shares is config.shares_frozen
        if killed:
            os.kill(holder_pid(), signal.SIGKILL)
            wait_for(group.heal, "the ranks are still the same")
            assert group.rebuilds == 1, told
        group.update(groups)
        return group.checksum()
    finally:
        group.close()
        remove_placement_group(room)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "frozen"), [(1, "float8"), (2, "null")])
def test_ranks_map_them_under_deepspeed_and_are_rebuilt_with_their_holder(
    tmp_path: Path, stage: int, frozen: str
) -> None:
    choices = (f"learner.zero_stage={stage}", f"model.frozen_dtype={frozen}")
    settings = (*SHARED, "learner.ranks=2", *choices)
    config = tiny_config(tmp_path / "run", *settings)
    groups = [ray.put(group) for group in draw_groups(config, encode(config)[:2])]
    own = trained(tiny_config(tmp_path / "run", *settings, "model.share_frozen=false"), groups)
    with frozen_keeper(config):
        assert trained(config, groups, killed=True) == own


def test_where_memory_cannot_be_mapped_a_role_loads_its_own_and_says_so(
    config: Config, first: ActorHandle
) -> None:
    user = User.remote()
    told = ray.get(user.start.remote(config, refused=True), timeout=WAIT_S)
    assert told == "own copy of the frozen weights, cannot map others' (operation not permitted)"
    assert ray.get(user.sums.remote()) == ray.get(first.sums.remote())
    assert ray.get(user.__ray_call__.remote(mapped_kib)) == (0, 0)


def test_a_user_that_dies_leaves_the_others_and_a_holder_that_dies_takes_all(
    config: Config, first: ActorHandle
) -> None:
    (second,) = users(config, 1)
    sums = ray.get(first.sums.remote())
    assert ray.get(second.sums.remote()) == sums
    holder = holder_pid()
    sizes = ray.get([user.__ray_call__.remote(mapped_kib) for user in (first, second)])
    assert [copied for _, copied in sizes] == [0, 0]
    assert min(mapped for mapped, _ in sizes) > 1000

    os.kill(ray.get(second.pid.remote()), signal.SIGKILL)
    wait_for(lambda: ended(second), "a killed user still answers")
    (third,) = users(config, 1)
    assert holder_pid() == holder
    assert ray.get([user.sums.remote() for user in (first, third)]) == [sums] * 2

    os.kill(holder, signal.SIGKILL)
    for user in (first, third):
        wait_for(partial(ended, user), "a user lives on without its holder")
    (fourth,) = users(config, 1, " (holder 2: the one before ended, and its roles with it)")
    assert holder_pid() != holder
    assert ray.get(fourth.sums.remote()) == sums
