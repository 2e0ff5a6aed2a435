"""The batched, prefix-sharing engine against one whole rollout made one image at a time."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

from g2rpo_ray.algorithm.schedule import static_shift_schedule
from g2rpo_ray.algorithm.sde import SdeStep
from g2rpo_ray.models.embeds import PromptEmbeds
from g2rpo_ray.models.flux import FluxPolicy, LatentShape
from g2rpo_ray.rollout.sampler import Sampler

GOLDEN = Path(__file__).parents[1] / "golden"
SPEC = json.loads((GOLDEN / "spec.json").read_text())["rollout"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
def test_golden_rollout(batch_size: int) -> None:
    golden = load_file(GOLDEN / "rollout.safetensors")
    transformer = FluxTransformer2DModel(**SPEC["transformer_config"])
    transformer.load_state_dict(load_file(GOLDEN / "flux.safetensors"))
    shape = LatentShape(SPEC["latent_height"], SPEC["latent_width"], transformer.config.in_channels)
    policy = FluxPolicy(transformer.eval(), shape, SPEC["guidance"])
    sigmas = static_shift_schedule(SPEC["steps"], SPEC["shift"])
    sampler = Sampler(policy, sigmas, batch_size)
    embeds = PromptEmbeds(golden["prompt_embeds"][0], golden["pooled_prompt_embeds"][0])

    anchor = sampler.trajectory(golden["initial_noise"], embeds)
    assert relative_error(anchor.latents.transpose(0, 1), golden["anchor_latents"]) < 1e-5
    assert relative_error(anchor.x0, golden["anchor_x0"]) < 1e-5

    branches, log_probs = [], []
    for position, k in enumerate(SPEC["sde_steps"]):
        step = SdeStep.at(sigmas, k, SPEC["kind"], SPEC["eta"])
        mean = step.mean(anchor.latents[k], anchor.velocities[k])
        branches.append(step.sample(mean, golden["sde_noise"][position]))
        log_probs.append(step.log_prob(branches[-1], mean))
    assert relative_error(torch.stack(branches), golden["next_latents"]) < 1e-5
    assert relative_error(torch.stack(log_probs), golden["log_probs"]) < 1e-5

    results = dict(
        sampler.completions(torch.stack(branches), SPEC["sde_steps"], SPEC["granularities"], embeds)
    )
    # Golden is [step, member, granularity, ...]; ours is [granularity, member, ...] by step.
    completions = torch.stack([results[p] for p in range(len(SPEC["sde_steps"]))]).transpose(1, 2)
    assert relative_error(completions, golden["completion_x0"]) < 1e-5
