"""One iteration's update: rollout groups in, optimizer steps and health metrics out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from g2rpo_ray.algorithm.advantage import Advantages, integrate_advantages
from g2rpo_ray.algorithm.objective import (
    PolicyHealth,
    PolicyLoss,
    clipped_policy_loss,
    gaussian_kl,
    normalise_log_prob,
    policy_health,
    step_weights,
)
from g2rpo_ray.algorithm.sde import SdeStep
from g2rpo_ray.config import Config
from g2rpo_ray.learner.engine import LearnerEngine, LearnerError
from g2rpo_ray.rollout.group import RolloutGroup


@dataclass(frozen=True)
class Assignment:
    """A group on this rank. Ranks make equally many passes, since collectives pair up: where
    prompts do not divide evenly, a rank repeats a group with weight 0."""

    group: RolloutGroup
    weight: float


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
class UpdateReport:
    """What a rank did in one iteration."""

    records: list[StepRecord]
    grad_norms: list[float]
    """Before clipping, one for each optimizer step; the same on every rank."""
    learning_rate: float


def assign(group_count: int, rank: int, ranks: int) -> list[tuple[int, float]]:
    """(index of the group in id order, weight) of every pass of a rank, as many on every rank."""
    passes = -(-group_count // ranks)
    slots = [rank + ranks * number for number in range(passes)]
    return [(slot % group_count, 1.0 if slot < group_count else 0.0) for slot in slots]


def update_on_groups(
    engine: LearnerEngine,
    assignments: Sequence[Assignment],
    *,
    config: Config,
    prompts: int,
    ranks: int,
    device: torch.device,
) -> UpdateReport:
    """Passes for each (prompt, SDE step); a step of the optimizer per SDE step or at the end.

    The loss is the mean over ``prompts`` (and over SDE steps, with ``per_iteration``), whatever the
    number of ranks: DeepSpeed averages gradients over ranks, so each rank scales by their number.
    A dropped group counts as zero.

    Raises:
        LearnerError: a ratio is not finite, and the run is to stop then.
    """
    settings = config.learner
    steps = assignments[0].group.sde_steps
    per_step = settings.update == "per_sde_step"
    scale = ranks / prompts / (1 if per_step else len(steps))
    weights = step_weights(steps, settings.step_weight)
    trainings = [_GroupTraining(engine, a.group, config, device) for a in assignments]
    if settings.old_log_prob == "learner" and per_step:
        # Before the only update of an iteration, old and new are the same forward pass.
        for training in trainings:
            training.recompute_old_velocities()
    records: list[StepRecord] = []
    grad_norms: list[float] = []
    learning_rate = engine.learning_rate

    for position, step_weight in enumerate(weights):
        for training, assignment in zip(trainings, assignments, strict=True):
            last_of_step = training is trainings[-1]
            last = last_of_step and (per_step or position == len(steps) - 1)
            record = training.backward(
                position,
                scale=assignment.weight * step_weight * scale,
                update=len(grad_norms),
                last=last,
            )
            if assignment.weight > 0:
                records.append(record)
        if last:
            grad_norms.append(engine.step())
    return UpdateReport(records, grad_norms, learning_rate)


@dataclass(frozen=True)
class _StepData:
    """One stochastic step of a group, on this rank's device; dimensions as in RolloutGroup."""

    step: SdeStep
    latents: Tensor
    """float32 ``[L, tokens, channels]``: x_k."""
    next_latents: Tensor
    """float32 ``[M, tokens, channels]``: x_{k+1}."""
    old_velocities: Tensor
    """float32 ``[L, tokens, channels]``."""
    advantages: Tensor
    """float32 ``[M]``."""


