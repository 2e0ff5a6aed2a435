"""Whole runs that are judged while they train: beside the training, best checkpoint, early stop."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from g2rpo_ray.evaluation.sample import SampleOptions, sample
from g2rpo_ray.run.paths import RunFolderError
from g2rpo_ray.run.weights import checkpoint_named
from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.command import Command, train
from tests.integration.test_train import config_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

ITERATIONS = 20
RULES = [
    f"iterations={ITERATIONS}",
    "evaluation.every=1",
    # Nothing gains so much: the run ends after two evaluations without a new best.
    "evaluation.min_gain=10",
    "evaluation.patience=2",
    "checkpoint.best=clip",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    "rollout.cpus_per_worker=0.25",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    """Folders of the same run, by number of workers that only evaluate; both at the same time."""
    folder: Path = tmp_path_factory.mktemp("runs")
    run_dirs = {workers: folder / f"beside_{workers}" for workers in (0, 1)}
    commands: list[Command] = [
        train(config_of(run_dir, *RULES, f"evaluation.workers={workers}"))
        for workers, run_dir in run_dirs.items()
    ]
    try:
        for command in commands:
            assert command.wait() == 0, command.text
            assert "the run ends early" in command.text
            assert command.left_over() == []
        yield run_dirs
    finally:
        for command in commands:
            command.kill()


def heldout(run_dir: Path) -> dict[int, float]:
    records = [r for r in read_metrics(run_dir) if r["kind"] == "evaluation"]
    return {record["iteration"]: record["heldout/clip"] for record in records}


def test_an_evaluation_beside_the_training_gives_the_same_numbers(runs: dict[int, Path]) -> None:
    waited, beside = heldout(runs[0]), heldout(runs[1])
    assert list(waited) == [0, 1, 2]
    assert len(set(waited.values())) == 3
    # Beside, one that would have been late is left out; those of both are equal to the bit.
    common = waited.keys() & beside.keys()
    assert common
    assert {n: beside[n] for n in common} == {n: waited[n] for n in common}


def test_the_run_ends_early_with_all_that_a_run_leaves(runs: dict[int, Path]) -> None:
    for run_dir in runs.values():
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["stopped_early"]
        assert 2 <= summary["iterations"] < ITERATIONS
        scores = heldout(run_dir)
        assert summary["heldout"]["clip"]["after"] == scores[summary["iterations"]]
        assert (run_dir / "report.html").exists()


def test_the_best_checkpoint_is_kept_and_draws(runs: dict[int, Path], tmp_path: Path) -> None:
    for name, run_dir in runs.items():
        config, scores = config_of(run_dir, *RULES), heldout(run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
        best = summary["best_iteration"]
        assert scores[best] == max(scores.values())
        if best == 0:
            with pytest.raises(RunFolderError, match="than the base model"):
                checkpoint_named(config, "best")
        else:
            assert checkpoint_named(config, "best").name == f"iteration_{best:06d}"
            options = SampleOptions(["a red circle"], checkpoint="best")
            (drawn,) = sample(config, options, tmp_path / str(name))
            assert drawn.exists()
