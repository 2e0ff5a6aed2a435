"""Ranks that were given up and still reach the storage change nothing of those in their place."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.learner.checkpoints import fence as fence_module
from g2rpo_ray.learner.checkpoints.fence import Fence, FencedError
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder, delete_old_checkpoints
from g2rpo_ray.learner.checkpoints.format import (
    CheckpointInfo,
    commit_checkpoint,
    open_checkpoint,
    prepare_checkpoint,
    write_rank,
)
from tests.states import whole_parts


def info_of(iteration: int) -> CheckpointInfo:
    return CheckpointInfo(iteration, iteration, iteration, 0, 0.0, "full", 0)


def begin(run_dir: Path, iteration: int, value: float, fence: Fence) -> Path:
    folder = checkpoint_folder(run_dir, iteration)
    state = {f"{kind}.a": torch.full((4,), value) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    prepare_checkpoint(folder, fence=fence)
    write_rank(folder, 0, whole_parts(state), fence)
    return folder


def commit(folder: Path, iteration: int, fence: Fence) -> None:
    commit_checkpoint(folder, info_of(iteration), 1, 0.0, fence)


def cut_off_rank(run_dir: Path, pipe: Connection) -> None:
    """Rank 0 of a node that loses touch while it writes iteration 5, and wakes up later."""
    fence = Fence(run_dir).following()
    commit(begin(run_dir, 4, 4.0, fence), 4, fence)
    five = begin(run_dir, 5, -5.0, fence)
    pipe.send("cut off")
    pipe.recv()
    tried = {
        "commit": lambda: commit(five, 5, fence),
        "delete": lambda: _delete(run_dir, five, fence),
        "prepare": lambda: prepare_checkpoint(five, fence=fence),
        "rebuild": lambda: fence.following(),
    }
    answers = {}
    for name, call in tried.items():
        try:
            call()
            answers[name] = "done"
        except Exception as error:  # noqa: BLE001  (the test's own process looks at it)
            answers[name] = f"{type(error).__name__}: {error}"
    pipe.send(answers)


def _delete(run_dir: Path, newest: Path, fence: Fence) -> None:
    with fence.held():
        delete_old_checkpoints(run_dir, 1, newest)


def test_an_old_rank_0_neither_replaces_nor_deletes_what_newer_ones_wrote(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("spawn")
    mine, theirs = processes.Pipe()
    old = processes.Process(target=cut_off_rank, args=(tmp_path, theirs))
    old.start()
    assert mine.poll(300)
    assert mine.recv() == "cut off"
    new = Fence(tmp_path).following()
    for iteration in (5, 6):
        commit(begin(tmp_path, iteration, float(iteration), new), iteration, new)
    half = begin(tmp_path, 7, 7.0, new)
    mine.send("go on")
    assert mine.poll(300)
    answers = mine.recv()
    old.join()
    fenced = f"FencedError: {tmp_path}: the learner's generation 2 has begun, and this is 1"
    assert all(text.startswith(fenced) for text in answers.values()), answers
    commit(half, 7, new)
    for iteration in (4, 5, 6, 7):
        info, state = open_checkpoint(checkpoint_folder(tmp_path, iteration))
        assert info.iteration == iteration
        assert state["weight.a"].tolist() == [float(iteration)] * 4
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def hold(run_dir: Path, pipe: Connection) -> None:
    fence = Fence(run_dir).following()
    with fence.held():
        pipe.send("holds it")
        time.sleep(1.0)
        (run_dir / "deleted by the old one").touch()


def test_a_new_generation_waits_until_a_deletion_under_way_has_ended(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("spawn")
    mine, theirs = processes.Pipe()
    old = processes.Process(target=hold, args=(tmp_path, theirs))
    old.start()
    assert mine.poll(300)
    assert mine.recv() == "holds it"
    assert Fence(tmp_path).following().generation == 2
    assert (tmp_path / "deleted by the old one").exists()
    old.join()


def test_a_rank_that_stands_still_does_not_hold_up_those_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_module, "WAIT_S", 0.3)
    old = Fence(tmp_path).following()
    with old.held():
        assert Fence(tmp_path).following().generation == 2
    with pytest.raises(FencedError), old.held():
        pass


@pytest.mark.parametrize("meanwhile", ["writes", "deletes"])
def test_what_older_ranks_still_write_or_delete_does_not_stop_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    half = begin(tmp_path, 5, -5.0, Fence(tmp_path).following())
    (left_over,) = half.parent.glob(".iteration_*")
    rmdir = os.rmdir

    def slow_rmdir(path: Any, **options: Any) -> None:
        if Path(path).name == left_over.name:
            monkeypatch.setattr(os, "rmdir", rmdir)
            (left_over / "late").touch() if meanwhile == "writes" else left_over.rmdir()
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", slow_rmdir)
    new = Fence(tmp_path).following()
    commit(begin(tmp_path, 5, 5.0, new), 5, new)
    assert open_checkpoint(half)[1]["weight.a"].tolist() == [5.0] * 4
