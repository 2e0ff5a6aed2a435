"""What cannot be trained is a configuration error before any role starts, and names the key."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.maths.advantage import integrate_advantages
from g2rpo_ray.maths.granularity import completion_indices
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.maths.sde import SdeStep

BASE: dict[str, Any] = {
    "run_dir": "unused",
    "iterations": 1,
    "model": {"path": "unused"},
    "prompts": {"train": "unused", "heldout": "unused"},
    "sampling": {"steps": 6},
    "g2rpo": {"sde_steps": [0, 1]},
    "rewards": {"oracle": {"kind": "oracle"}},
}


def load(folder: Path, *overrides: str) -> Config:
    file = folder / "bad.yaml"
    file.write_text(yaml.safe_dump(BASE))
    return load_config(file, overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["g2rpo.sde_steps=[6]"], ["g2rpo.sde_steps has 6", "0 to 4"]),
        (["g2rpo.sde_steps=[-1]"], ["g2rpo.sde_steps has -1", "0 to 4"]),
        (["g2rpo.sde_steps=[5]"], ["g2rpo.sde_steps has 5", "last step must be deterministic"]),
        (["g2rpo.sde_steps=[]"], ["g2rpo.sde_steps", "at least 1"]),
        (["g2rpo.sde_steps=[1, 1]"], ["g2rpo.sde_steps is [1, 1]", "twice"]),
        (["g2rpo.granularities=[0, 1]"], ["g2rpo.granularities has 0", "1 or more"]),
        (["g2rpo.granularities=[2, 2]"], ["g2rpo.granularities is [2, 2]", "twice"]),
        (["sampling.eta=0"], ["sampling.eta", "greater than 0"]),
        (["sampling.members=1"], ["sampling.members", "greater than or equal to 2", "got 1"]),
        (["learner.clip=0"], ["learner.clip", "greater than 0", "got 0"]),
        (["learner.clip=-1e-4"], ["learner.clip", "greater than 0"]),
        (["rewards.oracle.weight=-1"], ["rewards.oracle.weight", "got -1"]),
        (["rewards.oracle.weight=0"], ["rewards: every weight is 0"]),
        (["rewards.oracle.weight=[1, 2]"], ["rewards.oracle.weight", "valid number"]),
        (
            ["algorithm=ddpo"],
            [
                "algorithm",
                "'g2rpo', 'e_grpo', 'mix_grpo', 'flow_grpo', 'dance_grpo' or 'diffusion_nft'",
            ],
        ),
        (["algorithm=mix_grpo", "mix_grpo.window=6"], ["mix_grpo.window is 6", "0 to 4"]),
        (["algorithm=mix_grpo", "mix_grpo.window=0"], ["mix_grpo.window", "got 0"]),
        (["algorithm=mix_grpo", "mix_grpo.stride=0"], ["mix_grpo.stride", "got 0"]),
        (["algorithm=mix_grpo", "mix_grpo.flash_ratio=0"], ["mix_grpo.flash_ratio", "got 0"]),
        (["algorithm=mix_grpo", "mix_grpo.schedule=slow"], ["mix_grpo.schedule", "'slow'"]),
        (
            ["algorithm=flow_grpo", "flow_grpo.trained_steps=first"],
            ["flow_grpo", "first is None", "trained_steps: first"],
        ),
        (
            ["algorithm=flow_grpo", "flow_grpo.first=2"],
            ["flow_grpo", "first is 2", "trained_steps is all"],
        ),
        (
            ["algorithm=flow_grpo", "flow_grpo.trained_steps=first", "flow_grpo.first=6"],
            ["flow_grpo.first is 6", "0 to 4"],
        ),
        (
            ["algorithm=dance_grpo", "dance_grpo.fraction=1.5"],
            ["dance_grpo.fraction", "less than or equal to 1"],
        ),
        (["learner.kl_weight=0.1"], ["learner.kl_weight is 0.1", "model.lora"]),
        (
            ["learner.normalise_ratio=true", "sampling.log_prob=squared_error"],
            ["learner.normalise_ratio", "log_prob: gaussian"],
        ),
        (["learner.step_weight=heavy"], ["learner.step_weight", "'heavy'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_it_is_refused_with_file_key_and_what_is_allowed(
    tmp_path: Path, overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    message = str(caught.value)
    assert "bad.yaml" in message
    assert [part for part in said if part not in message] == []


def test_the_sections_of_other_algorithms_are_left_alone(tmp_path: Path) -> None:
    config = load(tmp_path, "algorithm=flow_grpo", "g2rpo.sde_steps=[7]", "mix_grpo.window=9")
    assert config.algorithm == "flow_grpo"


def test_kl_is_allowed_with_lora(tmp_path: Path) -> None:
    config = load(tmp_path, "learner.kl_weight=0.1", "model.lora.rank=2")
    assert config.learner.kl_weight == 0.1


def test_weights_must_match_the_rewards() -> None:
    with pytest.raises(ValueError, match="3 weights given for 2 rewards"):
        integrate_advantages(torch.zeros(2, 1, 1, 4), [1.0] * 3, clamp=5.0, min_spread=0.0)


def test_flags_must_match_the_rewards() -> None:
    with pytest.raises(ValueError, match="1 flags 'required' given for 2 rewards"):
        integrate_advantages(
            torch.zeros(2, 1, 1, 4), [1.0] * 2, clamp=5.0, min_spread=0.0, required=[True]
        )


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 4)])
def test_advantages_need_members_to_compare(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 2 members"):
        integrate_advantages(torch.zeros(shape), [1.0], clamp=5.0, min_spread=0.0)


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_schedule_needs_a_positive_shift_and_a_step(shift: float) -> None:
    with pytest.raises(ValueError, match="must be greater than 0"):
        static_shift_schedule(6, shift)
    with pytest.raises(ValueError, match="at least 1 step"):
        static_shift_schedule(0, 3.0)


def test_a_granularity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="granularity is 0; it must be at least 1"):
        completion_indices(6, 0, 0)


@pytest.mark.parametrize("index", [-1, 5, 6])
def test_a_stochastic_step_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="0 to 4"):
        SdeStep.at(static_shift_schedule(6, 3.0), index, "flow", 0.7)
    with pytest.raises(ValueError, match="0 to 4"):
        completion_indices(6, index, 1)


def test_narrow_latents_are_refused() -> None:
    step = SdeStep.at(static_shift_schedule(6, 3.0), 0, "flow", 0.7)
    narrow = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="float32 or float64"):
        step.mean(narrow, narrow)
    with pytest.raises(TypeError, match="float32 or float64"):
        step.log_prob(narrow, narrow)
