"""Evaluation during training: recorded where it belongs, the best kept, the early stop, failures.

The real loop with roles that only count, so that it runs without Ray; whole runs are in
tests/integration.
"""

import json
import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.folders import (
    delete_old_checkpoints,
    iteration_of,
    list_checkpoints,
)
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.learner.update import StepRecord, UpdateReport
from g2rpo_ray.maths.objective import PolicyHealth
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.rollout.answers import HeldoutPictures, RolloutSummary
from g2rpo_ray.run.folder import open_run
from g2rpo_ray.run.paths import RunFolderError
from g2rpo_ray.run.weights import checkpoint_named
from g2rpo_ray.tracking.metrics import read_metrics
from g2rpo_ray.training.session import Session
from g2rpo_ray.training.train import iterate
from g2rpo_ray.training.trainer import Drawn, Trainer
from tests.states import write_checkpoint
from tests.tiny import tiny_config

OVERRIDES = ["checkpoint.best=oracle", "evaluation.every=1", "checkpoint.every=1",
             "checkpoint.keep_last=1"]  # fmt: skip
SCORES = [0.5, 0.6, 0.8, 0.7, 0.75, 0.9, 0.1, 0.1]
"""Held-out oracle by weight version."""


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("g2rpo_ray.training.activity.living_nodes", list)


@dataclass
class FakePool:
    """Scores by the weights that it was last given; NaN scores fail."""

    scores: Sequence[float]
    version: int = 0
    workers: tuple[()] = ()
    busy_s: float = 0.0
    replacements: int = 0
    repeats: int = 0
    encoder_wait_s: float = 0.0
    store_wait_s: float = 0.0
    replica_busy_s: Counter[str] = field(default_factory=Counter)
    may_end: threading.Event = field(default_factory=threading.Event)
    """Set: an evaluation ends at once."""
    failures: list[str] = field(default_factory=list)
    """What every evaluation has to tell."""

    def sync(self, send: Any) -> None:
        self.version = send([]).version

    def resting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluate(self, prompts: Sequence[object], on_wait: Any) -> list[HeldoutPictures]:
        version = self.version
        while not self.may_end.wait(0.01):
            on_wait(0, len(prompts))
        if self.scores[version] != self.scores[version]:
            raise RunError("the scorer is gone")
        pictures = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
        scores = {"oracle": torch.tensor([self.scores[version]])}
        scores["hps"] = torch.tensor([1 + 0.1 * version])
        return [HeldoutPictures(0, "a red circle", pictures, scores, 0, self.failures)]


class FakeLearner:
    """Learns nothing; writes checkpoints of two numbers, as late as it may."""

    busy_s = 0.0
    rebuilds = 0
    written_s = 0.0
    saved_unix_s = None

    def __init__(self, version: int) -> None:
        self.version = version
        self.scales: list[dict[str, float]] = []
        """Of every update."""
        self.write: Callable[[], None] = lambda: None

    def update(self, _groups: object, scales: Mapping[str, float]) -> UpdateReport:
        self.version += 1
        self.scales.append(dict(scales))
        health = PolicyHealth(1.0, 0.0, 0.0, 0.0, 0.0)
        return UpdateReport([StepRecord(0, 0, 0, 0.0, health, 0.0, True, 0, 0.0, 0.0)], [1.0], 0.1)

    def save(self, folder: Path, info: CheckpointInfo, keep_also: Sequence[int]) -> None:
        def write() -> None:
            write_checkpoint(folder, info, {"weight.a": torch.ones(2), "exp_avg.a": torch.ones(2)})
            delete_old_checkpoints(folder.parent.parent, 1, folder, keep_also)

        self.finish_save()
        self.write = write

    def finish_save(self) -> None:
        self.write()
        self.write = lambda: None

    def checksum(self) -> str:
        return "0"


