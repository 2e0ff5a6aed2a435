"""What starting a run does to its folder; for the loop see tests/evaluation, integration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from g2rpo_ray.cluster.demand import ClusterError
from g2rpo_ray.learner.checkpoints.files import CheckpointInfo, write_checkpoint
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.run.folder import open_run
from g2rpo_ray.run.weights import trained_kind
from g2rpo_ray.training import train as train_module
from tests.tiny import tiny_config


@pytest.mark.parametrize("starts", [True, False])
def test_a_resumed_path_gives_up_what_came_later_once_everything_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    config = tiny_config(tmp_path / "run", "iterations=10", "pipeline=one_step_off")
    kind = trained_kind(config.model)
    chosen, later = (checkpoint_folder(tmp_path / "run", n) for n in (3, 4))
    for number, folder in ((3, chosen), (4, later)):
        info = CheckpointInfo(number, number, number, 0, 0.0, kind, config.seed)
        write_checkpoint(folder, info, {"weight.a": torch.ones(2), "exp_avg.a": torch.ones(2)})
    there: list[bool] = []

    @contextmanager
    def launch(*_: object) -> Iterator[Any]:
        there.append(later.exists())
        if not starts:
            raise ClusterError("no room")
        yield MagicMock()

    monkeypatch.setattr(train_module, "launch", launch)
    monkeypatch.setattr("g2rpo_ray.training.one_step_off.OneStepOffLoop", MagicMock())
    if starts:
        train_module.train(config, resume=str(chosen))
    else:
        with pytest.raises(ClusterError):
            train_module.train(config, resume=str(chosen))
    assert there == [True]
    assert open_run(config, "auto").checkpoint == (chosen if starts else later)
