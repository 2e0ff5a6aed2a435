"""A random-weight FLUX of real class, configurations for it, and a learner without DeepSpeed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.config import Config, LoraSection, config_from_dict
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.lora import add_lora
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.prompts.dataset import Prompt
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.group import GroupKey, RolloutGroup
from g2rpo_ray.sampling.sampler import Sampler

ALGORITHMS = ["g2rpo", "e_grpo", "mix_grpo", "flow_grpo", "dance_grpo"]
"""Those whose objective is a ratio's."""
LATENT_SIZE = 2
"""Rows and columns of tokens."""


def tiny_config(algorithm: str, **sections: dict[str, Any]) -> Config:
    """Six steps, four members; ``sections`` are merged into the configuration."""
    tree: dict[str, Any] = {
        "run_dir": "unused",
        "iterations": 3,
        "algorithm": algorithm,
        "model": {"path": "unused", "dtype": "float32"},
        "prompts": {"train": "unused", "heldout": "unused"},
        "sampling": {"steps": 6, "members": 4, "prompts_per_iteration": 2},
        "g2rpo": {"sde_steps": [0, 1, 2]},
        "e_grpo": {"first": 4},
        "mix_grpo": {"window": 2, "shift_interval": 1},
        "rollout": {"batch_size": 3},
        "rewards": {"oracle": {"kind": "oracle"}},
        "learner": {"update": "per_iteration"},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return config_from_dict(tree, source="test")


def tiny_policy(*, lora: bool = False) -> Policy:
    """One double and one single block of width 32, float32, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ).eval()
    family, shape = Flux1({}), LatentShape(LATENT_SIZE, LATENT_SIZE, 16)
    if lora:
        add_lora(transformer, LoraSection(rank=2, alpha=4.0), family, seed=0)
    return Policy(family, transformer, shape, guidance=3.5)


def tiny_prompt(prompt_id: int = 0) -> Prompt:
    generator = torch.Generator().manual_seed(prompt_id)
    t5, pooled = (torch.randn(size, generator=generator) for size in ((5, 24), (20,)))
    embeds = Conditioning({"t5": t5, "pooled": pooled})
    return Prompt(prompt_id, f"prompt {prompt_id}", embeds)


def tiny_sampler(policy: Policy, config: Config) -> Sampler:
    sigmas = static_shift_schedule(config.sampling.steps, config.sampling.shift)
    return Sampler(Evaluator(policy, config.rollout.planned_batch_size), sigmas)


def draw_group(
    policy: Policy, config: Config, group_id: int = 0, iteration: int = 0
) -> RolloutGroup:
    """One prompt drawn and rewarded by the sum of a picture's latents, as the worker does it."""
    key, prompt = GroupKey(config.seed, group_id), tiny_prompt(group_id)
    sampler = tiny_sampler(policy, config)
    draw = make_algorithm(config).draw(sampler, prompt.embeds, key, iteration)
    rewards = torch.full(
        (1, draw.granularities, len(draw.step_indices), config.sampling.members), torch.nan
    )
    for positions, x0 in draw.finished:
        rewards[0][:, positions] = x0.sum(dim=(-2, -1))[:, None]
    return RolloutGroup(
        key=key,
        iteration=iteration,
        weight_version=0,
        prompt=prompt,
        sde_steps=draw.sde_steps,
        step_indices=draw.step_indices,
        latents=draw.latents,
        velocities=draw.velocities,
        rewards=rewards,
        reward_names=["oracle"],
        evaluations=sampler.exact.evaluations,
        batch_size=sampler.exact.batch_size,
        times=draw.times,
    )


@dataclass
class PlainEngine:
    """What the update needs of a learner's engine, with plain gradient descent."""

    policy: Policy
    learning_rate: float = 1e-3
    others_batch_size: int = 64
    """The smallest of the groups that other ranks would have."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of every step, by the parameter's name."""
    ended: list[bool] = field(default_factory=list)
    """``last`` of every backward pass."""
    held: list[bool] = field(default_factory=list)
    """``hold`` of every step."""
    old_policy_decays: list[float] = field(default_factory=list)
    """Of every move of the old policy."""
    updates: int = 0

    def __call__(self, *args: Any) -> Tensor:
        velocity: Tensor = self.policy(*args)
        return velocity

    def smallest_of_ranks(self, value: int) -> int:
        return min(value, self.others_batch_size)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        self.ended.append(last)

    def move_old_policy(self, decay: float) -> None:
        self.old_policy_decays.append(decay)

    @torch.no_grad()
    def step(self, *, hold: bool = False) -> float:
        self.held.append(hold)
        self.updates += 1
        gradient = {}
        for name, parameter in self.policy.transformer.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.clone()
                parameter -= self.learning_rate * parameter.grad
                parameter.grad = None
        self.gradients.append(gradient)
        return float(torch.stack([g.norm() for g in gradient.values()]).norm())
