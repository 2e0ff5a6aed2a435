"""A whole run of adapters whose roles share frozen weights, against one whose roles do not."""

import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_train import (
    Start,
    assert_same_bits,
    config_of,
    start,
    wait_for_an_iteration,
)

__all__ = ["start"]

pytestmark = pytest.mark.usefixtures("ray_cluster")

SETTINGS = (
    "model.lora.rank=4",
    "learner.learning_rate=1e-3",
    "evaluation.every=1",
    "evaluation.workers=1",
    "rollout.cpus_per_worker=0.25",
)


@pytest.mark.long
def test_a_run_that_shares_and_loses_its_holder_ends_in_the_same_bits(
    start: Start, tmp_path: Path
) -> None:
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    first = start(config_of(apart, *SETTINGS))
    second = start(config_of(shared, *SETTINGS, "model.share_frozen=true"))
    wait_for_an_iteration(shared, second)
    titles = {
        int(process.name): process.joinpath("cmdline").read_bytes()
        for process in second.processes()
    }
    (holder,) = [pid for pid, title in titles.items() if title.startswith(b"ray::FrozenHolder")]
    os.kill(holder, signal.SIGKILL)
    assert (first.wait(), second.wait()) == (0, 0), first.text + second.text
    assert "frozen weights shared" not in first.text
    # A worker, one that evaluates, and a rank: each at the start, and again with a new holder.
    assert second.text.count("frozen weights shared with its card's other roles") >= 3
    assert "rebuilding the learner" in second.text
    assert "(holder 2: the one before ended, and its roles with it)" in second.text
    assert_same_bits(shared, apart)
    assert first.left_over() == second.left_over() == []


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
