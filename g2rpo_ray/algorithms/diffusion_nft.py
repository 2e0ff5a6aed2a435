"""DiffusionNFT: pictures by ODE, trained on their forward process (arXiv 2509.16117)."""

import torch

from g2rpo_ray.algorithms.base import Algorithm, Draw
from g2rpo_ray.maths.forward_process import noise_to
from g2rpo_ray.maths.granularity import RolloutCounts
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.sampling.sampler import Sampler


class DiffusionNft(Algorithm):
    """M pictures from noises of their own; K noise levels of each, with the old policy's velocity.

    The policy that draws is the old one: the learner's moving average.
    """

    def trained_steps(self, iteration: int) -> list[int]:  # noqa: ARG002
        return list(range(self.config.diffusion_nft.times_per_picture))

    def draw(self, sampler: Sampler, embeds: Conditioning, key: GroupKey, iteration: int) -> Draw:
        shape, members, device = sampler.shape.packed, self.config.sampling.members, embeds.device
        trained = self.trained_steps(iteration)
        start = key.member_noise(shape, members, shared=False).to(device)
        x0 = sampler.walk(start, range(sampler.steps + 1), {}, [0], embeds).x0
        times = key.forward_times(sampler.sigmas, len(trained), members).to(device)
        velocities = [
            sampler.exact(
                noise_to(x0, key.branch_noise(shape, number, members).to(device), times[number]),
                times[number],
                embeds,
            )
            for number in trained
        ]
        return Draw(
            sde_steps=[],
            step_indices=trained,
            latents=x0[None],
            velocities=torch.stack(velocities),
            granularities=1,
            finished=iter([(trained, x0[None])]),
            times=times,
        )

    def counts(self, iteration: int) -> RolloutCounts:  # noqa: ARG002
        members, times = self.config.sampling.members, self.config.diffusion_nft.times_per_picture
        return RolloutCounts(
            groups=times,
            evaluations=members * (self.config.sampling.steps + times),
            pictures=members,
            learner_passes=members * times,
        )

    def trained_in_words(self, iteration: int) -> str:  # noqa: ARG002
        times, steps = self.config.diffusion_nft.times_per_picture, self.config.sampling.steps
        return f"{times} of the {steps} noise levels, drawn anew for each picture"

    def noise_in_words(self) -> str:
        return "ODE"
