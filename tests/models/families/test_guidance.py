"""Classifier-free guidance: two passes, counted, refused where a model takes none."""

from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from g2rpo_ray import cli
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import config_from_dict, save_config
from g2rpo_ray.doctor.checks.models import model_problems
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.memory import rollout_memory
from g2rpo_ray.plan.networks import learner_bytes, policy_size
from tests.models.families.folders import family_config
from tests.rollout.test_update import update
from tests.rollout.tiny import PlainEngine
from tests.tiny import draw_groups, encode

UNGUIDED = ("learner.unguided=true", "learner.old_log_prob=learner")


def test_the_guided_velocity_is_that_of_two_single_passes() -> None:
    config = family_config("sd3")
    (prompt,) = encode(config)[:1]
    guided, alone = load_policy(config), load_policy(config, guided=False)
    x = torch.randn(3, *guided.shape.packed, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.5, 0.1])
    with torch.no_grad():
        positive = alone(x, sigma, prompt.embeds)
        negative = alone(x, sigma, prompt.embeds.opposite)
        expected = negative + 4.5 * (positive - negative)
        torch.testing.assert_close(guided(x, sigma, prompt.embeds), expected)
    assert not torch.allclose(expected, positive)


def test_without_a_negative_prompt_nothing_is_guided_in_silence() -> None:
    config = family_config("sd3")
    (prompt,) = encode(config)[:1]
    policy = load_policy(config)
    x = torch.zeros(1, *policy.shape.packed)
    with pytest.raises(ValueError, match="no negative one"):
        policy(x, torch.ones(1), replace(prompt.embeds, negative=None))


def test_the_negative_prompt_goes_along_to_the_device() -> None:
    (prompt,) = encode(family_config("sd3"))[:1]
    moved = prompt.embeds.to(torch.device("meta"))
    assert moved.opposite.device == moved.device == torch.device("meta")


@pytest.mark.parametrize(
    ("name", "guidance", "negative", "words"),
    [
        ("flux1_schnell", 3.5, "", "sampling.guidance is 3.5, and this FluxPipeline was distilled"),
        ("flux1_schnell", 1.0, "blurry", "is not guided by one; leave it out"),
        ("flux1_dev", 3.5, "blurry", "sampling.negative_prompt is 'blurry'"),
        ("sd3", 1.0, "blurry", "guidance 1 is the conditional pass alone; use more than 1"),
    ],
)
def test_what_does_not_fit_the_model_is_said_before_anything_starts(
    name: str, guidance: float, negative: str, words: str
) -> None:
    config = family_config(name, f"sampling.guidance={guidance}", negative_prompt=negative)
    # Of train, sample, evaluate, doctor, embed and export; and of plan.
    for check in (check_model, policy_size):
        with pytest.raises(ModelFolderError) as caught:
            check(config)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "command",
    ["train CONFIG", "plan CONFIG", "embed CONFIG prompts --out RUN/out", "sample RUN --prompt x",
     "evaluate RUN", "export RUN --to RUN/out"],
)  # fmt: skip
def test_every_command_says_it_and_starts_nothing(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.chdir(tmp_path)
    config = family_config("flux1_schnell", "sampling.guidance=3.5", run_dir=tmp_path)
    save_config(config, tmp_path / "config.yaml")
    words = command.replace("CONFIG", "config.yaml").replace("RUN", str(tmp_path))
    assert cli.main(words.split()) == 2
    assert "was distilled to take none; set sampling.guidance: 1" in capsys.readouterr().err
    (problem,) = model_problems(config)
    assert "was distilled to take none" in problem


def test_both_passes_are_counted() -> None:
    guided = policy_size(family_config("sd3"))
    alone = policy_size(family_config("sd3", "sampling.guidance=1", negative_prompt=""))
    assert (guided.passes, alone.passes) == (2, 1)
    assert guided.evaluation.matrix == 2 * alone.evaluation.matrix
    assert guided.evaluation.attention == 2 * alone.evaluation.attention


def test_a_learner_without_guidance_makes_half_the_passes() -> None:
    settings = ("model.lora.rank=1", "model.gradient_checkpointing=true")
    config = family_config("sd3", *settings, *UNGUIDED)
    both, one = policy_size(family_config("sd3", *settings)), policy_size(config)
    assert (one.passes, one.learner_passes, both.learner_passes) == (2, 1, 2)
    assert one.learner_tflop == pytest.approx(both.learner_tflop / 2)
    assert learner_bytes(family_config("sd3", *settings)) > 1.5 * learner_bytes(config)
    costs = load_costs().of("H100")
    assert rollout_memory(config, one, costs) == rollout_memory(config, both, costs)


def test_a_learner_without_guidance_starts_from_a_ratio_of_one_and_learns() -> None:
    config = family_config("sd3", *UNGUIDED, "learner.update=per_sde_step")
    groups = draw_groups(config, encode(config)[:1])
    engine = PlainEngine(load_policy(config, guided=False))
    report = update(engine, groups, config)
    first = [record for record in report.records if record.update == 0]
    assert max(record.health.max_abs_log_ratio for record in first) == 0.0
    assert all(torch.tensor(record.loss).isfinite() for record in report.records)
    assert min(report.grad_norms) > 0


def test_a_learner_without_guidance_needs_its_own_old_log_probs() -> None:
    tree = family_config("sd3").model_dump()
    tree["learner"]["unguided"] = True
    with pytest.raises(InputError, match="set old_log_prob: learner"):
        config_from_dict(tree, source="test")


def test_there_is_no_guidance_to_leave_out_of_one_pass() -> None:
    with pytest.raises(ModelFolderError, match="there is no other to leave out"):
        check_model(family_config("flux1_dev", *UNGUIDED))
