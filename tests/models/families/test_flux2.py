"""FLUX.2: what a folder must be, how guidance is refused, where the time is rounded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.flux2.family import PUBLISHED
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.plan.networks import planned_family, policy_size
from tests.models.families.folders import family_config, tiny_folder
from tests.tiny import encode


def error(name: str, *overrides: str, negative: str = "") -> str:
    with pytest.raises(ModelFolderError) as caught:
        check_model(family_config(name, *overrides, negative_prompt=negative))
    return str(caught.value)


def test_a_distilled_klein_takes_no_guidance() -> None:
    found = error("flux2_klein_distilled", "sampling.guidance=4")
    assert "sampling.guidance is 4, and this Flux2KleinPipeline was distilled" in found
    # Only model_index.json tells it from the base: the same weights are guided there.
    assert open_family(tiny_folder("flux2_klein")).passes(4.0) == 2


@pytest.mark.parametrize("name", ["flux2_klein", "flux2_klein_distilled", "flux2_dev"])
def test_a_negative_prompt_of_ones_own_is_refused(name: str) -> None:
    assert "sampling.negative_prompt is 'blurry'" in error(name, negative="blurry")


def test_channels_of_another_vae(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("flux2_klein"), tmp_path / "klein"))
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"latent_channels": 16}))
    found = error("flux2_klein", f"model.path={folder}")
    assert f"{folder}/transformer/config.json" in found
    assert "in_channels 16" in found
    assert "packed 4 x 16 = 64" in found


@pytest.mark.parametrize("name", ["flux2_klein", "flux2_dev", "qwen_image"])
def test_the_time_is_rounded_where_the_pipeline_rounds_it(name: str) -> None:
    config = family_config(name, "model.dtype=bfloat16")
    (prompt,) = encode(config)[:1]
    policy, seen = load_policy(config), []

    def record(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        seen.append(inputs["timestep"])

    policy.transformer.register_forward_pre_hook(record, with_kwargs=True)
    sigma = torch.tensor([0.57, 0.69])
    with torch.no_grad():
        velocity = policy(torch.randn(2, *policy.shape.packed), sigma, prompt.embeds)
    # The pipeline's t is sigma * 1000, cast to the latents' dtype and then divided.
    expected = (sigma * 1000).to(torch.bfloat16) / 1000
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[0][:2], expected)
    assert not torch.equal(expected, sigma.to(torch.bfloat16))
    assert velocity.dtype == torch.float32


def test_published_sizes() -> None:
    # Bytes of the released files in bfloat16, less their headers; 32 B as published.
    sizes = {"FLUX.2-klein-base-4B": 7_751_089_152 // 2, "FLUX.2-dev": 32_223_281_152}
    for name, parameters in sizes.items():
        family, _ = planned_family(f"models/{name}")
        config = family_config("flux2_klein", f"model.path=models/{name}")
        assert policy_size(config).parameters == parameters
        assert family.guidance_kind == ("cfg" if "klein" in name else "embedded")


def test_which_are_gated() -> None:
    assert {name for name, model in PUBLISHED.items() if model.terms} == {
        "FLUX.2-dev",
        "FLUX.2-klein-base-9B",
        "FLUX.2-klein-9B",
    }
    assert planned_family("models/FLUX.2-klein-4B")[0].guidance_kind == "none"
