"""A whole run of every family: trained, killed, resumed, evaluated, drawn from and exported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.sample import SampleOptions, sample
from g2rpo_ray.learner.checkpoints.folders import list_checkpoints
from g2rpo_ray.models.families import open_family
from g2rpo_ray.run.export import export
from tests.integration.command import TIMEOUT_S, python_path, wait_until
from tests.integration.test_train import Start, assert_same_bits, start
from tests.models.families.folders import TINY, family_config, tiny_folder
from tests.tiny import CAPTIONS

__all__ = ["start"]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


def run_config(name: str, run_dir: Path, workers: int = 1) -> Config:
    return family_config(
        name,
        "iterations=4",
        "model.lora.rank=2",
        "learner.learning_rate=1e-2",
        f"rollout.workers={workers}",
        "rollout.cpus_per_worker=0.25",
        "learner.ranks=1",
        "checkpoint.every=1",
        "evaluation.every=2",
        run_dir=run_dir,
    )


def draw(config: Config, checkpoint: str, folder: Path) -> np.ndarray:
    (path,) = sample(config, SampleOptions(CAPTIONS[:1], checkpoint=checkpoint), folder)
    return np.asarray(Image.open(path)).astype(int)


@pytest.mark.parametrize("name", TINY)
def test_a_whole_run(start: Start, name: str, tmp_path: Path) -> None:
    config, killed = run_config(name, tmp_path / "whole"), run_config(name, tmp_path / "killed", 2)
    whole, cut = start(config), start(killed)
    wait_until(
        lambda: bool(list_checkpoints(tmp_path / "killed")) or cut.process.poll() is not None,
        "a first checkpoint",
    )
    cut.kill()
    resumed = start(killed, "--resume", "auto")
    for command in (whole, resumed):
        assert command.wait() == 0, command.text
        assert command.left_over() == []
    # By two workers and through a kill, as by one in one go.
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")

    table = evaluated(tmp_path / "whole", tmp_path / "evaluation")
    assert f"guidance {config.sampling.guidance:g}" in table
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert export(config, adapter).form == "adapter"
    assert export(config, merged, layout="merged").form == "merged"
    check_adapter(name, adapter, merged)

    trained, base = (draw(config, which, tmp_path / which) for which in ("last", "base"))
    assert np.abs(trained - base).max() > 0
    folder = Path(shutil.copytree(tiny_folder(name), tmp_path / "model"))
    for file in merged.glob("*.safetensors"):
        shutil.copyfile(file, folder / "transformer" / file.name)
    of_merged = draw(
        config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})}),
        "base",
        tmp_path / "of_merged",
    )
    # Merged and beside each other round differently.
    assert np.abs(trained - of_merged).max() <= 1


def check_adapter(name: str, adapter: Path, merged: Path) -> None:
    """The family's own pipeline makes the merged transformer of it."""
    family = open_family(tiny_folder(name))
    pipeline = family.pipeline_class.from_pretrained(tiny_folder(name), torch_dtype=torch.float32)
    pipeline.load_lora_weights(adapter)
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
    network = type(pipeline.transformer)
    expected = network.from_pretrained(merged, torch_dtype=torch.float32).state_dict()
    found = pipeline.transformer.state_dict()
    base = network.from_pretrained(tiny_folder(name) / "transformer").state_dict()
    assert found.keys() == expected.keys()
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor])
    assert any(not torch.equal(found[tensor], base[tensor]) for tensor in base)


def evaluated(run_dir: Path, out: Path) -> str:
    """The table of ``g2rpo evaluate``, with a Ray of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-m", "g2rpo_ray.cli", "evaluate", str(run_dir), "--steps", "3"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        env=environment | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (out / "table.md").read_text()
