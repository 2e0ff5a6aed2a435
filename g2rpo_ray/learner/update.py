"""One iteration's update: rollout groups in, optimizer steps and health metrics out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo_ray.algorithm.advantage import Advantages, integrate_advantages
from g2rpo_ray.algorithm.objective import PolicyLoss, clipped_policy_loss
from g2rpo_ray.config import Config
from g2rpo_ray.learner.engine import LearnerEngine
from g2rpo_ray.models.embeds import PromptEmbeds
from g2rpo_ray.rollout.group import RolloutGroup


@dataclass(frozen=True)
class Assignment:
    """A group on this rank. Ranks make equally many passes, since collectives pair up: where
    prompts do not divide evenly, a rank repeats a group with weight 0."""

    group: RolloutGroup
    weight: float


@dataclass(frozen=True)
class StepRecord:
    """Health of one (group, SDE step) pass."""

    group_id: int
    position: int
    update: int
    """Optimizer steps of this iteration before the pass; 0 means that the ratio must be 1."""
    loss: float
    ratio_mean: float
    max_abs_log_ratio: float
    approx_kl: float
    clip_fraction_low: float
    clip_fraction_high: float
    valid: bool
    """False where the group was dropped for an invalid reward."""
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
    """One pass for each (prompt, SDE step); a step of the optimizer per SDE step or at the end.

    The loss is the mean over ``prompts`` (and over SDE steps, with ``per_iteration``), whatever the
    number of ranks: DeepSpeed averages gradients over ranks, so each rank scales by their number.
    A dropped group counts as zero.
    """
    settings = config.learner
    positions = range(len(assignments[0].group.sde_steps))
    per_step = settings.update == "per_sde_step"
    scale = ranks / prompts / (1 if per_step else len(positions))
    advantages = [_advantages(a.group, config) for a in assignments]
    embeds = [a.group.prompt.embeds.to(device) for a in assignments]
    records: list[StepRecord] = []
    grad_norms: list[float] = []
    learning_rate = engine.learning_rate

    for position in positions:
        for number, assignment in enumerate(assignments):
            policy_loss = _policy_loss(
                engine, assignment.group, position, advantages[number], embeds[number], config
            )
            last_of_step = number == len(assignments) - 1
            last = last_of_step and (per_step or position == positions[-1])
            engine.backward(policy_loss.loss * assignment.weight * scale, last=last)
            if assignment.weight > 0:
                records.append(
                    _record(assignment.group, position, len(grad_norms), policy_loss,
                            advantages[number], config.advantage.clamp)
                )  # fmt: skip
        if last:
            grad_norms.append(engine.step())
    return UpdateReport(records, grad_norms, learning_rate)


def _advantages(group: RolloutGroup, config: Config) -> Advantages:
    trained = config.trained_rewards
    rows = [group.reward_names.index(name) for name in trained]
    return integrate_advantages(
        group.rewards[rows],
        [reward.weight for reward in trained.values()],
        clamp=config.advantage.clamp,
        min_spread=config.advantage.min_spread,
        normalisation=config.advantage.normalisation,
    )


def _policy_loss(
    engine: LearnerEngine,
    group: RolloutGroup,
    position: int,
    advantages: Advantages,
    embeds: PromptEmbeds,
    config: Config,
) -> PolicyLoss:
    step, form = group.sde_steps[position], config.sampling.log_prob
    device = embeds.t5.device
    x = group.latents[position].to(device)
    next_x = group.next_latents(position).to(device)
    old_mean = step.mean(x, group.velocities[position].to(device))
    sigma = torch.full((len(x),), step.sigma, device=device)

    velocity: Tensor = engine(x, sigma, embeds)
    log_prob = step.log_prob(next_x, step.mean(x, velocity), form)
    old_log_prob = step.log_prob(next_x, old_mean, form)
    return clipped_policy_loss(
        log_prob, old_log_prob, advantages.values[position].to(device), config.learner.clip
    )


def _record(
    group: RolloutGroup,
    position: int,
    update: int,
    policy_loss: PolicyLoss,
    advantages: Advantages,
    clamp: float,
) -> StepRecord:
    values = advantages.values[position].abs()
    return StepRecord(
        group_id=group.key.group_id,
        position=position,
        update=update,
        loss=float(policy_loss.loss.detach()),
        ratio_mean=policy_loss.ratio_mean,
        max_abs_log_ratio=policy_loss.max_abs_log_ratio,
        approx_kl=policy_loss.approx_kl,
        clip_fraction_low=policy_loss.clip_fraction_low,
        clip_fraction_high=policy_loss.clip_fraction_high,
        valid=bool(advantages.valid[position]),
        advantage_abs_mean=float(values.mean()),
        advantage_clamped_share=float((values >= clamp).float().mean()),
    )
