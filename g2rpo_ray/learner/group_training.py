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
from g2rpo_ray.sampling.group import RolloutGroup


@dataclass(frozen=True)
class StepRecord:
    """Health of one (group, SDE step), or of the part of its members in an update."""

    group_id: int
    position: int
    update: int
    """Optimizer steps of this iteration before it; 0 means that the ratio must be 1."""
    loss: float
    health: PolicyHealth
    """Of the members that are left; says nothing where the group is not valid. NaN where there is
    no ratio."""
    kl_to_reference: float
    """KL of the policy's step from the reference's; of the forward process |v - v_ref|^2. 0 where
    ``learner.kl_weight`` is 0."""
    valid: bool
    """False where the group was dropped for an invalid reward, or no member is left."""
    masked_members: int
    """Members left out because their ratio is not finite."""
    advantage_abs_mean: float
    advantage_clamped_share: float


@dataclass
class Step:
    """One stochastic step of a group on this rank's device, and what the passes over it add up;
    dimensions as in RolloutGroup."""

    position: int
    sigmas: Tensor
    """float32 ``[L]``."""
    latents: Tensor
    """float32 ``[L, tokens, channels]``: x_k."""
    target: Tensor
    """float32 ``[M, tokens, channels]``: x_{k+1}; noise - x_0 of the forward process."""
    old_velocities: Tensor
    """float32 ``[L, tokens, channels]``."""
    advantages: Tensor
    """float32 ``[M]``."""
    members: slice
    """Those of the part that is trained on."""
    valid: bool
    scale: float
    """Of its loss in the update's."""
    loss: float = 0.0
    kl_to_reference: float = 0.0
    log_ratios: list[Tensor] = field(default_factory=list)
    usable: list[Tensor] = field(default_factory=list)


