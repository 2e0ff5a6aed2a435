"""One group's passes through the network: from rewards to gradients and health."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.config import Config
from g2rpo_ray.learner.engine import LearnerEngine, LearnerError
from g2rpo_ray.maths.advantage import Advantages, integrate_advantages
from g2rpo_ray.maths.objective import (
    PolicyHealth,
    PolicyLoss,
    clipped_policy_loss,
    gaussian_kl,
    normalise_log_prob,
    policy_health,
)
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.sampling.group import RolloutGroup


@dataclass(frozen=True)
class StepRecord:
    """Health of one (group, SDE step)."""

    group_id: int
    position: int
    update: int
    """Optimizer steps of this iteration before it; 0 means that the ratio must be 1."""
    loss: float
    health: PolicyHealth
    kl_to_reference: float
    """KL of the policy's step from the reference's; 0 where ``learner.kl_weight`` is 0."""
    valid: bool
    """False where the group was dropped for an invalid reward."""
    masked_members: int
    """Members left out because their ratio is not finite."""
    advantage_abs_mean: float
    advantage_clamped_share: float


@dataclass(frozen=True)
class _StepData:
    """One stochastic step of a group, on this rank's device; dimensions as in RolloutGroup."""

    position: int
    step: SdeStep
    latents: Tensor
    """float32 ``[L, tokens, channels]``: x_k."""
    next_latents: Tensor
    """float32 ``[M, tokens, channels]``: x_{k+1}."""
    old_velocities: Tensor
    """float32 ``[L, tokens, channels]``."""
    advantages: Tensor
    """float32 ``[M]``."""


