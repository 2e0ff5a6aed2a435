"""The baselines' common part: members on their own trajectories, one terminal advantage each."""

from abc import abstractmethod
from collections.abc import Sequence

from g2rpo_ray.algorithms.base import Algorithm, Draw
from g2rpo_ray.maths.granularity import RolloutCounts, count_walks
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.sampling.sampler import Sampler


class MemberWalks(Algorithm):
    """Walks M members through stochastic and ODE steps; the pictures reward all trained steps."""

    @property
    def shared_initial_noise(self) -> bool:
        """Whether the members start from the same noise: a setting of each such algorithm."""
        return getattr(self.config, self.config.algorithm).shared_initial_noise

    @abstractmethod
    def sde_steps(self, iteration: int) -> Sequence[int]:
        """Schedule indices of all stochastic steps, trained or not, ascending."""

    def indices(self, iteration: int) -> Sequence[int]:  # noqa: ARG002
        """Schedule indices that a walk visits."""
        return range(self.config.sampling.steps + 1)

    def second_order_from(self, iteration: int) -> int | None:  # noqa: ARG002
        """Schedule index from which on the ODE is solved to second order, if at all."""
        return None

    def draw(self, sampler: Sampler, embeds: Conditioning, key: GroupKey, iteration: int) -> Draw:
        sampling, device = self.config.sampling, embeds.device
        shape, members = sampler.shape.packed, sampling.members
        trained = self.trained_steps(iteration)
        injected = {
            k: (
                SdeStep.at(sampler.sigmas, k, sampling.sde, sampling.eta),
                key.branch_noise(shape, k, members).to(device),
            )
            for k in self.sde_steps(iteration)
        }
        walks = sampler.walk(
            key.member_noise(shape, members, self.shared_initial_noise).to(device),
            self.indices(iteration),
            injected,
            trained,
            embeds,
            self.second_order_from(iteration),
        )
        return Draw(
            sde_steps=[injected[k][0] for k in trained],
            step_indices=trained,
            latents=walks.latents,
            velocities=walks.velocities,
            granularities=1,
            finished=iter([(list(range(len(trained))), walks.x0[None])]),
        )

    def counts(self, iteration: int) -> RolloutCounts:
        return count_walks(
            self.indices(iteration),
            self.sde_steps(iteration)[0],
            len(self.trained_steps(iteration)),
            self.config.sampling.members,
            self.shared_initial_noise,
        )
