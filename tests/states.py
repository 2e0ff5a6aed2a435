"""States of the learner that one process holds and writes alone."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from g2rpo_ray.learner.checkpoints.format import (
    CheckpointInfo,
    commit_checkpoint,
    prepare_checkpoint,
    write_rank,
)
from g2rpo_ray.learner.checkpoints.parts import StatePart


def whole_parts(state: Mapping[str, Tensor]) -> list[StatePart]:
    """A state that one rank holds completely."""
    return [StatePart(key, tuple(t.shape), 0, t.flatten()) for key, t in state.items()]


def write_checkpoint(folder: Path, info: CheckpointInfo, state: Mapping[str, Tensor]) -> None:
    """Write a whole state, replacing nothing on failure."""
    prepare_checkpoint(folder)
    write_rank(folder, 0, whole_parts(state))
    commit_checkpoint(folder, info, ranks=1, timeout_s=0.0)
