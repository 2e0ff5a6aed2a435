"""A whole run of adapters whose roles share frozen weights, against one whose roles do not."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from g2rpo_ray.config import Config
from g2rpo_ray.prompts.dataset import PromptOrder
from tests.integration.command import Command, wait_until
from tests.integration.test_train import (
    Start,
    assert_same_bits,
    config_of,
    start,
    trained_iterations,
)

__all__ = ["start"]

pytestmark = pytest.mark.usefixtures("ray_cluster")

SETTINGS = (
    "model.lora.rank=4",
    "learner.learning_rate=1e-3",
    # Before the first and after the last alone: none is left out for one that is under way.
    "evaluation.every=9",
    "evaluation.workers=1",
    "checkpoint.snapshot_every=0",
    "rollout.cpus_per_worker=0.25",
)


def held_in(folder: Path, *overrides: str) -> Config:
    """A run whose scorer keeps the pictures of the second iteration until it is released."""
    prompts = [f"a red circle {number}" for number in range(8)]
    log = folder.with_name(f"{folder.name}_scorer") / "calls.log"
    log.parent.mkdir()
    log.touch()
    target = {"target": "tests.rewards.fakes:ObedientScorer", "options": {"log": str(log)}}
    scorer = {"kind": "python", "options": target, "cpus_per_replica": 0.1}
    file = folder.with_name("prompts.txt")
    config = config_of(folder, *SETTINGS, f"prompts.train={file}", *overrides, obedient=scorer)
    order = PromptOrder(len(prompts), config.seed, config.sampling.prompts_per_iteration)
    prompts[order.batch(1)[0]] = "hold a red circle"
    file.write_text("\n".join(prompts))
    return config


@pytest.mark.long
def test_a_run_that_shares_and_loses_its_holders_ends_in_the_same_bits(
    start: Start, tmp_path: Path
) -> None:
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    first = start(held_in(apart))
    second = start(held_in(shared, "model.share_frozen=true"))
    scorers = [tmp_path / f"{folder.name}_scorer" for folder in (apart, shared)]
    (scorers[0] / "release").touch()

    def wait_for(text: Callable[[], str], words: str) -> None:
        wait_until(lambda: words in text() or second.process.poll() is not None, words)
        assert second.process.poll() is None, second.text

    wait_for((scorers[1] / "calls.log").read_text, "\thold")
    for lost in (1, 2):
        os.kill(holder_of(second), signal.SIGKILL)
        wait_for(lambda: second.text, f"(holder {lost + 1}: the one before ended")
        # Not after its worker, and not at its next call: the pictures are still drawn.
        told = second.text.partition(f"(holder {lost + 1}:")[0]
        assert told.count("rebuilding the learner") >= lost
    assert trained_iterations(shared) == 1
    (scorers[1] / "release").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.text + second.text
    assert "frozen weights shared" not in first.text
    # A worker, one that evaluates, and a rank: each at the start, and again with a new holder.
    assert second.text.count("frozen weights shared with its card's other roles") >= 3
    assert_same_bits(shared, apart)
    assert first.left_over() == second.left_over() == []


def holder_of(command: Command) -> int:
    titles = {
        int(process.name): process.joinpath("cmdline").read_bytes()
        for process in command.processes()
    }
    (holder,) = [pid for pid, title in titles.items() if title.startswith(b"ray::FrozenHolder")]
    return holder


@pytest.mark.gpu
def test_roles_of_a_card_that_share_train_to_the_same_bits(start: Start, tmp_path: Path) -> None:
    settings = (
        "model.lora.rank=4",
        "model.dtype=bfloat16",
        "model.deterministic=true",
        "learner.learning_rate=1e-3",
        "learner.compile=true",
        "rollout.gpus_per_worker=0.3",
        "learner.gpus_per_rank=0.3",
    )
    ways = ("auto", "false", "false")
    folders = [tmp_path / str(number) for number in range(len(ways))]
    runs = [
        start(config_of(folder, *settings, f"model.share_frozen={way}"))
        for folder, way in zip(folders, ways, strict=True)
    ]
    assert [run.wait() for run in runs] == [0, 0, 0], "\n".join(run.text for run in runs)
    assert ["frozen weights shared" in run.text for run in runs] == [True, False, False]
    assert_same_bits(folders[1], folders[2])
    assert_same_bits(folders[0], folders[1])
