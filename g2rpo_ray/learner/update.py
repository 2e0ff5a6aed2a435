"""One iteration's update: rollout groups in, optimizer steps and health metrics out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from g2rpo_ray.config import Config
from g2rpo_ray.learner.engine import LearnerEngine
from g2rpo_ray.learner.forward_training import ForwardTraining
from g2rpo_ray.learner.group_training import GroupTraining, StepRecord
from g2rpo_ray.maths.objective import step_weights
from g2rpo_ray.sampling.group import RolloutGroup


@dataclass(frozen=True)
class UpdateReport:
    """One iteration's update: of one rank, or of all."""

    records: list[StepRecord]
    """Every (group, SDE step) once in each update that it is in, in the order of group and
    position."""
    grad_norms: list[float]
    """Before clipping, one for each optimizer step; the same on every rank."""
    learning_rate: float

    @property
    def taught(self) -> bool:
        """Whether any group was trained on; else the weights are as they were."""
        return any(record.valid for record in self.records)


def assign(group_count: int, rank: int, ranks: int) -> list[tuple[int, float]]:
    """(index of the group in id order, weight) of every pass of a rank.

    Ranks have equally many, since collectives pair up: where prompts do not divide evenly, a rank
    repeats a group with weight 0.
    """
    passes = -(-group_count // ranks)
    slots = [rank + ranks * number for number in range(passes)]
    return [(slot % group_count, 1.0 if slot < group_count else 0.0) for slot in slots]


def update_on_groups(
    engine: LearnerEngine,
    groups: Sequence[RolloutGroup],
    weights: Sequence[float],
    *,
    config: Config,
    prompts: int,
    ranks: int,
    device: torch.device,
) -> UpdateReport:
    """Passes for each (prompt, SDE step); a step of the optimizer per SDE step, or over all of them
    for each part of the members.

    The loss is the mean over ``prompts`` (and over SDE steps, with ``per_iteration``), whatever the
    number of ranks: DeepSpeed averages gradients over ranks, so each rank scales by their number.
    A dropped group counts as zero; where all are dropped, the weights stay as they are. All groups
    are passed in the smallest of their batch sizes, on whichever rank: ranks make equally many
    passes. Old log-probabilities are of before the first update.

    Args:
        weights: of this rank's groups, see ``assign``.
        prompts: of the iteration, on all ranks.

    Raises:
        LearnerError: the network's prediction is not finite; or a ratio, and the run is to stop.
    """
    settings, steps = config.learner, groups[0].step_indices
    per_step = settings.update == "per_sde_step"
    scale = ranks / prompts / (1 if per_step else len(steps))
    # Levels of the forward process weigh alike.
    step_weight = step_weights(groups[0].sde_steps, settings.step_weight) or [1.0] * len(steps)
    scales = [weight * scale for weight in step_weight]
    # A worker that ran out of memory, or has another card, may have drawn in smaller batches.
    batch_size = engine.smallest_of_ranks(min(group.batch_size for group in groups))
    kind = GroupTraining if groups[0].times is None else ForwardTraining
    trainings = [kind(engine, group, config, device, batch_size) for group in groups]
    if settings.old_log_prob == "learner" and (per_step or settings.updates_per_iteration > 1):
        # Before the only update of an iteration, old and new are the same forward pass.
        for training in trainings:
            training.recompute_old_velocities()
    records: list[StepRecord] = []
    grad_norms: list[float] = []
    learning_rate, learned = engine.learning_rate, False
    firsts = range(0, len(steps), settings.steps_per_pass)
    for part, first in product(range(settings.updates_per_iteration), firsts):
        positions = range(first, min(first + settings.steps_per_pass, len(steps)))
        last_of_update = per_step or positions[-1] == len(steps) - 1
        for training, weight in zip(trainings, weights, strict=True):
            done = training.backward(
                positions,
                part=part,
                scales=[weight * scales[position] for position in positions],
                update=len(grad_norms),
                last=last_of_update and training is trainings[-1],
            )
            if weight > 0:
                records += done
                learned = learned or any(record.valid for record in done)
        if last_of_update:
            # A group on another rank is enough.
            nowhere = engine.smallest_of_ranks(0 if learned else 1) == 1
            grad_norms.append(engine.step(hold=nowhere))
            learned = False
    if config.draws_average:
        engine.move_old_policy(config.diffusion_nft.decay(engine.updates))
    return UpdateReport(records, grad_norms, learning_rate)
