"""One iteration's update: rollout groups in, optimizer steps and health metrics out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g2rpo_ray.config import Config
from g2rpo_ray.learner.engine import LearnerEngine
from g2rpo_ray.learner.group_training import GroupTraining, StepRecord
from g2rpo_ray.maths.objective import step_weights
from g2rpo_ray.sampling.group import RolloutGroup


@dataclass(frozen=True)
class Assignment:
    """A group on this rank. Ranks have equally many, since collectives pair up: where prompts do
    not divide evenly, a rank repeats a group with weight 0."""

    group: RolloutGroup
    weight: float


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
    A dropped group counts as zero; where all are dropped, the weights stay as they are. All groups
    are passed in the smallest of their batch sizes, on whichever rank: ranks make equally many
    passes.

    Raises:
        LearnerError: the network's prediction is not finite; or a ratio, and the run is to stop.
    """
    settings, steps = config.learner, assignments[0].group.sde_steps
    per_step = settings.update == "per_sde_step"
    scale = ranks / prompts / (1 if per_step else len(steps))
    scales = [weight * scale for weight in step_weights(steps, settings.step_weight)]
    # A worker that ran out of memory, or has another card, may have drawn in smaller batches.
    batch_size = engine.smallest_of_ranks(min(a.group.batch_size for a in assignments))
    trainings = [
        (GroupTraining(engine, a.group, config, device, batch_size), a.weight) for a in assignments
    ]
    if settings.old_log_prob == "learner" and per_step:
        # Before the only update of an iteration, old and new are the same forward pass.
        for training, _ in trainings:
            training.recompute_old_velocities()
    records: list[StepRecord] = []
    grad_norms: list[float] = []
    learning_rate, learned = engine.learning_rate, False
    for first in range(0, len(steps), settings.steps_per_pass):
        positions = range(first, min(first + settings.steps_per_pass, len(steps)))
        last_of_update = per_step or positions[-1] == len(steps) - 1
        done = _backward(trainings, positions, scales, len(grad_norms), last_of_update)
        records += done
        learned = learned or any(record.valid for record in done)
        if last_of_update:
            # A group on another rank is enough.
            nowhere = engine.smallest_of_ranks(0 if learned else 1) == 1
            grad_norms.append(engine.step(hold=nowhere))
            learned = False
    return UpdateReport(records, grad_norms, learning_rate)


def _backward(
    trainings: Sequence[tuple[GroupTraining, float]],
    positions: Sequence[int],
    scales: Sequence[float],
    update: int,
    last: bool,
) -> list[StepRecord]:
    """Gradients of some steps of all groups; the records of those that count (weight above 0)."""
    records: list[StepRecord] = []
    for number, (training, weight) in enumerate(trainings, start=1):
        done = training.backward(
            positions,
            scales=[weight * scales[position] for position in positions],
            update=update,
            last=last and number == len(trainings),
        )
        records += done if weight > 0 else []
    return records
