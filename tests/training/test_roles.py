"""Roles find room whatever the order in which Ray would fill the cards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from g2rpo_ray.training import roles
from tests.tiny import tiny_config


class StartedError(Exception):
    """Reward servers are about to start."""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("share", "waits"), [(0, False), (0.1, True)])
def test_workers_keep_their_room_while_reward_servers_take_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, waits: bool
) -> None:
    """Servers without cards start at the same time as workers; others take their share first."""
    free: list[float] = []

    @contextmanager
    def connected(_settings: object) -> Iterator[bool]:
        yield False

    @contextmanager
    def servers(*_: object, wait: bool) -> Iterator[None]:
        assert wait == waits
        free.append(ray.available_resources().get("CPU", 0.0))
        raise StartedError
        yield

    monkeypatch.setattr(roles, "ray_cluster", connected)
    monkeypatch.setattr(roles, "reward_servers", servers)
    config = tiny_config(tmp_path, "rollout.workers=2", "rollout.cpus_per_worker=1.5",
                         f"rewards.hps.gpus_per_replica={share}")  # fmt: skip
    before = ray.available_resources()["CPU"]
    with pytest.raises(StartedError), roles.launch_rollout(config, [], lambda _: None):
        pytest.fail("reward servers have not started")
    assert free == [before - 3.0]
