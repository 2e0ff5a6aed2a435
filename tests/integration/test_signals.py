"""SIGTERM to more than the driver: what schedulers and service managers send."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from g2rpo_ray.learner.checkpoints.folders import list_checkpoints
from tests.integration.command import Command
from tests.integration.test_train import (
    Start,
    config_of,
    start,
    trained_iterations,
    wait_for_an_iteration,
)

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def group(command: Command) -> None:
    """As ``timeout`` does: to the child, and to the process group that has it."""
    os.kill(command.process.pid, signal.SIGTERM)
    os.killpg(command.process.pid, signal.SIGTERM)


def cgroup(command: Command) -> None:
    """As systemd and Slurm do: to every process of the unit or job."""
    for path in command.processes():
        with suppress(ProcessLookupError):
            os.kill(int(path.name), signal.SIGTERM)


@pytest.mark.parametrize("terminate", [group, pytest.param(cgroup, marks=pytest.mark.long)])
def test_a_sigterm_to_every_process_leaves_a_checkpoint(
    terminate: Callable[[Command], None], start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    scorer = {
        "kind": "python",
        "options": {"target": "tests.rewards.fakes:ParentScorer"},
        "cpus_per_replica": 0.1,
        "retries": 0,
    }
    stopped = start(config_of(run_dir, "iterations=50", parent=scorer))
    wait_for_an_iteration(run_dir, stopped)
    terminate(stopped)
    assert stopped.wait() == 85, stopped.text
    assert "--resume auto continues from there" in stopped.text
    assert "Traceback" not in stopped.text
    done = trained_iterations(run_dir)
    assert [path.name for path in list_checkpoints(run_dir)] == [f"iteration_{done:06d}"]
    assert stopped.left_over() == []
