"""The maths against tests/golden: exact numbers made by independent code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from g2rpo_ray.algorithm.advantage import integrate_advantages
from g2rpo_ray.algorithm.granularity import (
    completion_indices,
    count_g2rpo,
    count_published_order,
)
from g2rpo_ray.algorithm.objective import clipped_policy_loss
from g2rpo_ray.algorithm.schedule import static_shift_schedule
from g2rpo_ray.algorithm.sde import SdeStep

GOLDEN = Path(__file__).parents[1] / "golden"
SPEC: dict[str, Any] = json.loads((GOLDEN / "spec.json").read_text())


@pytest.fixture(scope="module")
def numbers() -> dict[str, Tensor]:
    return load_file(GOLDEN / "math.safetensors")


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", SPEC["schedules"], ids=lambda c: f"T{c['steps']}s{c['shift']}")
def test_schedules(case: dict[str, Any]) -> None:
    sigmas = static_shift_schedule(case["steps"], case["shift"])
    close(sigmas, torch.tensor(case["sigmas"], dtype=torch.float64))


@pytest.mark.parametrize("case", SPEC["sde_steps"], ids=lambda c: c["name"])
def test_sde_steps(case: dict[str, Any], numbers: dict[str, Tensor]) -> None:
    sigmas = static_shift_schedule(case["steps"], case["shift"])
    step = SdeStep.at(sigmas, case["index"], case["kind"], case["eta"])
    golden = {k: numbers[f"{case['name']}.{k}"] for k in ("x", "v", "noise", "mean", "next")}
    mean = step.mean(golden["x"], golden["v"])
    assert step.std == pytest.approx(case["std"], rel=1e-12)
    close(mean, golden["mean"])
    close(step.sample(mean, golden["noise"]), golden["next"])
    close(step.log_prob(golden["next"], mean), numbers[f"{case['name']}.log_prob"])


@pytest.mark.parametrize(
    "case",
    SPEC["completions"],
    ids=lambda c: f"T{c['steps']}k{c['sde_step']}g{c['granularity']}",
)
def test_completion_grids(case: dict[str, Any]) -> None:
    indices = completion_indices(case["steps"], case["sde_step"], case["granularity"])
    sigmas = static_shift_schedule(case["steps"], case["shift"])
    assert len(indices) - 1 == case["evaluations"]
    close(sigmas[indices], torch.tensor(case["sigmas"], dtype=torch.float64))


@pytest.mark.parametrize("case", SPEC["evaluation_counts"], ids=lambda c: str(c["granularities"]))
def test_evaluation_counts(case: dict[str, Any]) -> None:
    recipe = (case["steps"], case["sde_steps"], case["granularities"], case["members"])
    assert count_g2rpo(*recipe).evaluations == case["shared_prefix"]
    assert count_published_order(*recipe) == case["published_order"]


def test_advantages(numbers: dict[str, Tensor]) -> None:
    # Golden rewards are [granularity, member, step]; ours are [reward, granularity, step, member].
    rewards = torch.stack([numbers["advantages.hps"], numbers["advantages.clip"]]).transpose(-1, -2)
    one = integrate_advantages(rewards[:1, :1], [1.0], clamp=1e9, min_spread=1e-6)
    close(one.values.T, numbers["advantages.hps_first_granularity"].float(), 1e-6)
    free = integrate_advantages(rewards, [1.0, 1.0], clamp=1e9, min_spread=1e-6)
    close(free.values.T, numbers["advantages.integrated"].float(), 1e-6)
    clamped = integrate_advantages(rewards, [1.0, 1.0], clamp=5.0, min_spread=1e-6)
    close(clamped.values.T, numbers["advantages.clamped"].float(), 1e-6)


@pytest.mark.parametrize("clip", SPEC["loss"]["clips"])
def test_loss_and_gradient(clip: float, numbers: dict[str, Tensor]) -> None:
    case = SPEC["loss"]
    sigmas = static_shift_schedule(case["steps"], case["shift"])
    step = SdeStep.at(sigmas, case["index"], case["kind"], case["eta"])
    v = numbers["loss.v"].clone().requires_grad_()
    log_prob = step.log_prob(numbers["loss.next"], step.mean(numbers["loss.x"], v))
    close(log_prob.detach(), numbers["loss.log_prob_new"])
    result = clipped_policy_loss(
        log_prob, numbers["loss.log_prob_old"], numbers["loss.advantages"], clip
    )
    result.loss.backward()
    close(result.loss.detach().view(1), numbers[f"loss.{clip}.value"])
    assert v.grad is not None
    close(v.grad, numbers[f"loss.{clip}.grad"])
