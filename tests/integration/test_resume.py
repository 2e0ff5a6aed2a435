"""k iterations, a resume, and the rest end in the same bits as one go, whatever lies between."""

import shutil
from pathlib import Path

import pytest

from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoint import list_checkpoints, open_checkpoint
from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.test_train import Start, checksum, config_of, pictures, results, start
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


def config_in(folder: Path) -> Config:
    prompts = folder.parent / "prompts.txt"
    colours = ("red", "blue", "green", "yellow", "purple")
    prompts.write_text("\n".join(f"a {c} circle left of a red square" for c in colours))
    return config_of(folder, f"prompts.train={prompts}", *SETTINGS)


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
