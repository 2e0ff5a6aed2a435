"""Roles find room whatever the order in which Ray would fill the cards."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.rewards.server import reward_servers
from g2rpo_ray.rollout.supply import SupplyError
from g2rpo_ray.training import roles
from tests.tiny import tiny_config


class StartedError(Exception):
    """Reward servers are about to start."""


def placed_cpus() -> float:
    """CPUs of the placement groups that are there; what Ray says is free comes a moment late."""
    groups = placement_group_table().values()
    there = [group["bundles"].values() for group in groups if group["state"] == "CREATED"]
    return sum(bundle.get("CPU", 0.0) for bundles in there for bundle in bundles)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("share", "waits"), [(0, "none"), (0.1, "room")])
def test_workers_keep_their_room_while_reward_servers_take_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, waits: str
) -> None:
    """Servers without cards start at the same time as workers; others take their share first."""
    before, held_cpus = placed_cpus(), list[float]()

    @contextmanager
    def connected(_settings: object) -> Iterator[bool]:
        yield False

    @contextmanager
    def servers(*given: object) -> Iterator[None]:
        asked = inspect.signature(reward_servers).bind(*given).arguments
        assert asked["wait"] == waits
        held_cpus.append(placed_cpus() - before)
        raise StartedError
        yield

    monkeypatch.setattr(roles, "ray_cluster", connected)
    monkeypatch.setattr(roles, "reward_servers", servers)
    config = tiny_config(tmp_path, "rollout.workers=2", "rollout.cpus_per_worker=1.5",
                         f"rewards.hps.gpus_per_replica={share}")  # fmt: skip
    with pytest.raises(StartedError), roles.launch_rollout(config, [], lambda _: None):
        pytest.fail("reward servers have not started")
    assert held_cpus == [3.0]


class BrokenEncoder:
    """Stands for the encoder's actor."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def cut(self, _texts: list[str]) -> list[int]:
        if self.error is None:
            os._exit(1)
        raise self.error


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (ModelFolderError("no text_encoder"), ModelFolderError, "^no text_encoder$"),
        (ZeroDivisionError("by 0"), SupplyError, "the prompt encoder failed with ZeroDivisionErr"),
        (None, SupplyError, "the prompt encoder failed with ActorDiedError: "),
    ],
)
def test_an_encoder_that_fails_before_the_first_prompt_is_named(
    tmp_path: Path, error: Exception | None, expected: type[Exception], words: str
) -> None:
    """A run asks first which prompts are cut; nobody else would tell these in words."""
    actor = ray.remote(num_cpus=0)(BrokenEncoder).remote(error)
    # The tiny world's embeddings are of another length.
    encoder = roles.Encoder(tiny_config(tmp_path, "prompts.max_sequence_length=6"), lambda: actor)
    with pytest.raises(expected, match=words) as caught:
        encoder.cut(["a cat"], 6, lambda: None)
    assert type(caught.value) is expected
    ray.kill(actor)