class _GroupTraining:
    """One group on one rank: its advantages, and the passes over its steps."""

    def __init__(
        self, engine: LearnerEngine, group: RolloutGroup, config: Config, device: torch.device
    ) -> None:
        self._engine, self._config, self._device = engine, config, device
        # A dropped group may hold infinite numbers; as zeros they cannot spoil the gradient.
        self._group = replace(
            group,
            latents=group.latents.nan_to_num(0.0, 0.0, 0.0),
            velocities=group.velocities.nan_to_num(0.0, 0.0, 0.0),
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
                        self._velocity(latents[rows].to(self._device), step.sigma)
                        for rows, _ in self._group.passes()
                    ]
                )
                for latents, step in zip(self._group.latents, self._group.sde_steps, strict=True)
            ]
        )

    def backward(self, position: int, *, scale: float, update: int, last: bool) -> StepRecord:
        """Add the gradient of one step; ``last`` ends the accumulation."""
        settings, group, data = self._config.learner, self._group, self._step_data(position)
        valid = bool(self._advantages.valid[position])
        passes = group.passes()
        loss, kl_to_reference = 0.0, 0.0
        log_ratios, usable = [], []
        for number, (rows, members) in enumerate(passes):
            policy, divergence = self._forward(data, rows, members, update)
            pass_loss = policy.loss + settings.kl_weight * divergence
            share = len(policy.usable) / group.members
            self._engine.backward(
                pass_loss * (share * scale if valid else 0.0),
                last=last and number == len(passes) - 1,
            )
            loss += float(pass_loss.detach()) * share
            kl_to_reference += float(divergence.detach()) * share
            log_ratios.append(policy.log_ratio)
            usable.append(policy.usable)

        masked = int((~torch.cat(usable)).sum())
        if valid and masked and self._config.advantage.on_invalid == "stop":
            raise LearnerError(
                f"group {group.key.group_id}, SDE step {group.step_indices[position]}: the ratio "
                f"of {masked} of {group.members} members is not finite (with "
                "advantage.on_invalid: drop_group such members are left out)"
            )
        sizes = data.advantages.abs()
        return StepRecord(
            group_id=group.key.group_id,
            position=position,
            update=update,
            loss=loss,
            health=policy_health(torch.cat(log_ratios), data.advantages, settings.clip),
            kl_to_reference=kl_to_reference,
            valid=valid,
            masked_members=masked,
            advantage_abs_mean=float(sizes.mean()),
            advantage_clamped_share=float((sizes >= self._config.advantage.clamp).float().mean()),
        )

    def _forward(
        self, data: _StepData, rows: slice, members: slice, update: int
    ) -> tuple[PolicyLoss, Tensor]:
        """One pass: the policy's loss, and its KL to the reference (0 where it has no weight)."""
        settings, step = self._config.learner, data.step
        x, next_x = data.latents[rows], data.next_latents[members]
        velocity = self._velocity(x, step.sigma)
        # A broken prediction is masked, so that it reaches no gradient, and counted by its NaN.
        sound = velocity.isfinite().all(dim=-1).all(dim=-1)
        mean = step.mean(x, torch.where(sound[:, None, None], velocity, 0.0))
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
        log_prob = torch.where(sound, log_prob, torch.nan)
        policy = clipped_policy_loss(
            log_prob, old_log_prob, data.advantages[members], settings.clip
        )
        if settings.kl_weight == 0:
            return policy, torch.zeros_like(policy.loss)
        with torch.no_grad(), _adapters_off(self._engine.policy.transformer):
            reference_mean = step.mean(x, self._velocity(x, step.sigma))
        return policy, gaussian_kl(mean, reference_mean, step.std)

    def _step_data(self, position: int) -> _StepData:
        return _StepData(
            step=self._group.sde_steps[position],
            latents=self._group.latents[position].to(self._device),
            next_latents=self._group.next_latents(position).to(self._device),
            old_velocities=self._old_velocities[position].to(self._device),
            advantages=self._advantages.values[position].to(self._device),
        )

    def _velocity(self, x: Tensor, sigma: float) -> Tensor:
        return self._engine(x, torch.full((len(x),), sigma, device=x.device), self._embeds)


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
def _adapters_off(transformer: FluxTransformer2DModel) -> Iterator[None]:
    """The model as it was before training: its weights without the adapters."""
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()
