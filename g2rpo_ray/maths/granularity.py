"""Completion grids of several granularities, and the plan that shares their evaluations.

A branch of SDE step k starts at schedule index k + 1. Its completion of granularity g walks the
indices ``k + 1, k + 2, k + 2 + g, k + 2 + 2g, ...`` (arXiv 2510.01982, section 3.3; with the offset
of the published code) and the x_0 prediction of its last evaluation is the result. Where the grid
stops above index T (for example odd k with g = 2 at T = 16) that prediction still is the result:
this is the published behaviour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


def completion_indices(steps: int, sde_step: int, granularity: int) -> list[int]:
    """Schedule indices that a completion visits; every one but the last is evaluated.

    Args:
        steps: T, the length of the schedule.
        sde_step: k, in 0 .. T - 2.
        granularity: at least 1; 1 keeps every step of the schedule.

    Raises:
        ValueError: an argument is out of range.
    """
    if granularity < 1:
        raise ValueError(f"granularity is {granularity}; it must be at least 1")
    if not 0 <= sde_step <= steps - 2:
        raise ValueError(
            f"SDE step {sde_step} is out of range; with {steps} steps the allowed ones are "
            f"0 to {steps - 2}"
        )
    return [sde_step + 1, *range(sde_step + 2, steps + 1, granularity)]


def evaluated_indices(steps: int, sde_step: int, stride: int) -> list[int]:
    """Schedule indices at which a walk that all granularities share is evaluated.

    Args:
        stride: every so many steps of the schedule from the branch on, and at the last, T - 1.
    """
    return [*range(sde_step + 1, steps - 1, stride), steps - 1]


@dataclass
class PlanNode:
    """One evaluation of a branch, shared by all granularities whose grids reach it alike."""

    index: int
    """Schedule index at which the network is evaluated."""
    children: "dict[int, PlanNode]" = field(default_factory=dict)
    """Next index of a grid -> the evaluation there."""
    completes: list[int] = field(default_factory=list)
    """Positions (in the recipe's list) of the granularities whose result is complete with this."""
    depth: int = 1
    """Evaluations on the longest path from here to a result, this one included."""

    @property
    def indices(self) -> list[int]:
        """Schedule indices of all evaluations in the tree below and including this node."""
        found, open_nodes = list[int](), [self]
        while open_nodes:
            node = open_nodes.pop()
            found.append(node.index)
            open_nodes += node.children.values()
        return found

    @property
    def evaluations(self) -> int:
        """Evaluations in the whole tree below and including this node."""
        return len(self.indices)


def branch_plan(
    steps: int, sde_step: int, granularities: Sequence[int], stride: int = 1
) -> PlanNode:
    """Tree of the evaluations that one branch needs.

    With stride 1 each granularity walks its own grid, and common prefixes are merged; above 1 one
    walk serves all of them (``maths/shared_walk.py``).
    """
    root = PlanNode(index=sde_step + 1)
    for position, granularity in enumerate(granularities):
        node = root
        if stride > 1:
            path = evaluated_indices(steps, sde_step, stride)
        else:
            # Nothing is evaluated where the last step ends.
            path = completion_indices(steps, sde_step, granularity)[:-1]
        node.depth = max(node.depth, len(path))
        for passed, index in enumerate(path[1:], 1):
            node = node.children.setdefault(index, PlanNode(index))
            node.depth = max(node.depth, len(path) - passed)
        node.completes.append(position)
    return root


@dataclass(frozen=True)
class RolloutCounts:
    """What one prompt costs."""

    groups: int
    """Trained SDE steps: in each of them the members are compared."""
    evaluations: int
    """Velocity predictions of a single latent, anchor included."""
    pictures: int
    """Decoded and scored pictures."""
    learner_passes: int
    """Forward/backward passes over a single latent in the learner."""


def count_g2rpo(
    steps: int,
    sde_steps: Sequence[int],
    granularities: Sequence[int],
    members: int,
    stride: int = 1,
) -> RolloutCounts:
    """Exact counts of a G2RPO prompt with shared prefixes and no evaluation for the SDE step.

    The anchor is counted whole (T evaluations): its end is the picture that progress is shown on.
    """
    branches = sum(branch_plan(steps, k, granularities, stride).evaluations for k in sde_steps)
    return RolloutCounts(
        groups=len(sde_steps),
        evaluations=steps + members * branches,
        pictures=len(sde_steps) * len(granularities) * members,
        learner_passes=len(sde_steps),
    )


def compressed_indices(steps: int, first: int, ratio: float) -> list[int]:
    """Schedule indices from ``first`` to ``steps`` when only a share of the steps is walked.

    Args:
        steps: T, the length of the schedule.
        first: index that the compressed walk starts at.
        ratio: share of the steps that is kept, in (0, 1]; at least one is.
    """
    remaining = steps - first
    kept = max(1, round(ratio * remaining))
    return [first + round(remaining * number / kept) for number in range(kept + 1)]


def count_walks(
    indices: Sequence[int], first_sde_step: int, trained: int, members: int, shared: bool
) -> RolloutCounts:
    """Exact counts of a prompt whose members each walk their own trajectory.

    Args:
        indices: schedule indices that are visited; every one but the last is evaluated.
        first_sde_step: members with a shared initial noise are alike, and walked once, up to here.
        trained: K.
        members: M.
        shared: whether the members start from the same noise.
    """
    alike = indices.index(first_sde_step) if shared else 0
    return RolloutCounts(
        groups=trained,
        evaluations=alike + members * (len(indices) - 1 - alike),
        pictures=members,
        learner_passes=trained * members,
    )


def count_published_order(
    steps: int, sde_steps: Sequence[int], granularities: Sequence[int], members: int
) -> int:
    """Evaluations of the published order: one image at a time, nothing shared."""
    per_member = sum(
        1 + sum(len(completion_indices(steps, k, g)) - 1 for g in granularities) for k in sde_steps
    )
    return steps + members * per_member