class Loop(Trainer):
    """Draws nothing: calls ``meanwhile`` instead."""

    meanwhile: Callable[[], None]

    def generate(self) -> Drawn:
        self.stop.check()
        self.meanwhile()
        summary = RolloutSummary(0, self.iteration, 1, 1, {}, {}, [], [], 0.0, [])
        return Drawn(self.iteration, [summary], [], 1.0)

    def settle(self) -> None:
        """Wait until the evaluation beside the training has ended."""
        beside = self.heldout._beside
        if beside is not None:
            wait([beside.results], 10)


@dataclass
class Trained:
    """A run that has ended."""

    folder: Path
    config: Config
    told: list[str]
    scales: list[dict[str, float]] = field(default_factory=list)
    """Of every update of this life."""

    @property
    def means(self) -> dict[int, float]:
        records = read_metrics(self.folder)
        return {r["iteration"]: r["heldout/oracle"] for r in records if "heldout/oracle" in r}

    @property
    def missed(self) -> float:
        return sum(r.get("evaluation/missed", 0) for r in read_metrics(self.folder))

    @property
    def checkpoints(self) -> list[int]:
        return [iteration_of(path) for path in list_checkpoints(self.folder)]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


class Run:
    """A run's settings and its evaluating worker; ``train`` may be called again to resume."""

    def __init__(
        self, folder: Path, *overrides: str, beside: bool = False, scores: Sequence[float] = SCORES
    ) -> None:
        self.config = tiny_config(
            folder, *OVERRIDES, f"evaluation.workers={int(beside)}", *overrides
        )
        self.beside = beside
        self.told: list[str] = []
        self.pool = FakePool(scores)
        self.pool.may_end.set()

    def train(
        self, meanwhile: Callable[[Loop], None] = Loop.settle, resume: str = "none"
    ) -> Trained:
        """Train to the end; while an iteration is trained, ``meanwhile`` happens."""
        opened = open_run(self.config, resume)
        self.told.clear()
        trained = Trained(opened.folder, self.config, self.told)

        learner = FakeLearner(opened.info.weight_version)
        trained.scales = learner.scales

        def weights_of_now(_timeout_s: float) -> Any:
            report = WeightReceipt(learner.version, 1, 1, "")
            return SimpleNamespace(send=lambda _workers: report)

        def sync() -> WeightReceipt:
            if not self.beside:
                self.pool.version = learner.version
            return WeightReceipt(learner.version, 1, 1, "")

        roles: Any = SimpleNamespace(
            pool=self.pool,
            evaluation_pool=self.pool if self.beside else None,
            weights_of_now=weights_of_now,
            sync=sync,
            encoder=SimpleNamespace(heldout=list, cut=lambda *_: "3 prompts are cut"),
            tflop=1.0,
            learner=learner,
            rewards=SimpleNamespace(replicas=lambda: {"oracle": 1}),
        )
        session = Session(self.config, opened, ["a red circle"], ["a red circle"])
        session.progress = MagicMock(note=trained.told.append)
        with session.stop, session.recording(), closing(Loop(session, roles)) as loop:
            loop.meanwhile = partial(meanwhile, loop)
            iterate(loop)
        return trained


both = pytest.mark.parametrize("beside", [False, True])


@both
def test_every_evaluation_is_recorded_under_its_iteration(tmp_path: Path, beside: bool) -> None:
    trained = Run(tmp_path / "run", "iterations=5", beside=beside).train()
    assert trained.means == pytest.approx(dict(enumerate(SCORES[:6])))
    summary = trained.summary
    assert (summary["best_iteration"], summary["stopped_early"]) == (5, False)
    assert summary["heldout"]["oracle"] == pytest.approx({"before": 0.5, "after": 0.9})
    assert trained.missed == 0
    assert trained.told.count("3 prompts are cut") == 1


@both
def test_the_best_checkpoint_is_there_at_the_end(tmp_path: Path, beside: bool) -> None:
    trained = Run(tmp_path / "run", "iterations=4", beside=beside).train()
    assert trained.summary["best_iteration"] == 2
    assert trained.checkpoints == [2, 4]
    assert iteration_of(checkpoint_named(trained.config, "best")) == 2


