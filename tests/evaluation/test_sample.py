"""``g2rpo sample`` saves no picture that the weights did not really give."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.sample import SampleOptions, sample
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.run.weights import SampleError
from tests.tiny import CAPTIONS, tiny_config


def broken_policy(config: Config) -> Policy:
    policy = load_policy(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(torch.nan)
    return policy


def test_latents_that_are_not_finite_are_an_error_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g2rpo_ray.run.weights.load_policy", broken_policy)
    options = SampleOptions(CAPTIONS[:1], pictures_per_prompt=2, checkpoint="base")
    with pytest.raises(SampleError, match=r"2 of 2 pictures .* prompt 'a red circle left"):
        sample(tiny_config(tmp_path / "run"), options, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_drawn_has_the_evaluations_size_and_what_is_cut_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["evaluation.height=48", "prompts.max_sequence_length=8"]
    config, out = tiny_config(tmp_path / "run", *settings), tmp_path / "out"
    (path,) = sample(config, SampleOptions(CAPTIONS[:1], checkpoint="base"), out)
    assert Image.open(path).size == (64, 48)
    told = capsys.readouterr().err
    assert "drawing 64 x 48 pixels (evaluation.width, evaluation.height) on: " in told
    assert told.count("the prompt is cut: ") == 1
    sample(config, SampleOptions(["a cat"], checkpoint="base"), out)
    assert "cut" not in capsys.readouterr().err
    with pytest.raises(ModelFolderError, match=r"^evaluation.height is 40"):
        sample(tiny_config(tmp_path, "evaluation.height=40"), SampleOptions(["a cat"]), out)


def test_a_file_is_no_prompt(tmp_path: Path) -> None:
    prompts = [CAPTIONS[0], str(tmp_path / "prompts.txt"), "x" * 5000]
    (tmp_path / "prompts.txt").write_text("a cat")
    with pytest.raises(SampleError, match=r"--prompt .*prompts\.txt: it takes the text itself"):
        sample(tiny_config(tmp_path / "run"), SampleOptions(prompts), tmp_path / "out")
