"""Roles find room whatever the order in which Ray would fill the cards."""

import inspect
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
from ray.exceptions import ActorDiedError
from ray.util import placement_group_table

from g2rpo_ray.common.stop import StopRequested, StopSignal
from g2rpo_ray.learner import ranks
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.waiting import RankLostError
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


@pytest.fixture
def only_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch`` without a cluster, and with stand-ins for all other roles."""

    @contextmanager
    def around(*_: object) -> Iterator[mock.MagicMock]:
        yield mock.MagicMock()

    @contextmanager
    def started(*_: object) -> Iterator[tuple[mock.MagicMock, ...]]:
        yield tuple(mock.MagicMock() for _ in range(3))

    for name in ("_cluster", "_room", "_evaluation_pool"):
        monkeypatch.setattr(roles, name, around)
    monkeypatch.setattr(roles._DrawingRoles, "started", started)
    monkeypatch.setattr(roles._DrawingRoles, "wait", lambda *_: None)


@pytest.mark.usefixtures("only_the_learner")
@pytest.mark.parametrize("phase", ["start", "compute"])
def test_a_stop_is_heard_while_the_learner_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    closed = threading.Event()
    learner = mock.MagicMock(close=closed.set)
    getattr(learner, phase).side_effect = lambda *_: closed.wait(20)
    monkeypatch.setattr(roles, "LearnerGroup", lambda *_: learner)
    with StopSignal("all stays"):
        signal.raise_signal(signal.SIGINT)
        with (
            pytest.raises(StopRequested),
            roles.launch(tiny_config(tmp_path), None, lambda _: None),
        ):
            pytest.fail("the learner has started")


@pytest.mark.usefixtures("only_the_learner")
@pytest.mark.parametrize("deaths", [1, 20])
def test_a_rank_that_dies_while_the_operations_are_counted_is_told_as_any_other_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """The last answer that the start waits for: Ray's own words would not say which role died."""
    fake_ray, left, told = mock.MagicMock(), [deaths], list[str]()
    fake_ray.get.side_effect = ActorDiedError()
    rank = SimpleNamespace(__ray_call__=mock.Mock(), start=mock.Mock(), lives=mock.Mock())
    actor = fake_ray.remote.return_value.return_value
    actor.options.return_value.remote.return_value = rank

    def answers_of(refs: list[object], phase: str, *_: object) -> list[object]:
        if phase == "counting operations" and left[0]:
            left[0] -= 1
            raise RankLostError("learner: a rank died during 'counting operations'")
        return [2.5 if phase == "counting operations" else ("address", 1)] * len(refs)

    for module in (roles, ranks):
        monkeypatch.setattr(module, "ray", fake_ray)
    monkeypatch.setattr(ranks, "answers_of", answers_of)
    monkeypatch.setattr(ranks, "report", lambda role, *_: f"{role}, pid 7 on node n")
    launched = roles.launch(tiny_config(tmp_path, "learner.ranks=1"), None, told.append)
    if deaths == 1:
        with launched as there:
            assert (there.tflop, there.learner.rebuilds) == (2.5, 1)
        assert any("; rebuilding the learner" in line for line in told)
        return
    with pytest.raises(LearnerError, match="died during 'counting operations'") as caught, launched:
        pytest.fail("operations were counted by the dead")
    assert "learner rank 0, pid 7 on node n" in str(caught.value)


def test_a_stop_is_heard_until_the_last_encoder_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = [mock.MagicMock(), mock.MagicMock()]
    monkeypatch.setattr(roles.Encoder, "started", actors)
    quick, slow = (actor.cut.remote.return_value for actor in actors)
    monkeypatch.setattr(roles.ray, "wait", lambda *_, **__: ([quick], [slow]))
    monkeypatch.setattr(roles, "error_of", lambda _: pytest.fail("waits for the slow one, deaf"))
    encoder = roles.Encoder(tiny_config(tmp_path, "prompts.max_sequence_length=6"), mock.Mock())
    with StopSignal("all stays"):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequested):
            encoder.cut(["a cat"], 6)


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
        encoder.cut(["a cat"], 6)
    assert type(caught.value) is expected
    ray.kill(actor)