def test_a_checkpoint_under_evaluation_is_kept_until_it_is_judged(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "iterations=5", "evaluation.every=2", beside=True)
    there: dict[int, list[int]] = {}

    def meanwhile(loop: Loop) -> None:
        opened = loop.session.run.folder
        loop.finish_save()
        there[loop.state.iteration] = [iteration_of(p) for p in list_checkpoints(opened)]
        if loop.state.iteration == 1:
            loop.settle()
            run.pool.may_end.clear()
        if loop.state.iteration == 4:
            run.pool.may_end.set()

    trained = run.train(meanwhile)
    # 2 is under evaluation until 5, so that of 4 is left out; then 2 is the best but for 5.
    assert there == {0: [], 1: [1], 2: [2], 3: [2, 3], 4: [2, 4]}
    assert list(trained.means) == [0, 2, 5]
    assert trained.missed == 1
    assert any(
        "evaluation of iteration 4 is left out: that of iteration 2 is still under way" in line
        for line in trained.told
    )


@both
def test_the_run_ends_early_when_nothing_gets_better(tmp_path: Path, beside: bool) -> None:
    run = Run(tmp_path / "run", "iterations=7", "evaluation.patience=2", beside=beside)
    trained = run.train()
    summary = trained.summary
    # Beside the training the evaluation of 4 is known when 5 is done.
    last = 5 if beside else 4
    assert (summary["stopped_early"], summary["iterations"]) == (True, last)
    assert list(trained.means) == list(range(last + 1))
    assert trained.checkpoints[-1] == last
    assert sum("the run ends early" in line for line in trained.told) == 1
    assert "ended early" in (trained.folder / "report.html").read_text()


def test_a_run_that_ended_early_goes_on_only_with_more_patience(tmp_path: Path) -> None:
    settings = ("iterations=7", "evaluation.patience=2")
    Run(tmp_path / "run", *settings).train()
    with pytest.raises(RunFolderError, match="ended early at iteration 4 of 7"):
        Run(tmp_path / "run", *settings).train(resume="auto")
    patient = Run(tmp_path / "run", "iterations=7", "evaluation.patience=3").train(resume="auto")
    assert patient.means == pytest.approx(dict(enumerate(SCORES)))
    assert patient.summary["best_iteration"] == 5
    assert not patient.summary["stopped_early"]


GUARD = "evaluation.guards={{oracle: {{max_drop: 0.05, then: {then}}}}}"
FALLING = [0.5, 0.6, 0.46, 0.4, 0.3, 0.3, 0.55, 0.55]


def test_a_guard_ends_the_run_and_resume_keeps_to_it(tmp_path: Path) -> None:
    settings = ("iterations=7", GUARD.format(then="stop"))
    trained = Run(tmp_path / "run", *settings, scores=FALLING).train()
    assert (trained.summary["stopped_early"], trained.summary["iterations"]) == (True, 3)
    told = [line for line in trained.told if "held-out oracle is 0.1000 below the first" in line]
    assert len(told) == 1
    assert "most fell 0.1000 on 'a red circle'" in told[0]
    with pytest.raises(RunFolderError, match=r"iteration 3 of 7 \(evaluation.guards.oracle\)"):
        Run(tmp_path / "run", *settings, scores=FALLING).train(resume="auto")
    milder = ("iterations=7", GUARD.format(then="warn"))
    trained = Run(tmp_path / "run", *milder, scores=FALLING).train(resume="auto")
    assert (trained.summary["stopped_early"], trained.summary["iterations"]) == (False, 7)
    # Of 4 and 5; before, it was told of 3, and 6 is above again.
    assert sum("held-out oracle is 0.2000 below" in line for line in trained.told) == 2


LOWERS = "evaluation.guards={oracle: {max_drop: 0.05, then: lower_weight, floor: 0.2}}"
LOWERED: list[dict[str, float]] = [{}, {}, {}, *({"hps": it} for it in (0.5, 0.25, 0.2, 0.2))]
"""By update, of FALLING: it is .1 below after 3, .2 after 4 and 5, and above again after 6."""


