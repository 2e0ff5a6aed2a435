"""Stable Diffusion 3.5: what a folder must be, and what is published."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from g2rpo_ray.config import Config, ModelSection
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import check_model, load_part
from g2rpo_ray.plan.networks import planned_family, policy_size
from tests.models.families.folders import family_config, tiny_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("sd3"), tmp_path / "sd3"))


def error(folder: Path, *overrides: str) -> str:
    config = family_config("sd3", f"model.path={folder}", *overrides)
    with pytest.raises(ModelFolderError) as caught:
        check_model(config)
    return str(caught.value)


def test_another_scheduler_is_named(folder: Path) -> None:
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({"_class_name": "EulerAncestralDiscreteScheduler"}))
    found = error(folder)
    assert f"{file}: _class_name is EulerAncestralDiscreteScheduler" in found
    assert "FlowMatchEulerDiscreteScheduler" in found


def test_a_folder_without_its_own_schedule_has_none_to_follow(folder: Path) -> None:
    shutil.rmtree(folder / "scheduler")
    assert "no scheduler/scheduler_config.json" in error(folder)
    check_model(family_config("sd3", f"model.path={folder}", "sampling.schedule=static"))


def test_a_missing_text_encoder_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "text_encoder_3")
    assert "part 'text_encoder_3' is missing" in error(folder)


def test_a_picture_beyond_the_table_of_places_is_refused() -> None:
    # 16 places of 16 pixels.
    check_model(family_config("sd3", "sampling.width=256"))
    for size in ("sampling.width=272", "evaluation.height=272"):
        assert "knows places up to 256 pixels a side" in error(tiny_folder("sd3"), size)


def test_channels_of_another_vae(folder: Path) -> None:
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"latent_channels": 4}))
    assert "in_channels 16" in error(folder)


def test_random_weights_keep_the_table_of_places() -> None:
    folder = str(tiny_folder("sd3"))
    made, loaded = (
        load_part(ModelSection(path=folder, random_weights=random), "transformer", torch.float32)
        for random in (True, False)
    )
    assert torch.equal(made.pos_embed.pos_embed, loaded.pos_embed.pos_embed)
    assert not torch.equal(made.proj_out.weight, loaded.proj_out.weight)


@pytest.mark.parametrize(
    ("name", "parameters"), [("medium", 2_243_171_520), ("large", 8_056_627_520)]
)
def test_the_published_models_can_be_planned(name: str, parameters: int) -> None:
    path = f"models/stable-diffusion-3.5-{name}"
    family, source = planned_family(path)
    assert family.pipeline == "StableDiffusion3Pipeline"
    assert source.startswith(f"stable-diffusion-3.5-{name}'s published architecture")
    size = policy_size(published(path))
    assert (size.parameters, size.passes) == (parameters, 2)


def published(path: str) -> Config:
    return family_config(
        "sd3",
        f"model.path={path}",
        "sampling.height=512",
        "sampling.width=512",
        "prompts.max_sequence_length=128",
    )
