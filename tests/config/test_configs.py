"""Every shipped configuration parses, and says what it costs."""

from operator import attrgetter
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


COMMON = {
    "sampling.guidance": 3.5,
    "sampling.log_prob": "gaussian",
    "advantage.normalisation": "std",
    "learner.clip": 1e-4,
    "learner.weight_decay": 1e-4,
    "learner.beta1": 0.9,
    "learner.beta2": 0.999,
    "learner.kl_weight": 0.0,
    "learner.old_log_prob": "rollout",
    "model.truncate_timesteps": False,
}
"""What all four papers have, or what their public code has for FLUX where they say nothing."""
PAPERS = {
    # arXiv 2510.01982: 720 x 720, 16 steps with shift 3, eta 0.7, first 8 steps one at a time, 12
    # branches, a prompt on each of 16 cards, advantages cut at 5, ratio clip 1e-4.
    "flux_g2rpo": {
        "sampling.height": 720, "sampling.width": 720, "sampling.steps": 16,
        "sampling.schedule": "static", "sampling.shift": 3.0, "sampling.sde": "flow",
        "sampling.eta": 0.7, "sampling.members": 12, "g2rpo.sde_steps": list(range(8)),
        "g2rpo.granularities": [1, 2], "advantage.clamp": 5.0, "learner.learning_rate": 2e-6,
    },
    # arXiv 2505.07818: 25 steps, constant noise level 0.3 at every step, 60 % of the steps trained,
    # the same initial noise in a group, 32 prompts x 12.
    "flux_dance_grpo": {
        "sampling.steps": 25, "sampling.shift": 3.0, "sampling.sde": "dance", "sampling.eta": 0.3,
        "sampling.members": 12, "sampling.prompts_per_iteration": 32,
        "dance_grpo.trained_steps": "random", "dance_grpo.fraction": 0.6,
        "dance_grpo.shared_initial_noise": True, "learner.learning_rate": 1e-5,
    },
    # arXiv 2507.21802: 25 steps with shift 3, a window of 4 that moves by 1 every 25 iterations.
    "flux_mix_grpo": {
        "sampling.steps": 25, "sampling.shift": 3.0, "sampling.sde": "flow", "sampling.eta": 0.7,
        "sampling.members": 12, "sampling.prompts_per_iteration": 32, "mix_grpo.window": 4,
        "mix_grpo.schedule": "progressive", "mix_grpo.shift_interval": 25, "mix_grpo.stride": 1,
        "mix_grpo.shared_initial_noise": True, "learner.learning_rate": 1e-5,
    },
    # arXiv 2505.05470: 6 steps in training and 28 in evaluation, noise at every step of 0.7 to 0.9,
    # 48 groups of 24 at 512 x 512, each member from noise of its own.
    "flux_flow_grpo": {
        "sampling.height": 512, "sampling.width": 512, "sampling.steps": 6, "evaluation.steps": 28,
        "sampling.sde": "flow", "sampling.eta": 0.9, "sampling.members": 24,
        "sampling.prompts_per_iteration": 48, "flow_grpo.trained_steps": "all",
        "flow_grpo.shared_initial_noise": False,
    },
}  # fmt: skip
REDUCED = {
    "flux_g2rpo_hps_24gb_lora": {
        "sampling.height": 512, "sampling.width": 512, "sampling.members": 8,
    },
}  # fmt: skip
"""What a recipe for a small card has instead, and says in its first lines."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_has_the_numbers_of_its_paper(path: Path) -> None:
    config = load_config(path)
    numbers = next((PAPERS[name] for name in PAPERS if path.stem.startswith(name)), None)
    if numbers is None:
        assert not path.stem.startswith("flux_")
        return
    expected = COMMON | numbers | REDUCED.get(path.stem, {})
    if config.model.lora is not None:
        # No paper gives a learning rate for adapters.
        expected.pop("learner.learning_rate", None)
    found = {key: attrgetter(key)(config) for key in expected}
    assert found == expected
    if path.stem == "flux_g2rpo_hps":
        assert config.sampling.prompts_per_iteration == 16
        assert config.learner.update == "per_sde_step"


def test_dance_grpo_trains_14_of_its_24_stochastic_steps() -> None:
    # 60 % of the 24 steps before the last, which is deterministic; of 25 they would be 15.
    config = load_config(CONFIGS[0].with_name("flux_dance_grpo.yaml"))
    assert (config.sampling.steps, make_algorithm(config).counts(0).groups) == (25, 14)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_recipe_names_its_paper(path: Path) -> None:
    if path.stem != "quickstart":
        assert "arXiv" in path.read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_all_weights_of_a_flux_recipe_travel_by_nccl(path: Path) -> None:
    config = load_config(path)
    all_weights = path.stem.startswith("flux_") and config.model.lora is None
    assert config.weight_transport == ("nccl" if all_weights else "object_store")