def test_a_guard_lowers_the_weights_of_what_rose_and_resume_keeps_to_it(tmp_path: Path) -> None:
    settings = ("iterations=7", "rewards.oracle.weight=0", LOWERS)
    whole = Run(tmp_path / "whole", *settings, scores=FALLING).train()
    assert whole.scales == LOWERED
    told = [line for line in whole.told if "the weight of hps is lowered" in line]
    assert len(told) == 3
    assert "iteration 3: the weight of hps is lowered to 0.5 of rewards.hps.weight" in told[0]
    weights = [r["reward/hps/weight"] for r in read_metrics(whole.folder, "train")]
    own = whole.config.rewards["hps"].weight
    assert weights == pytest.approx([own * scales.get("hps", 1.0) for scales in LOWERED])

    for last in range(1, 7):
        run = Run(tmp_path / f"run{last}", *settings, scores=FALLING)

        def stop(loop: Loop, last: int = last) -> None:
            if loop.iteration == last:
                loop.finish_save()
                raise RuntimeError("lost")

        with pytest.raises(RuntimeError, match="lost"):
            run.train(stop)
        resumed = Run(tmp_path / f"run{last}", *settings, scores=FALLING).train(resume="auto")
        assert resumed.scales == LOWERED[last:]
        assert [
            r.get("reward/hps/weight") for r in read_metrics(resumed.folder, "train")
        ] == weights


def test_an_evaluation_that_came_after_its_checkpoint_still_lowers(tmp_path: Path) -> None:
    settings = ("iterations=7", "rewards.oracle.weight=0", LOWERS)
    run = Run(tmp_path / "run", *settings, scores=FALLING, beside=True)

    def stop(loop: Loop) -> None:
        loop.settle()
        if loop.iteration == 3:
            loop.heldout.collect()
            loop.finish_save()
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        run.train(stop)
    state = json.loads((tmp_path / "run" / "checkpoints/iteration_000003/state.json").read_text())
    assert (state["reward_scales"], state["judged"]) == ({}, 2)
    resumed = Run(tmp_path / "run", *settings, scores=FALLING, beside=True).train(resume="auto")
    assert resumed.scales[0] == {"hps": 0.5}


def test_a_guard_keeps_the_pictures_that_fell_most(tmp_path: Path) -> None:
    settings = ("iterations=3", "evaluation.pictures_shown=0", GUARD.format(then="warn"))
    trained = Run(tmp_path / "run", *settings, scores=FALLING).train()
    kept = trained.folder / "pictures" / "heldout"
    shown = {path.stem: json.loads(path.read_text()) for path in kept.glob("*.json")}
    assert {name: len(entries) for name, entries in shown.items()} == {
        "iteration_0": 1, "iteration_1": 0, "iteration_2": 0, "iteration_3": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["evaluation.guards={hpps: {max_drop: 0.1}}"], "evaluation.guards.hpps: no such reward"),
        (["evaluation.guards={oracle: {max_drop: 0}}"], "evaluation.guards.oracle.max_drop"),
        (
            ["evaluation.guards={oracle: {max_drop: 0.1}}", "evaluation.every=0"],
            "evaluation.every is 0: the one evaluation after the first",
        ),
    ],
)
def test_guards_that_cannot_work(tmp_path: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_config(tmp_path, "evaluation.every=1", *overrides)


def test_no_gain_over_the_base_model_leaves_no_best_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "iterations=7", "evaluation.patience=2", scores=[0.5] + [0.4] * 7)
    trained = run.train()
    assert (trained.summary["iterations"], trained.summary["best_iteration"]) == (2, 0)
    with pytest.raises(RunFolderError, match="higher held-out mean of oracle than the base model"):
        checkpoint_named(trained.config, "best")


