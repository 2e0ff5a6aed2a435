"""What no family can be trained on: said by ``g2rpo train`` in words, before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from g2rpo_ray import cli
from g2rpo_ray.config import save_config
from g2rpo_ray.models.families import FAMILIES, open_family
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.saving import adapter_tensors, save_adapter
from g2rpo_ray.models.weights import trainable_parameters
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.plan import as_text, make_plan
from tests.models.families.folders import TINY, family_config, tiny_folder
from tests.prompts.test_negative_prompt import embed

Failed = Callable[..., str]


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Failed:
    """What ``g2rpo train`` says of settings that it refuses; starting Ray is a failure."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", start)

    def train(name: str, *overrides: str, negative: str | None = None) -> str:
        run_dir = tmp_path / "run"
        config = family_config(name, *overrides, run_dir=run_dir, negative_prompt=negative)
        save_config(config, tmp_path / "settings.yaml")
        assert cli.main(["train", str(tmp_path / "settings.yaml")]) == 2
        assert not run_dir.exists()
        return capsys.readouterr().err

    return train


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(tiny_folder(name), tmp_path / name))


@pytest.mark.parametrize("name", TINY)
def test_a_pipeline_without_a_family(failed: Failed, copied: Any, name: str) -> None:
    folder = copied(name)
    change(folder / "model_index.json", _class_name="KolorsPipeline")
    found = failed(name, f"model.path={folder}")
    assert f"{folder}/model_index.json: _class_name is 'KolorsPipeline'" in found
    assert all(family.pipeline in found for family in FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_another_scheduler(failed: Failed, copied: Any, name: str) -> None:
    folder = copied(name)
    file = folder / "scheduler" / "scheduler_config.json"
    change(file, _class_name="EulerAncestralDiscreteScheduler")
    found = failed(name, f"model.path={folder}")
    assert f"{file}: _class_name is EulerAncestralDiscreteScheduler" in found
    assert "put the published folder's scheduler there" in found


@pytest.mark.parametrize(
    "values",
    [{"shift": "three"}, {"shift": 0}, {"use_dynamic_shifting": True, "base_shift": None},
     {"use_dynamic_shifting": True, "max_image_seq_len": 256, "base_image_seq_len": 256}],
)  # fmt: skip
def test_a_scheduler_that_gives_no_schedule(
    failed: Failed, copied: Any, values: dict[str, object]
) -> None:
    folder = copied("z_image")
    file = folder / "scheduler" / "scheduler_config.json"
    change(file, **values)
    found = failed("z_image", f"model.path={folder}")
    assert "scheduler/scheduler_config.json of model.path gives no schedule from 1" in found


@pytest.mark.parametrize("name", TINY)
def test_a_missing_text_encoder(failed: Failed, copied: Any, name: str) -> None:
    folder = copied(name)
    for part in open_family(folder).encoder_parts:
        hidden = (folder / part).rename(folder / "hidden")
        assert f"{folder}: part '{part}' is missing" in failed(name, f"model.path={folder}")
        hidden.rename(folder / part)


@pytest.mark.parametrize("name", ["flux1_schnell", "flux2_klein_distilled"])
def test_guidance_of_a_model_that_takes_none(failed: Failed, name: str) -> None:
    found = failed(name, "sampling.guidance=4")
    assert "sampling.guidance is 4, and this" in found
    assert "was distilled to take none; set sampling.guidance: 1" in found


@pytest.mark.parametrize("name", TINY)
def test_a_negative_prompt_where_no_guidance_is(failed: Failed, name: str) -> None:
    guidance = open_family(tiny_folder(name)).unguided
    found = failed(name, f"sampling.guidance={guidance}", negative="blurry")
    assert "sampling.negative_prompt is 'blurry', and " in found
    assert "leave it out" in found


@pytest.mark.parametrize(
    ("name", "most"),
    # Of Z-Image's table of 640 places, after 0, texts take a multiple of 32, the picture one.
    [("flux1_dev", 512), ("sd3", 512), ("qwen_image", 1024), ("z_image", 608)],
)
def test_a_length_of_texts_that_the_model_does_not_take(
    failed: Failed, name: str, most: int
) -> None:
    found = failed(name, f"prompts.max_sequence_length={most + 1}")
    pipeline = open_family(tiny_folder(name)).pipeline
    assert f"max_sequence_length is {most + 1}; a {pipeline} takes 1 to {most} tokens" in found


def test_the_longest_text_of_z_image_has_a_place_and_a_longer_one_none() -> None:
    config = family_config("z_image")
    policy = load_policy(config)
    most = policy.family.longest_text
    assert most is not None
    x = torch.zeros(1, *policy.shape.packed)
    policy(x, torch.ones(1), policy.blank(most, torch.float32, "cpu"))
    with pytest.raises(IndexError):
        policy(x, torch.ones(1), policy.blank(most + 1, torch.float32, "cpu"))


@pytest.mark.parametrize("size", ["sampling.width=72", "evaluation.height=40"])
@pytest.mark.parametrize("name", TINY)
def test_a_size_that_cannot_be_packed(failed: Failed, name: str, size: str) -> None:
    assert f"{size.replace('=', ' is ')}; it must be a multiple of 16" in failed(name, size)


def test_embeddings_made_for_another_family(failed: Failed, tmp_path: Path) -> None:
    made = embed(family_config("z_image"), tmp_path / "made")
    for name in sorted(TINY.keys() - {"z_image"}):
        found = failed(name, f"prompts.train={made}")
        pipeline = open_family(tiny_folder(name)).pipeline
        assert "embeddings made for a ZImagePipeline" in found, name
        assert f"is a {pipeline}" in found, name


def test_an_adapter_of_another_family(
    failed: Failed,  # noqa: ARG001  (no Ray)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = family_config("sd3", "model.lora.rank=2")
    policy, lora = load_policy(config), config.model.lora
    assert lora is not None
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_adapter(adapter_tensors(trainable_parameters(policy), lora), policy.family, adapter)
    run = tmp_path / "run"
    run.mkdir()
    save_config(family_config("qwen_image", run_dir=run), run / "config.yaml")
    words = ["sample", str(run), "--prompt", "a cross", "--checkpoint", str(adapter)]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 2
    found = capsys.readouterr().err
    assert str(adapter) in found
    assert "another model" in found or "does not fit" in found


@pytest.mark.slow
def test_a_guided_batch_beyond_memory_is_seen_by_the_plan() -> None:
    missing = []
    for guidance in (4.5, 1):
        config = family_config(
            "sd3", "model.path=models/stable-diffusion-3.5-medium", "model.dtype=bfloat16",
            "model.gradient_checkpointing=true", "model.lora.rank=32", "sampling.height=1024",
            "sampling.width=1024", "rollout.gpus_per_worker=1", "rollout.workers=1",
            "learner.gpus_per_rank=1", "learner.ranks=1", "rollout.batch_size=320",
            f"sampling.guidance={guidance}", negative_prompt="",
        )  # fmt: skip
        plan = make_plan(config, load_costs(), 2, "H100")
        missing.append(plan.configured.missing_gib)
        shown = as_text(plan)
        assert ("does not fit: rollout worker lacks" in shown) == (guidance > 1)
        assert ("a smaller rollout.batch_size" in shown) == (guidance > 1)
    assert missing[0]["rollout worker"] > 0
    assert "rollout worker" not in missing[1]
