"""one_step_off without Ray: what is drawn when, with which weights, and what a stop drops."""

import signal
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.learner.group_training import StepRecord
from g2rpo_ray.learner.ranks import GroupsLostError
from g2rpo_ray.learner.update import UpdateReport, update_on_groups
from g2rpo_ray.maths.objective import PolicyHealth
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.weights import WeightReceipt, load_weights, trainable_parameters
from g2rpo_ray.rollout.answers import RolloutSummary
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.run.folder import Run
from g2rpo_ray.sampling.group import RolloutGroup
from g2rpo_ray.training.one_step_off import OneStepOffTrainer
from g2rpo_ray.training.session import Session
from g2rpo_ray.training.train import train_iteration
from g2rpo_ray.training.trainer import Drawn
from tests.rollout.tiny import PlainEngine
from tests.tiny import Redness, encode, tiny_config

HEALTH = PolicyHealth(1.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("g2rpo_ray.training.activity.living_nodes", list)


@dataclass
class FakeRoles:
    """Workers that know a version, a learner that takes as long as it is told, and a diary."""

    diary: list[str] = field(default_factory=list)
    workers_version: int = 0
    version: int = 0
    may_learn: threading.Event = field(default_factory=threading.Event)
    learns_after: int = 0
    """The learner ends no update before this iteration is drawn."""
    lose_once: bool = False
    rebuilds: int = 0
    busy_s: float = 0.0
    written_s: float = 0.0
    saved_unix_s: float | None = None
    replica_busy_s: Counter[str] = field(default_factory=Counter)
    replacements: int = 0
    repeats: int = 0
    encoder_wait_s: float = 0.0
    store_wait_s: float = 0.0
    workers: tuple[()] = ()
    evaluation_pool: None = None
    tflop: float = 0.01

    @property
    def pool(self) -> "FakeRoles":
        return self

    learner = rewards = encoder = pool

    def resting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def replicas(self) -> dict[str, int]:
        return {"oracle": 1}

    def cut(self, *_: object) -> str:
        return ""

    def training(self, prompts: list[tuple[int, str]]) -> list[int]:
        return [number for number, _ in prompts]

    def generate(self, prompts: list[int], iteration: int, on_wait: Any) -> Any:
        on_wait(0, len(prompts))
        self.diary.append(f"draw {iteration} with {self.workers_version}")
        if iteration == self.learns_after:
            self.may_learn.set()
        summary = RolloutSummary(0, self.workers_version, 1, 1, {}, {}, [], [], 0.0, [])
        return [summary] * len(prompts), [f"groups {iteration}"] * len(prompts)

    def update(self, groups: list[str], _scales: object) -> UpdateReport:
        assert self.may_learn.wait(60), "too few iterations are drawn ahead"
        if self.lose_once:
            self.lose_once = False
            raise GroupsLostError("lost with their node")
        self.version += 1
        self.diary.append(f"learn {groups[0]}")
        record = StepRecord(0, 0, 0, 0.0, HEALTH, 0.0, True, 0, 0.0, 0.0)
        return UpdateReport([record], [1.0], 1e-4)

    def sync(self) -> WeightReceipt:
        self.workers_version = self.version
        return WeightReceipt(self.version, 1, 1, "")


def loop_of(tmp_path: Path, roles: FakeRoles, *overrides: str) -> OneStepOffTrainer:
    config = tiny_config(tmp_path / "run", "pipeline=one_step_off", "iterations=5", *overrides)
    run = Run(tmp_path, None, CheckpointInfo(0, 0, 0, 0, 0.0, "full", 0), None)
    session: Any = Session(config, run, ["a", "b", "c"], [])
    session.progress, session.log = MagicMock(note=roles.diary.append), MagicMock()
    kinds: Any = roles
    return OneStepOffTrainer(session, kinds)


def train_one(loop: OneStepOffTrainer) -> dict[str, float]:
    """One iteration; returns the numbers that were recorded."""
    train_iteration(loop)
    record: Any = loop.session.log.record
    return dict(record.call_args.args[1])


def test_the_next_groups_are_drawn_before_the_update_ends(tmp_path: Path) -> None:
    roles = FakeRoles(learns_after=1)
    loop = loop_of(tmp_path, roles)
    stales = [train_one(loop)["rollout/staleness"] for _ in range(5)]
    assert roles.diary[:3] == ["draw 0 with 0", "draw 1 with 0", "learn groups 0"]
    assert [line for line in roles.diary if line.startswith("learn")] == [
        f"learn groups {iteration}" for iteration in range(5)
    ]
    drawn = [line for line in roles.diary if line.startswith("draw")]
    assert drawn == ["draw 0 with 0", *(f"draw {n} with {n - 1}" for n in range(1, 5))]
    assert stales == [0, 1, 1, 1, 1]
    assert (loop.state.iteration, loop.state.weight_version) == (5, 5)


def test_a_slow_learner_lets_more_be_drawn_up_to_the_bound(tmp_path: Path) -> None:
    roles = FakeRoles(learns_after=2)
    loop = loop_of(tmp_path, roles, "max_staleness=2")
    train_one(loop)
    drawn = ["draw 0 with 0", "draw 1 with 0", "draw 2 with 0", "learn groups 0"]
    assert roles.diary[:4] == drawn
    assert train_one(loop)["rollout/staleness"] == 1
    assert train_one(loop)["rollout/staleness"] == 2


def test_groups_older_than_the_bound_are_drawn_again(tmp_path: Path) -> None:
    roles = FakeRoles()
    roles.may_learn.set()
    loop = loop_of(tmp_path, roles)
    train_one(loop)
    roles.workers_version = roles.version = 7
    object.__setattr__(loop.state, "weight_version", 7)
    assert train_one(loop)["rollout/staleness"] == 0
    assert any("dropped and drawn again (max_staleness)" in line for line in roles.diary)


def test_groups_that_are_lost_are_drawn_again(tmp_path: Path) -> None:
    """And it is their numbers that are recorded."""
    roles = FakeRoles()
    loop = loop_of(tmp_path, roles)
    train_one(loop)
    roles.lose_once = True
    values = train_one(loop)
    # Drawn ahead with 0, lost, and drawn again with the weights of now.
    draws = [line for line in roles.diary if line.startswith("draw 1")]
    assert draws == ["draw 1 with 0", "draw 1 with 1"]
    assert "learn groups 1" in roles.diary
    assert (values["rollout/staleness"], values["weight_version"]) == (0, 1)


def test_a_stop_lets_the_update_end_and_counts_it(tmp_path: Path) -> None:
    roles = FakeRoles(learns_after=-1)
    loop = loop_of(tmp_path, roles)
    draw, learn = loop.draw, loop.learn

    def draw_and_stop(iteration: int) -> Any:
        drawn = draw(iteration)
        signal.raise_signal(signal.SIGTERM)
        return drawn

    def learn_after_the_stop(drawn: Drawn) -> Any:
        roles.may_learn.set()
        return learn(drawn)

    loop.draw = draw_and_stop  # type: ignore[method-assign]
    loop.learn = learn_after_the_stop  # type: ignore[method-assign]
    with loop.stop:
        values = train_one(loop)
        assert "sync/bytes" not in values
        assert (loop.state.iteration, roles.version) == (1, 1)
        with pytest.raises(StopRequested):
            train_one(loop)


def test_settings_that_make_no_sense_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_staleness 0"):
        tiny_config(tmp_path, "pipeline=one_step_off", "max_staleness=0")
    with pytest.raises(ConfigError, match="old_log_prob"):
        tiny_config(tmp_path, "pipeline=one_step_off", "learner.old_log_prob=learner")
    with pytest.raises(ConfigError, match="min_workers 3 <= workers 2"):
        tiny_config(tmp_path, "rollout.min_workers=3")
    with pytest.raises(ConfigError, match="max_workers 1"):
        tiny_config(tmp_path, "rollout.max_workers=1")


class RealRoles(FakeRoles):
    """A worker and a learner that compute, and what each update's first ratios have to be."""

    def __init__(self, *overrides: str) -> None:
        super().__init__()
        self.may_learn.set()
        self.config = config = tiny_config(Path("unused"), *overrides)
        self.prompts = encode(config)
        self.worker = RolloutWorker(config, Redness(sorted(config.rewards)))
        self.engine = PlainEngine(load_policy(config), learning_rate=0.1)
        self.reference = load_policy(config)
        self.weights = {0: self.learned()}
        """Of every version."""
        self.expected: list[float] = []
        """max |log ratio| before the first step of each update."""

    def learned(self) -> dict[str, torch.Tensor]:
        trained = trainable_parameters(self.engine.policy)
        return {name: tensor.detach().clone() for name, tensor in trained.items()}

    def generate(self, prompts: list[int], iteration: int, on_wait: Any) -> Any:  # noqa: ARG002
        drawn = [self.worker.rollout(self.prompts[n], iteration, iteration) for n in prompts]
        return [summary for summary, _ in drawn], [group for _, group in drawn]

    def update(self, groups: list[Any], _scales: object) -> UpdateReport:
        (group,) = groups
        self.expected.append(self.first_log_ratio(group))
        report = update_on_groups(
            self.engine,  # type: ignore[arg-type]
            groups,
            [1.0],
            config=self.config,
            prompts=1,
            ranks=1,
            device=torch.device("cpu"),
        )
        self.version += 1
        self.weights[self.version] = self.learned()
        return report

    def sync(self) -> WeightReceipt:
        return self.worker.receive_weights(self.version, self.weights[self.version])

    @torch.no_grad()
    def first_log_ratio(self, group: RolloutGroup) -> float:
        """From velocities made anew: old ones with the version that the group names."""
        log_probs = []
        for version in (group.weight_version, self.version):
            load_weights(self.reference, self.weights[version])
            step, x = group.sde_steps[0], group.latents[0]
            v = self.reference(x, torch.full((len(x),), step.sigma), group.prompt.embeds)
            if version == group.weight_version:
                assert torch.equal(group.velocities[0], v)
            log_probs.append(step.log_prob(group.next_latents(0), step.mean(x, v)))
        return float((log_probs[1] - log_probs[0]).abs().max())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.lora.rank=4"],
        ["rollout.fp8=true"],
        ["rollout.completion_stride=2"],
        ["model.lora.rank=4", "rollout.fp8=true", "rollout.completion_stride=2"],
        ["algorithm=flow_grpo"],
    ],
    ids="+".join,
)
def test_old_log_probabilities_are_those_of_the_groups_own_weights(
    tmp_path: Path, overrides: list[str]
) -> None:
    """Even where others complete the pictures, in fewer steps or in float8."""
    small = ["sampling.prompts_per_iteration=1", "sampling.members=2", "iterations=3"]
    settings = [*overrides, *small, "learner.update=per_sde_step"]
    roles = RealRoles(*settings)
    loop = loop_of(tmp_path, roles, *settings)
    values = [train_one(loop) for _ in range(3)]
    assert [value["rollout/staleness"] for value in values] == [0, 1, 1]
    found = [value["policy/first_max_abs_log_ratio"] for value in values]
    assert found == roles.expected
    assert found[0] == 0
    assert min(found[1:]) > 1e-5