def test_a_gain_that_is_too_small_is_none(tmp_path: Path) -> None:
    rules = ("iterations=7", "evaluation.patience=1", "evaluation.min_gain=0.15")
    assert Run(tmp_path / "run", *rules).train().summary["iterations"] == 1


def test_without_the_rule_nothing_is_kept_or_marked(tmp_path: Path) -> None:
    trained = Run(tmp_path / "run", "iterations=3", "checkpoint.best=null").train()
    assert trained.checkpoints == [3]
    assert trained.summary["best_iteration"] is None
    with pytest.raises(RunFolderError, match=r"evaluated by checkpoint\.best"):
        checkpoint_named(trained.config, "best")


def test_a_failure_beside_the_training_is_told_counted_and_no_number(tmp_path: Path) -> None:
    scores = [0.5, math.nan, 0.8, math.nan]
    trained = Run(tmp_path / "run", "iterations=3", beside=True, scores=scores).train()
    assert trained.means == pytest.approx({0: 0.5, 2: 0.8})
    failures = [line for line in trained.told if "failed, it has no numbers" in line]
    assert [line[:25] for line in failures] == [f"evaluation of iteration {n}" for n in (1, 3)]
    assert all("the scorer is gone" in line for line in failures)
    # That of 3 was told after the last line of the metrics.
    assert trained.missed == 1
    summary = trained.summary
    assert summary["heldout"]["oracle"] == {"before": 0.5, "after": None}
    assert (summary["iterations"], summary["best_iteration"]) == (3, 2)


@both
def test_scores_that_are_missing_are_told_with_their_cause(tmp_path: Path, beside: bool) -> None:
    run = Run(tmp_path / "run", "iterations=1", beside=beside)
    run.pool.failures = ["the judge is silent"]
    assert [line for line in run.train().told if "silent" in line] == [
        f"evaluation of iteration {n} lacks a score: the judge is silent" for n in (0, 1)
    ]


def test_when_training_waits_a_failure_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the scorer is gone"):
        Run(tmp_path / "run", "iterations=3", scores=[0.5, math.nan]).train()


def test_a_stop_gives_up_the_evaluation_and_resume_makes_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "iterations=4", "evaluation.every=2", beside=True)

    def meanwhile(loop: Loop) -> None:
        if loop.state.iteration == 0:
            loop.settle()
        if loop.state.iteration == 1:
            run.pool.may_end.clear()
        if loop.state.iteration == 2:
            signal.raise_signal(signal.SIGTERM)
            loop.session.on_wait(0, 1)

    with pytest.raises(StopRequested):
        run.train(meanwhile)
    assert sorted(r["iteration"] for r in read_metrics(tmp_path / "run")) == [0, 1, 2]
    run.pool.may_end.set()
    trained = run.train(resume="auto")
    assert trained.means == pytest.approx({0: 0.5, 2: 0.8, 4: 0.75})
    assert trained.missed == 0


def test_a_stop_in_the_last_evaluation_is_told_and_resume_makes_only_that(tmp_path: Path) -> None:
    settings = ("iterations=7", "evaluation.patience=2")
    run = Run(tmp_path / "run", *settings, beside=True)

    def meanwhile(loop: Loop) -> None:
        loop.settle()
        # That of 4 is known when 5 is done: the run ends early, and 5 is judged last.
        if loop.state.iteration == 4:
            run.pool.may_end.clear()
            signal.raise_signal(signal.SIGTERM)

    def train_on(loop: Loop) -> None:
        raise AssertionError(f"iteration {loop.state.iteration + 1} is trained")

    with pytest.raises(StopRequested):
        run.train(meanwhile)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "report.html").exists()
    assert sum("stopped by SIGTERM after iteration 5 of 7" in line for line in run.told) == 1
    run.pool.may_end.set()
    trained = run.train(train_on, resume="auto")
    assert trained.means == pytest.approx(dict(enumerate(SCORES[:6])))
    assert (trained.summary["iterations"], trained.summary["stopped_early"]) == (5, True)
