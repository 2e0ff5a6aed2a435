"""Every shipped configuration parses, and says what it costs."""

from pathlib import Path

import pytest

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.config import load_config
from g2rpo_ray.plan.arithmetic import describe

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

EVALUATIONS = {
    "flux_g2rpo_hps": 1504,
    "flux_g2rpo_hps_clip": 1504,
    "flux_mix_grpo": 25 * 12,
    "flux_flow_grpo": 6 * 24,
    "flux_dance_grpo": 25 * 12,
}
"""Of one prompt in the first iteration."""
LORA_ALONE = {
    "flux2_klein_4b_g2rpo_hps": 424,
    "qwen_image_g2rpo_hps": 714,
    "sd3_5_medium_g2rpo_hps": 1066,
    "z_image_g2rpo_hps": 714,
}
"""Of recipes that have no twin for all weights."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_says_what_it_costs(path: Path) -> None:
    config = load_config(path)
    description = describe(config)
    print(f"\n{path.name}\n{description}")
    counts = make_algorithm(config).counts(0)
    assert f"({counts.evaluations} a prompt)" in description
    name = path.stem.removesuffix("_lora").removesuffix("_one_gpu")
    known = EVALUATIONS | LORA_ALONE
    assert counts.evaluations == known.get(name, counts.evaluations)
    assert path.stem.endswith("_lora") == (config.model.lora is not None)


def test_every_recipe_comes_with_lora() -> None:
    names = {path.stem for path in CONFIGS}
    assert names >= set(EVALUATIONS) | {f"{name}_lora" for name in EVALUATIONS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_names_its_paper(path: Path) -> None:
    if path.stem != "quickstart":
        assert "arXiv" in path.read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_all_weights_of_a_flux_recipe_travel_by_nccl(path: Path) -> None:
    config = load_config(path)
    all_weights = path.stem.startswith("flux_") and config.model.lora is None
    assert config.weight_transport == ("nccl" if all_weights else "object_store")
