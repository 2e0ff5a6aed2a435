"""States of the learner that one process holds and writes alone."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from g2rpo_ray.config import Config, save_config
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import (
    CheckpointInfo,
    commit_checkpoint,
    prepare_checkpoint,
    write_rank,
)
from g2rpo_ray.learner.checkpoints.parts import StatePart
from g2rpo_ray.maths import noise
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.weights import trainable_parameters
from tests.tiny import tiny_config


def whole_parts(state: Mapping[str, Tensor]) -> list[StatePart]:
    """A state that one rank holds completely."""
    return [StatePart(key, tuple(t.shape), 0, t.flatten()) for key, t in state.items()]


def write_checkpoint(folder: Path, info: CheckpointInfo, state: Mapping[str, Tensor]) -> None:
    """Write a whole state, replacing nothing on failure."""
    prepare_checkpoint(folder)
    write_rank(folder, 0, whole_parts(state))
    commit_checkpoint(folder, info, ranks=1, timeout_s=0.0)


def make_run(run_dir: Path, *overrides: str, moved: float = 0.02) -> Config:
    """A run with one checkpoint, whose weights are some way from the base model's."""
    config = tiny_config(run_dir, "sampling.steps=4", "evaluation.steps=4", *overrides)
    state: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(load_policy(config)).items():
        change = noise.normal(tuple(parameter.shape), "trained", name) * moved
        state[f"weight.{name}"] = parameter.detach().float() + change
        state[f"ema.{name}"] = parameter.detach().float() + change / 2
        state |= {f"{m}.{name}": torch.zeros_like(change) for m in ("exp_avg", "exp_avg_sq")}
    kind = "full" if config.model.lora is None else "lora rank 4 alpha 10"
    folder = checkpoint_folder(run_dir, 7)
    write_checkpoint(folder, CheckpointInfo(7, 7, 7, 100, 1.0, kind, config.seed), state)
    save_config(config, run_dir / "config.yaml")
    return config
