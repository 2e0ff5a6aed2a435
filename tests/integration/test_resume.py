"""k iterations, a resume, and the rest end in the same bits as one go, whatever lies between."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.folders import list_checkpoints
from g2rpo_ray.learner.checkpoints.format import open_checkpoint
from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.command import python_path, wait_until
from tests.integration.test_train import (
    Start,
    checksum,
    config_of,
    pictures,
    results,
    start,
    trained_iterations,
)
from tests.tiny import equal_weights

__all__ = ["start"]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

ITERATIONS, RESUMED_AT = 5, 2
SETTINGS = [
    f"iterations={ITERATIONS}",
    # Epochs of five prompts end inside an iteration before and after the resume.
    "sampling.prompts_per_iteration=2",
    # The window moves in every iteration, and every one of its steps is an update of its own.
    "algorithm=mix_grpo",
    "mix_grpo.window=2",
    "mix_grpo.shift_interval=1",
    "learner.update=per_sde_step",
    "learner.ranks=2",
    "learner.schedule=cosine",
    "learner.decay_updates=12",
    "learner.ema_decay=0.9",
    "model.lora.rank=4",
    "learner.learning_rate=1e-3",
    f"checkpoint.every={RESUMED_AT}",
    "checkpoint.keep_last=9",
]


def config_in(folder: Path, *overrides: str) -> Config:
    prompts = folder.parent / "prompts.txt"
    colours = ("red", "blue", "green", "yellow", "purple")
    prompts.write_text("\n".join(f"a {c} circle left of a red square" for c in colours))
    return config_of(folder, f"prompts.train={prompts}", *SETTINGS, *overrides)


def test_a_resume_across_epochs_windows_and_updates_changes_no_bit(
    start: Start, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    first = start(config_in(whole))
    assert first.wait() == 0, first.text
    shutil.copytree(whole, resumed)
    for checkpoint in list_checkpoints(resumed)[1:]:
        shutil.rmtree(checkpoint)
    (resumed / "summary.json").unlink()
    assert [path.name for path in list_checkpoints(resumed)] == [f"iteration_{RESUMED_AT:06d}"]

    second = start(config_in(resumed), "--resume", "auto")
    assert second.wait() == 0, second.text
    assert results(resumed) == results(whole)
    assert pictures(resumed) == pictures(whole)
    assert checksum(resumed) == checksum(whole)
    states = [dict(open_checkpoint(list_checkpoints(d)[-1])[1]) for d in (whole, resumed)]
    assert any(key.startswith("ema.") for key in states[0])
    assert equal_weights(*states)
    updates = [r["policy/updates"] for r in read_metrics(resumed) if r["kind"] == "train"]
    assert updates == [2] * ITERATIONS


def slow_disk(folder: Path) -> dict[str, str]:
    """Environment in which every flush of every process takes a second, and a start as well."""
    code = "import os, time\nflush = os.fsync\nos.fsync = lambda file: (time.sleep(1), flush(file))"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": python_path(folder)}


def half_written(run_dir: Path, iteration: int) -> set[str]:
    """Folders of a state under way, one for each generation of ranks."""
    pattern = f".iteration_{iteration:06d}.*.writing"
    return {path.name for path in (run_dir / "checkpoints").glob(pattern)}


def test_a_write_that_is_killed_or_waited_for_changes_no_bit(start: Start, tmp_path: Path) -> None:
    """SIGKILL of everything in the middle of a write; then Ctrl-C in the middle of another."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    undisturbed = start(config_in(whole))
    assert undisturbed.wait() == 0, undisturbed.text

    slow = slow_disk(tmp_path / "slow")
    config = config_in(run_dir, "checkpoint.snapshot_every=0")
    checkpoints = run_dir / "checkpoints"
    halves = partial(half_written, run_dir, 2 * RESUMED_AT)
    killed = start(config, **slow)
    wait_until(lambda: bool(halves()) or killed.process.poll() is not None, "a write")
    killed.kill()
    left_over = halves()
    assert left_over, killed.text
    assert [path.name for path in list_checkpoints(run_dir)] == [f"iteration_{RESUMED_AT:06d}"]

    # The same write again, now with time to end: the update after it goes on meanwhile.
    stopped = start(config, "--resume", "auto", **slow)
    wait_until(
        lambda: bool(halves() - left_over) or stopped.process.poll() is not None, "the write again"
    )
    stopped.interrupt()
    assert stopped.wait() == 130, stopped.text
    done = trained_iterations(run_dir)
    assert list_checkpoints(run_dir)[-1].name == f"iteration_{done:06d}"
    assert [path for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    assert stopped.left_over() == []

    if done < ITERATIONS:
        resumed = start(config, "--resume", "auto")
        assert resumed.wait() == 0, resumed.text
    assert checksum(run_dir) == checksum(whole)
    assert results(run_dir) == results(whole)
    states = [dict(open_checkpoint(list_checkpoints(d)[-1])[1]) for d in (whole, run_dir)]
    assert equal_weights(*states)
