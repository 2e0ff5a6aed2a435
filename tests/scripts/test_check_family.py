"""Our sampler against diffusers' pipeline, through the script that checks any model folder."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.latents import LatentShape
from tests.scripts.loading import load_script
from tests.tiny import copy_flux


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("check_family")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_flux(tmp_path / "flux")


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_tiny_model_agrees(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["tiny_world:flux", "--height", "32", "--width", "96", "--steps", "3"]) == 0
    assert "FluxPipeline, 3 steps, 96x32: latents " in capsys.readouterr().out


def test_the_folders_own_schedule_and_arguments_count(script: ModuleType, folder: Path) -> None:
    change(folder / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True, base_shift=2)
    (folder / "call.json").write_text(json.dumps({"common": {"max_sequence_length": 8}}))
    assert script.main([str(folder), "--steps", "3", "--guidance", "1"]) == 0


def test_another_schedule_is_a_failure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def linear(_family: Flux1, steps: int, _latents: LatentShape) -> torch.Tensor:
        return torch.linspace(1, 0, steps + 1)

    monkeypatch.setattr(Flux1, "schedule", linear)
    assert script.main(["tiny_world:flux", "--steps", "3"]) == 1
    assert "failed: the relative error is beyond 0.0001" in capsys.readouterr().out


def test_an_unknown_family_is_named_with_those_that_are_known(
    script: ModuleType, folder: Path
) -> None:
    change(folder / "model_index.json", _class_name="KolorsPipeline")
    with pytest.raises(InputError, match="_class_name is 'KolorsPipeline'") as refused:
        script.main([str(folder)])
    assert "families of models known here: FluxPipeline" in str(refused.value)
