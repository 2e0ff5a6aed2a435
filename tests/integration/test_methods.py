"""Whole runs of the newer methods: one worker, or a resume on two, ends in the same bits."""

import shutil
from pathlib import Path

import pytest
import torch

from g2rpo_ray.config import load_config
from g2rpo_ray.learner.checkpoints.folders import list_checkpoints
from g2rpo_ray.learner.checkpoints.format import open_checkpoint, read_weights
from g2rpo_ray.run.weights import weights_in
from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.test_train import Start, assert_same_bits, config_of, start
from tests.tiny import equal_weights

__all__ = ["start"]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

METHODS = {
    "e_grpo": ["e_grpo.first=3", "e_grpo.entropy_threshold=3.0", "learner.update=per_sde_step"],
    "diffusion_nft": [
        "diffusion_nft.times_per_picture=2",
        "diffusion_nft.decay_rate=0.2",
        "learner.updates_per_iteration=2",
        "model.lora.rank=4",
        "learner.learning_rate=1e-3",
    ],
}


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_resume_on_two_workers_ends_in_the_bits_of_one(
    start: Start, tmp_path: Path, algorithm: str
) -> None:
    settings = [
        f"algorithm={algorithm}",
        *METHODS[algorithm],
        "iterations=4",
        "checkpoint.every=2",
        "checkpoint.keep_last=9",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    first = start(config_of(whole, *settings))
    assert first.wait() == 0, first.text
    shutil.copytree(whole, resumed)
    shutil.rmtree(list_checkpoints(resumed)[-1])
    (resumed / "summary.json").unlink()
    two = ["rollout.workers=2", "rollout.cpus_per_worker=0.25"]
    second = start(config_of(resumed, *settings, *two), "--resume", "auto")
    assert second.wait() == 0, second.text
    assert_same_bits(resumed, whole)
    states = [dict(open_checkpoint(list_checkpoints(d)[-1])[1]) for d in (whole, resumed)]
    assert equal_weights(*states)
    trained = [record for record in read_metrics(whole) if record["kind"] == "train"]
    # Two merged steps of the three; two halves of the members.
    assert [record["policy/updates"] for record in trained] == [2] * 4
    if algorithm == "e_grpo":
        assert all(record["policy/first_max_abs_log_ratio"] < 1e-5 for record in trained)
        return
    # What the checkpoint's name means is the policy that drew and was judged: not the trained one.
    config, checkpoint = load_config(whole / "config.yaml"), list_checkpoints(whole)[-1]
    drawing, training = weights_in(config, checkpoint), read_weights(checkpoint)
    average = read_weights(checkpoint, average=True)
    assert equal_weights(drawing, average)
    assert not any(torch.equal(drawing[name], training[name]) for name in drawing)
