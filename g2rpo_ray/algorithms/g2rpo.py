"""G2RPO: singular stochastic sampling, completed on several granularities (arXiv 2510.01982)."""

import torch

from g2rpo_ray.algorithms.base import Draw, Strategy
from g2rpo_ray.maths.granularity import RolloutCounts, count_g2rpo
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.sampling.sampler import Sampler


class G2rpoStrategy(Strategy):
    """One anchor for the prompt; M branches from each SDE step, which share its latents."""

    def trained_steps(self, iteration: int) -> list[int]:  # noqa: ARG002
        return list(self.config.g2rpo.sde_steps)

    def draw(self, sampler: Sampler, embeds: Conditioning, key: GroupKey, iteration: int) -> Draw:
        sampling, recipe = self.config.sampling, self.config.g2rpo
        device = embeds.device
        shape = sampler.shape.packed

        anchor = sampler.trajectory(key.initial_noise(shape)[None].to(device), embeds)
        latents, velocities, steps, branches = [], [], [], []
        trained = self.trained_steps(iteration)
        for k in trained:
            step = SdeStep.at(sampler.sigmas, k, sampling.sde, sampling.eta)
            x, v = anchor.latents[k], anchor.velocities[k]
            noise = key.branch_noise(shape, k, sampling.members).to(device)
            branches.append(step.sample(step.mean(x, v), noise))
            latents.append(x)
            velocities.append(v)
            steps.append(step)

        completions = sampler.completions(
            torch.stack(branches),
            trained,
            recipe.granularities,
            embeds,
            self.config.rollout.thin_completions,
        )
        return Draw(
            sde_steps=steps,
            step_indices=trained,
            latents=torch.stack(latents),
            velocities=torch.stack(velocities),
            granularities=len(recipe.granularities),
            finished=(([position], x0) for position, x0 in completions),
        )

    def counts(self, iteration: int) -> RolloutCounts:  # noqa: ARG002
        recipe = self.config.g2rpo
        return count_g2rpo(
            self.config.sampling.steps,
            recipe.sde_steps,
            recipe.granularities,
            self.config.sampling.members,
            self.config.rollout.thin_completions,
        )