_Piece = tuple[Step, slice, slice]
"""A step with the rows and members of it that are in a pass."""


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
        self._parts = group.passes(batch_size, config.learner.updates_per_iteration)
        # What broke the network in the rollout would break it here again. It is in a dropped group:
        # as zeros it cannot spoil the gradient.
        sound = (group.latents.isfinite() & group.velocities.isfinite()).flatten(2).all(dim=2)
        whole = sound.all(dim=0, keepdim=True) if group.times is not None else sound
        self._group = replace(
            group,
            latents=torch.where(whole[..., None, None], group.latents, 0.0),
            velocities=torch.where(sound[..., None, None], group.velocities, 0.0),
        )
        self._embeds = group.prompt.embeds.to(device)
        self._advantages = _advantages(group, config)
        self._old_velocities = self._group.velocities

    @torch.no_grad()
    def recompute_old_velocities(self) -> None:
        """Take this rank's own velocities for old, in the batches of the passes to come."""
        rows = [rows for part in self._parts for rows, _ in part]
        if self._group.latents.shape[1] == 1:
            rows = rows[:1]
        self._old_velocities = torch.stack(
            [
                torch.cat([self._velocities([x[r]], [sigmas[r]])[0] for r in rows])
                for x, sigmas in map(self._begin, range(len(self._group.sde_steps)))
            ]
        )

    def backward(
        self,
        positions: Sequence[int],
        *,
        part: int,
        scales: Sequence[float],
        update: int,
        last: bool,
    ) -> list[StepRecord]:
        """Add the gradients of some steps and one part of the members; ``last`` ends the
        accumulation.

        Several steps are one pass of the network; a single one is as many as its latents need.
        """
        batches = self._parts[part]
        members = slice(batches[0][1].start, batches[-1][1].stop)
        steps = [self._step(p, members, s) for p, s in zip(positions, scales, strict=True)]
        passes: list[list[_Piece]] = [[(step, *batch)] for step in steps for batch in batches]
        if len(batches) == 1:
            passes = [[(step, *batches[0]) for step in steps]]
        for number, parts in enumerate(passes, start=1):
            total = self._add_pass(parts, update)
            self._engine.backward(total, last=last and number == len(passes))
        return [self._record(step, update) for step in steps]

    def _add_pass(self, parts: list[_Piece], update: int) -> Tensor:
        """One pass: adds to the sums of its steps, and returns the scaled loss of all of them."""
        x = [step.latents[rows] for step, rows, _ in parts]
        sigmas = [step.sigmas[rows] for step, rows, _ in parts]
        velocities = self._velocities(x, sigmas)
        self._require_finite(velocities, parts)
        references: Sequence[Tensor | None] = [None] * len(parts)
        if self._config.learner.kl_weight > 0:
            with torch.no_grad(), _adapters_off(self._engine.policy.transformer):
                of_reference = self._velocities(x, sigmas)
            self._require_finite(of_reference, parts)
            references = of_reference
        shares, numbers = list[float](), list[Tensor]()
        total = torch.zeros((), device=self._device)
        for (step, rows, members), velocity, reference in zip(
            parts, velocities, references, strict=True
        ):
            policy, divergence = self._loss(step, velocity, reference, rows, members, update)
            loss = policy.loss
            if reference is not None:
                loss = loss + self._config.learner.kl_weight * divergence
            share = len(policy.usable) * len(self._parts) / self._group.members
            total = total + loss * (share * step.scale if step.valid else 0.0)
            shares.append(share)
            numbers += [loss.detach(), divergence.detach()]
            step.log_ratios.append(policy.log_ratio)
            step.usable.append(policy.usable)
        # All at once: a number that the host reads waits for the card.
        of_steps = torch.stack(numbers).view(-1, 2).tolist()
        for (step, _, _), share, (number, divergence) in zip(parts, shares, of_steps, strict=True):
            step.loss += number * share
            step.kl_to_reference += divergence * share
        return total

    def _record(self, step: Step, update: int) -> StepRecord:
        group, position, usable = self._group, step.position, torch.cat(step.usable)
        sizes = step.advantages[step.members].abs()
        clamped = sizes >= self._config.advantage.clamp
        numbers = (~usable).float().sum(), sizes.mean(), clamped.float().mean()
        masked, abs_mean, clamped_share = torch.stack(numbers).tolist()
        if step.valid and masked and self._config.advantage.on_invalid == "stop":
            raise LearnerError(
                f"group {group.key.group_id}, SDE step {group.step_indices[position]}: the ratio "
                f"of {masked:.0f} of {len(usable)} members is not finite (with "
                "advantage.on_invalid: drop_group such members are left out)"
            )
        return StepRecord(
            group_id=group.key.group_id,
            position=position,
            update=update,
            loss=step.loss,
            health=self._health(step, usable if masked else slice(None)),
            kl_to_reference=step.kl_to_reference,
            valid=step.valid and masked < len(usable),
            masked_members=int(masked),
            advantage_abs_mean=abs_mean,
            advantage_clamped_share=clamped_share,
        )

    def _health(self, step: Step, left: Tensor | slice) -> PolicyHealth:
        """Of the members that are left."""
        advantages, log_ratios = step.advantages[step.members], torch.cat(step.log_ratios)
        return policy_health(log_ratios[left], advantages[left], self._config.learner.clip)

    def _loss(
        self,
        step: Step,
        velocity: Tensor,
        reference: Tensor | None,
        rows: slice,
        members: slice,
        update: int,
    ) -> tuple[PolicyLoss, Tensor]:
        """The policy's loss, and its KL to the reference (0 without one)."""
        settings, sde = self._config.learner, self._group.sde_steps[step.position]
        x, next_x = step.latents[rows], step.target[members]
        mean = sde.mean(x, velocity)
        if update == 0 and settings.old_log_prob == "learner":
            old_mean = mean.detach()
        else:
            old_mean = sde.mean(x, step.old_velocities[rows])
        form = self._config.sampling.log_prob
        log_prob = sde.log_prob(next_x, mean, form)
        old_log_prob = sde.log_prob(next_x, old_mean, form)
        if settings.normalise_ratio:
            log_prob = normalise_log_prob(log_prob, mean, old_mean, sde.std)
            old_log_prob = normalise_log_prob(old_log_prob, old_mean, old_mean, sde.std)
        policy = clipped_policy_loss(
            log_prob, old_log_prob, step.advantages[members], settings.clip
        )
        if reference is None:
            return policy, torch.zeros_like(policy.loss)
        return policy, gaussian_kl(mean, sde.mean(x, reference), sde.std)

    def _require_finite(self, velocities: Sequence[Tensor], parts: list[_Piece]) -> None:
        """Before their backward pass: behind a broken activation even a zero gradient is NaN."""
        finite = torch.cat(list(velocities)).isfinite()
        if bool(finite.all()):
            return
        group = self._group
        sound = finite.flatten(1).all(dim=1).split([len(part) for part in velocities])
        step, rows, of_step = next(
            (step, rows, of_step)
            for (step, rows, _), of_step in zip(parts, sound, strict=True)
            if not bool(of_step.all())
        )
        numbers = range(group.latents.shape[1])[rows]
        members = [
            str(n) for n, is_sound in zip(numbers, of_step.tolist(), strict=True) if not is_sound
        ]
        who = "all members" if group.latents.shape[1] == 1 else f"member {', '.join(members)}"
        raise LearnerError(
            f"group {group.key.group_id}, prompt {group.prompt.text!r:.80}, "
            f"{'SDE step' if group.times is None else 'time'} "
            f"{group.step_indices[step.position]}: the network's prediction for {who} is not "
            "finite, and no gradient can be taken through it, whatever advantage.on_invalid says. "
            "The optimizer's step was not made: resume from an earlier checkpoint with a smaller "
            "learner.learning_rate, or with model.dtype: float32"
        )

    def _step(self, position: int, members: slice, scale: float) -> Step:
        # No copy is waited for: what is not pinned is staged before the call returns.
        latents, sigmas, target = self._inputs(position)
        return Step(
            position=position,
            sigmas=sigmas,
            latents=latents,
            target=target,
            old_velocities=self._old_velocities[position].to(self._device, non_blocking=True),
            advantages=self._advantages.values[position].to(self._device, non_blocking=True),
            members=members,
            valid=bool(self._advantages.valid[position]),
            scale=scale,
        )

    def _inputs(self, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, sigmas and target of ``Step``, on the device."""
        target = self._group.next_latents(position).to(self._device, non_blocking=True)
        return *self._begin(position), target

    def _begin(self, position: int) -> tuple[Tensor, Tensor]:
        """x_k and its noise levels, on the device."""
        latents = self._group.latents[position].to(self._device, non_blocking=True)
        sigma = self._group.sde_steps[position].sigma
        return latents, torch.full((len(latents),), sigma, device=self._device)

    def _velocities(self, latents: Sequence[Tensor], sigmas: Sequence[Tensor]) -> list[Tensor]:
        """float32 ``[B_i, tokens, channels]`` of several latents at their own noise levels."""
        x, sigma = torch.cat(list(latents)), torch.cat(list(sigmas))
        return list(self._engine(x, sigma, self._embeds).split([len(part) for part in latents]))


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
