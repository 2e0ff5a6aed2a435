"""Whole runs of adapters beside a base in 8 bits: workers, sharing and resume change no bit."""

from pathlib import Path

import pytest

from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.test_train import (
    Start,
    assert_same_bits,
    config_of,
    start,
    wait_for_an_iteration,
)

__all__ = ["start"]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

SETTINGS = (
    "model.lora.rank=4",
    "model.frozen_dtype=float8",
    "learner.learning_rate=1e-3",
    "rollout.cpus_per_worker=0.25",
    "learner.zero_stage=2",
)


def test_workers_sharing_and_a_stop_change_no_bit(start: Start, tmp_path: Path) -> None:
    one, two, stopped = (tmp_path / name for name in ("one", "two", "stopped"))
    commands = [
        start(config_of(one, *SETTINGS)),
        start(config_of(two, *SETTINGS, "rollout.workers=2", "model.share_frozen=true")),
    ]
    for command in commands:
        assert command.wait() == 0, command.text
    assert_same_bits(two, one)
    first = next(record for record in read_metrics(one) if record["kind"] == "train")
    # The rollout's numbers are the learner's, to the bit.
    assert first["policy/first_max_abs_log_ratio"] == 0
    assert first["policy/grad_norm"] > 0
    interrupted = start(config_of(stopped, *SETTINGS))
    wait_for_an_iteration(stopped, interrupted)
    interrupted.interrupt()
    assert interrupted.wait() in (0, 130), interrupted.text
    resumed = start(config_of(stopped, *SETTINGS), "--resume", "auto")
    assert resumed.wait() == 0, resumed.text
    assert_same_bits(stopped, one)
