"""G2RPO: singular stochastic sampling, completed on several granularities (arXiv 2510.01982)."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from g2rpo_ray.algorithms.base import Algorithm, Draw
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.maths.granularity import RolloutCounts, branch_plan, count_g2rpo
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import latents_of, open_family
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
        completions = sampler.completions(
            torch.stack(branches),
            [span[-1] for span in spans],
            self.granularities,
            embeds,
            self.config.rollout.completion_stride,
        )
        return Draw(
            sde_steps=steps,
            step_indices=trained,
            latents=anchor.latents[trained],
            velocities=anchor.velocities[trained],
            granularities=len(self.granularities),
            finished=(([position], x0) for position, x0 in completions),
        )

    def float8_evaluations(self) -> int:
        """Of a prompt: those that ``rollout.fp8`` computes."""
        rollout, steps = self.config.rollout, self.config.sampling.steps
        if not rollout.fp8:
            return 0
        branches = [
            branch_plan(steps, span[-1], self.granularities, rollout.completion_stride)
            for span in self.spans()
        ]
        levels = [float(self.sigmas[index]) for branch in branches for index in branch.indices]
        return self.config.sampling.members * sum(s > rollout.fp8_above_sigma for s in levels)

    @cached_property
    def sigmas(self) -> Tensor:
        """The schedule ``[T + 1]``."""
        # The driver asks, too, and has no policy: only the model folder's configuration is read.
        sampling = self.config.sampling
        if sampling.schedule == "static":
            return static_shift_schedule(sampling.steps, sampling.shift)
        family = open_family(resolve_path(self.config.model.path))
        return family.schedule(sampling.steps, latents_of(self.config, family))

    def counts(self, iteration: int) -> RolloutCounts:  # noqa: ARG002
        sampling, stride = self.config.sampling, self.config.rollout.completion_stride
        ends = [span[-1] for span in self.spans()]
        counts = count_g2rpo(sampling.steps, ends, self.granularities, sampling.members, stride)
        # Members of another update need a pass of their own over the x_k that they share.
        passes = counts.learner_passes * self.config.learner.updates_per_iteration
        return replace(counts, learner_passes=passes)
