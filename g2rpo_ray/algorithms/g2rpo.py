"""G2RPO: singular stochastic sampling, completed on several granularities (arXiv 2510.01982)."""

from dataclasses import replace

import torch

from g2rpo_ray.algorithms.base import Algorithm, Draw
from g2rpo_ray.maths.granularity import RolloutCounts, count_g2rpo
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.sampling.sampler import Sampler


class G2rpo(Algorithm):
    """One anchor for the prompt; M branches from each SDE step, which share its latents."""

    @property
    def granularities(self) -> list[int]:
        """Lambda."""
        return self.config.g2rpo.granularities

    def spans(self) -> list[range]:
        """Steps of the schedule that each stochastic step is made of."""
        return [range(k, k + 1) for k in self.config.g2rpo.sde_steps]

    def trained_steps(self, iteration: int) -> list[int]:  # noqa: ARG002
        return [span.start for span in self.spans()]

    def draw(self, sampler: Sampler, embeds: Conditioning, key: GroupKey, iteration: int) -> Draw:
        sampling, device, spans = self.config.sampling, embeds.device, self.spans()
        shape, trained = sampler.shape.packed, self.trained_steps(iteration)
        anchor = sampler.trajectory(key.initial_noise(shape)[None].to(device), embeds)
        steps = [
            SdeStep.at(sampler.sigmas, span.start, sampling.sde, sampling.eta, len(span))
            for span in spans
        ]
        branches = []
        for k, step in zip(trained, steps, strict=True):
            noise = key.branch_noise(shape, k, sampling.members).to(device)
            mean = step.mean(anchor.latents[k], anchor.velocities[k])
            branches.append(step.sample(mean, noise))
        thin = self.config.rollout.thin_completions
        completions = sampler.completions(
            torch.stack(branches), [span[-1] for span in spans], self.granularities, embeds, thin
        )
        return Draw(
            sde_steps=steps,
            step_indices=trained,
            latents=anchor.latents[trained],
            velocities=anchor.velocities[trained],
            granularities=len(self.granularities),
            finished=(([position], x0) for position, x0 in completions),
        )

    def counts(self, iteration: int) -> RolloutCounts:  # noqa: ARG002
        sampling, thin = self.config.sampling, self.config.rollout.thin_completions
        ends = [span[-1] for span in self.spans()]
        counts = count_g2rpo(sampling.steps, ends, self.granularities, sampling.members, thin)
        # Members of another update need a pass of their own over the x_k that they share.
        passes = counts.learner_passes * self.config.learner.updates_per_iteration
        return replace(counts, learner_passes=passes)
