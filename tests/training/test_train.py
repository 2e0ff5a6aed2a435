"""What starting a run does to its folder; for the loop see tests/evaluation, integration."""

import ast
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ray.exceptions import RayError

from g2rpo_ray.cluster.demand import ClusterError
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.run.folder import open_run
from g2rpo_ray.run.weights import trained_kind
from g2rpo_ray.training import train as train_module
from g2rpo_ray.training.trainer import Trainer
from tests.states import write_checkpoint
from tests.tiny import tiny_config

ROOM = Path(train_module.__file__).parent
LINES, PARAMETERS = 100, 6


def test_the_whole_run_is_read_on_one_screen() -> None:
    lines = Path(train_module.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES, "training/train.py: move what a line does into training/trainer.py"


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_no_function_of_the_loop_is_handed_half_the_house(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
            assert count <= PARAMETERS, f"{path.name}: {node.name} takes {count} parameters"


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
    monkeypatch.setattr(train_module, "iterate", lambda _loop: None)
    if starts:
        train_module.train(config, resume=str(chosen))
    else:
        with pytest.raises(ClusterError):
            train_module.train(config, resume=str(chosen))
    assert there == [True]
    assert open_run(config, "auto").checkpoint == (chosen if starts else later)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        RayError("the cluster is gone"),
        ClusterError("bad input"),
        LearnerError("the gradient norm is nan"),
        RunError("a scorer"),
        ZeroDivisionError(),
        BaseException("of any kind"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("phase", ["begin", "evaluate", "generate", "save", "finish"])
def test_whatever_ends_a_run_what_is_being_written_becomes_whole(
    error: BaseException, phase: str
) -> None:
    learner, stop = MagicMock(), MagicMock()
    trainer = MagicMock(iteration=0, is_last=phase == "finish", stop=stop)
    trainer.roles.learner = learner
    trainer.let_write = lambda cause: Trainer.let_write(trainer, cause)
    trainer.learn.return_value = (MagicMock(), MagicMock())
    getattr(trainer, phase).side_effect = error
    # A state that cannot be written does not hide what ended the run.
    learner.let_write.side_effect = RunError("no room")
    with pytest.raises(type(error)) as caught:
        train_module.iterate(trainer)
    assert caught.value is error
    learner.let_write.assert_called_once()
    assert "no room; --resume auto " in trainer.session.note.call_args[0][0]


def test_a_second_signal_while_the_checkpoint_is_written_lets_it_become_whole() -> None:
    trainer = MagicMock(iteration=0)
    trainer.generate.side_effect = StopRequested(signal.SIGTERM)
    trainer.is_last = False
    trainer.save_stopped.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train_module.iterate(trainer)
    trainer.let_write.assert_called_once()
