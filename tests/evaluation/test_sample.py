"""``g2rpo sample`` saves no picture that the weights did not really give."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.cli import main
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation import sample as sample_module
from g2rpo_ray.evaluation.sample import SampleOptions, sample
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.run.weights import SampleError
from tests.states import make_run
from tests.tiny import CAPTIONS, QUICKSTART, tiny_config


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
        list(sample(tiny_config(tmp_path / "run"), options, tmp_path / "out"))
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
    list(sample(config, SampleOptions(["a cat"], checkpoint="base"), out))
    assert "cut" not in capsys.readouterr().err
    with pytest.raises(ModelFolderError, match=r"^evaluation.height is 40"):
        list(sample(tiny_config(tmp_path, "evaluation.height=40"), SampleOptions(["a cat"]), out))


def test_a_file_is_no_prompt(tmp_path: Path) -> None:
    prompts = [CAPTIONS[0], str(tmp_path / "prompts.txt"), "x" * 5000]
    (tmp_path / "prompts.txt").write_text("a cat")
    with pytest.raises(SampleError, match=r"--prompt .*prompts\.txt: it takes the text itself"):
        list(sample(tiny_config(tmp_path / "run"), SampleOptions(prompts), tmp_path / "out"))


def test_a_folder_that_cannot_be_is_named_by_its_option(tmp_path: Path) -> None:
    """Also to the check of its disk's room, which comes first."""
    out = tmp_path / ("x" * 300)
    with pytest.raises(SampleError, match=r"^--out .*: cannot be written: .*File name too long"):
        list(sample(tiny_config(tmp_path / "run"), SampleOptions(CAPTIONS[:1]), out))


@pytest.mark.parametrize("prompt", ["", " \n", "\u200b\ufeff"])
def test_an_empty_prompt_is_refused(
    prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--checkpoint", "base", "--prompt", "a cat", f"--prompt={prompt}"]
    assert main(["sample", str(QUICKSTART), *words, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told == (
        f"g2rpo: --prompt {prompt!r}: the prompt is empty: write what the picture shall show\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("trained_steps", [None, 1])
def test_what_is_held_does_not_grow_with_the_number_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_steps: int | None
) -> None:
    def tensors() -> dict[int, Tensor]:
        return {id(it): it for it in gc.get_objects() if type(it) is torch.Tensor}

    held: list[int] = []
    others = tensors()  # of tests before this one, in the same process

    class Watched(sample_module.PictureDecoder):
        def decode(self, latents: Tensor) -> Tensor:
            own = [it for number, it in tensors().items() if number not in others]
            alike = [it for it in own if it.shape[-2:] == latents.shape[-2:]]
            held.append(sum(it.nbytes for it in alike) // latents[0].nbytes)
            return super().decode(latents)

    monkeypatch.setattr(sample_module, "PictureDecoder", Watched)
    config = tiny_config(tmp_path / "run", "rollout.batch_size=2")
    most = {}
    for count in (2, 12):
        options = SampleOptions(CAPTIONS[:2], count, checkpoint="base", trained_steps=trained_steps)
        assert len(list(sample(config, options, tmp_path / str(count)))) == 2 * count
        most[count] = max(held)
        held.clear()
    assert most[12] <= most[2] <= 4


@pytest.mark.parametrize("trained_steps", [None, 1])
def test_pictures_that_are_drawn_in_parts_are_those_of_one_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trained_steps: int | None
) -> None:
    drawn = {}
    for rows in (2, 8):
        config, out = tiny_config(tmp_path, f"rollout.batch_size={rows}"), tmp_path / str(rows)
        options = SampleOptions(
            CAPTIONS[:2], 5, seed=3, checkpoint="base", trained_steps=trained_steps
        )
        paths = list(sample(config, options, out))
        assert [path.name for path in paths] == [f"{p}_{n}.png" for p in (0, 1) for n in range(5)]
        drawn[rows] = [np.asarray(Image.open(path)).astype(int) for path in paths]
        told = capsys.readouterr().err
        assert "(rollout.gpus_per_worker is 0); pictures: 10, up to 164 kB\n" in told
        # Told after the first part, of two walks or one.
        first = 2 if trained_steps is None else 0
        assert (f"{first} of 10 pictures, " in told) == (rows == 2 or trained_steps is not None)
    # In a batch of another size, results round differently.
    for parts, whole in zip(drawn[2], drawn[8], strict=True):
        assert np.abs(parts - whole).max() <= 1
    assert all(np.abs(drawn[2][0] - other).max() > 10 for other in drawn[2][1:])


@pytest.mark.parametrize("kind", [[], ["model.lora={rank: 4, alpha: 10.0}"]])
def test_another_runs_folder_stands_for_its_last_checkpoint(
    tmp_path: Path, kind: list[str]
) -> None:
    make_run(other := tmp_path / "other", *kind)
    mine = tiny_config(tmp_path / "mine", "sampling.steps=4", "evaluation.steps=4", *kind)
    drawn = []
    for checkpoint in (other, checkpoint_folder(other, 7)):
        options = SampleOptions(CAPTIONS[:1], checkpoint=str(checkpoint), trained_steps=2)
        (path,) = sample(mine, options, tmp_path / checkpoint.name)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