class GroupTraining:
    """One group on one rank: its advantages, and the passes over its steps."""

    def __init__(
        self,
        engine: LearnerEngine,
        group: RolloutGroup,
        config: Config,
        device: torch.device,
        batch_size: int,
    ) -> None:
        """
        Args:
            batch_size: most latents in one pass of the network, the same on every rank.
        """
        self._engine, self._config, self._device = engine, config, device
        self._batches = group.passes(batch_size)
        # What broke the network in the rollout would break it here again. It is in a dropped group:
        # as zeros it cannot spoil the gradient.
        sound = (group.latents.isfinite() & group.velocities.isfinite()).flatten(2).all(dim=2)
        self._group = replace(
            group,
            latents=torch.where(sound[..., None, None], group.latents, 0.0),
            velocities=torch.where(sound[..., None, None], group.velocities, 0.0),
        )
        self._embeds = group.prompt.embeds.to(device)
        self._advantages = _advantages(group, config)
        self._old_velocities = self._group.velocities

    @torch.no_grad()
    def recompute_old_velocities(self) -> None:
        """Take this rank's own velocities for old, in the batches of the passes to come."""
        self._old_velocities = torch.stack(
            [
                torch.cat(
                    [
                        self._velocities([latents[rows].to(self._device)], [step.sigma])[0]
                        for rows, _ in self._batches
                    ]
                )
                for latents, step in zip(self._group.latents, self._group.sde_steps, strict=True)
            ]
        )

    def backward(
        self, positions: Sequence[int], *, scales: Sequence[float], update: int, last: bool
    ) -> list[StepRecord]:
        """Add the gradients of some steps; ``last`` ends the accumulation.

        Several steps are one pass of the network; a single one is as many as its latents need.
        """
        sums = {
            position: _StepSums(self._step_data(position), scale)
            for position, scale in zip(positions, scales, strict=True)
        }
        passes = self._passes(positions)
        for number, parts in enumerate(passes):
            total = self._add_pass([(sums[p], rows, members) for p, rows, members in parts], update)
            self._engine.backward(total, last=last and number == len(passes) - 1)
        return [self._record(position, sums[position], update) for position in positions]

    def _passes(self, positions: Sequence[int]) -> list[list[tuple[int, slice, slice]]]:
        """(position, rows, members) of what each pass of the network holds."""
        if len(self._batches) == 1:
            return [[(position, *self._batches[0]) for position in positions]]
        return [[(position, *part)] for position in positions for part in self._batches]

    def _add_pass(self, parts: list[tuple["_StepSums", slice, slice]], update: int) -> Tensor:
        """One pass: adds to the sums of its steps, and returns the scaled loss of all of them."""
        x = [sums.data.latents[rows] for sums, rows, _ in parts]
        sigmas = [sums.data.step.sigma for sums, _, _ in parts]
        velocities = self._velocities(x, sigmas)
        references: Sequence[Tensor | None] = [None] * len(parts)
        if self._config.learner.kl_weight > 0:
            with torch.no_grad(), _adapters_off(self._engine.policy.transformer):
                references = self._velocities(x, sigmas)
        total = torch.zeros((), device=self._device)
        for (sums, rows, members), velocity, reference in zip(
            parts, velocities, references, strict=True
        ):
            self._require_finite(velocity, sums.data, rows)
            if reference is not None:
                self._require_finite(reference, sums.data, rows)
            policy, divergence = self._loss(sums.data, velocity, reference, rows, members, update)
            loss = policy.loss + self._config.learner.kl_weight * divergence
            share = len(policy.usable) / self._group.members
            valid = bool(self._advantages.valid[sums.data.position])
            total = total + loss * (share * sums.scale if valid else 0.0)
            sums.loss += float(loss.detach()) * share
            sums.kl_to_reference += float(divergence.detach()) * share
            sums.log_ratios.append(policy.log_ratio)
            sums.usable.append(policy.usable)
        return total

    def _record(self, position: int, sums: "_StepSums", update: int) -> StepRecord:
        group, data = self._group, sums.data
        valid = bool(self._advantages.valid[position])
        masked = int((~torch.cat(sums.usable)).sum())
        if valid and masked and self._config.advantage.on_invalid == "stop":
            raise LearnerError(
                f"group {group.key.group_id}, SDE step {group.step_indices[position]}: the ratio "
                f"of {masked} of {group.members} members is not finite (with "
                "advantage.on_invalid: drop_group such members are left out)"
            )
        sizes = data.advantages.abs()
        log_ratios, clip = torch.cat(sums.log_ratios), self._config.learner.clip
        return StepRecord(
            group_id=group.key.group_id,
            position=position,
            update=update,
            loss=sums.loss,
            health=policy_health(log_ratios, data.advantages, clip),
            kl_to_reference=sums.kl_to_reference,
            valid=valid,
            masked_members=masked,
            advantage_abs_mean=float(sizes.mean()),
            advantage_clamped_share=float((sizes >= self._config.advantage.clamp).float().mean()),
        )

    def _loss(
        self,
        data: _StepData,
        velocity: Tensor,
        reference: Tensor | None,
        rows: slice,
        members: slice,
        update: int,
    ) -> tuple[PolicyLoss, Tensor]:
        """The policy's loss, and its KL to the reference (0 without one)."""
        settings, step = self._config.learner, data.step
        x, next_x = data.latents[rows], data.next_latents[members]
        mean = step.mean(x, velocity)
        if update == 0 and settings.old_log_prob == "learner":
            old_mean = mean.detach()
        else:
            old_mean = step.mean(x, data.old_velocities[rows])

        form = self._config.sampling.log_prob
        log_prob = step.log_prob(next_x, mean, form)
        old_log_prob = step.log_prob(next_x, old_mean, form)
        if settings.normalise_ratio:
            log_prob = normalise_log_prob(log_prob, mean, old_mean, step.std)
            old_log_prob = normalise_log_prob(old_log_prob, old_mean, old_mean, step.std)
        policy = clipped_policy_loss(
            log_prob, old_log_prob, data.advantages[members], settings.clip
        )
        if reference is None:
            return policy, torch.zeros_like(policy.loss)
        return policy, gaussian_kl(mean, step.mean(x, reference), step.std)

    def _require_finite(self, velocity: Tensor, data: _StepData, rows: slice) -> None:
        """Before its backward pass: behind a broken activation even a zero gradient is NaN."""
        broken = ~velocity.isfinite().flatten(1).all(dim=1)
        if not bool(broken.any()):
            return
        group = self._group
        numbers = range(group.latents.shape[1])[rows]
        members = [
            str(n) for n, is_broken in zip(numbers, broken.tolist(), strict=True) if is_broken
        ]
        who = "all members" if group.latents.shape[1] == 1 else f"member {', '.join(members)}"
        raise LearnerError(
            f"group {group.key.group_id}, prompt {group.prompt.text!r:.80}, SDE step "
            f"{group.step_indices[data.position]}: the network's prediction for {who} is not "
            "finite, and no gradient can be taken through it, whatever advantage.on_invalid says. "
            "The optimizer's step was not made: resume from an earlier checkpoint with a smaller "
            "learner.learning_rate, or with model.dtype: float32"
        )

    def _step_data(self, position: int) -> _StepData:
        return _StepData(
            position=position,
            step=self._group.sde_steps[position],
            latents=self._group.latents[position].to(self._device),
            next_latents=self._group.next_latents(position).to(self._device),
            old_velocities=self._old_velocities[position].to(self._device),
            advantages=self._advantages.values[position].to(self._device),
        )

    def _velocities(self, latents: Sequence[Tensor], sigmas: Sequence[float]) -> list[Tensor]:
        """float32 ``[B_i, tokens, channels]`` of several latents at their own noise levels."""
        x = torch.cat(list(latents))
        sigma = torch.cat(
            [
                torch.full((len(part),), s, device=x.device)
                for part, s in zip(latents, sigmas, strict=True)
            ]
        )
        return list(self._engine(x, sigma, self._embeds).split([len(part) for part in latents]))


@dataclass
class _StepSums:
    """What the passes over one step add up."""

    data: _StepData
    scale: float
    loss: float = 0.0
    kl_to_reference: float = 0.0
    log_ratios: list[Tensor] = field(default_factory=list)
    usable: list[Tensor] = field(default_factory=list)


def _advantages(group: RolloutGroup, config: Config) -> Advantages:
    trained = config.trained_rewards
    rows = [group.reward_names.index(name) for name in trained]
    return integrate_advantages(
        group.rewards[rows],
        [reward.weight for reward in trained.values()],
        clamp=config.advantage.clamp,
        min_spread=config.advantage.min_spread,
        normalisation=config.advantage.normalisation,
        combine=config.advantage.combine,
        required=[reward.required for reward in trained.values()],
    )


@contextmanager
def _adapters_off(transformer: Any) -> Iterator[None]:
    """The model as it was before training: its weights without the adapters."""
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()
