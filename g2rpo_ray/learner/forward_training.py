"""One group's passes with DiffusionNFT: its pictures noised again, no ratio and no clip."""

import torch
from torch import Tensor

from g2rpo_ray.learner.group_training import GroupTraining, Step
from g2rpo_ray.maths.forward_process import implicit_policies_loss, optimality
from g2rpo_ray.maths.objective import PolicyHealth, PolicyLoss


class ForwardTraining(GroupTraining):
    """A position is one noise level of every picture; all members are rows of their own."""

    def _inputs(self, position: int) -> tuple[Tensor, Tensor, Tensor]:
        assert self._group.times is not None
        noised, target = self._group.noised(position)
        times = self._group.times[position]
        return noised.to(self._device), times.to(self._device), target.to(self._device)

    def _loss(
        self,
        step: Step,
        velocity: Tensor,
        reference: Tensor | None,
        rows: slice,
        members: slice,
        update: int,  # noqa: ARG002
    ) -> tuple[PolicyLoss, Tensor]:
        recipe, clamp = self._config.diffusion_nft, self._config.advantage.clamp
        advantages = step.advantages[members]
        losses = implicit_policies_loss(
            velocity,
            step.old_velocities[rows],
            step.target[members],
            step.sigmas[rows],
            optimality(advantages, clamp),
            recipe.beta,
            adaptive=recipe.adaptive_weight,
        )
        usable = torch.ones_like(advantages, dtype=torch.bool)
        # By the clamp the gradient is that of the advantage itself, as published.
        policy = PolicyLoss(clamp * losses.mean(), torch.zeros_like(advantages), usable)
        if reference is None:
            return policy, torch.zeros_like(policy.loss)
        return policy, ((velocity - reference) ** 2).mean()

    def _health(self, step: Step, left: Tensor | slice) -> PolicyHealth:  # noqa: ARG002
        # Of no member: there is no ratio.
        return super()._health(step, slice(0))
