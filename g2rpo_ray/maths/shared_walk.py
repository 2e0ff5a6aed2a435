"""Completions of all granularities from one walk that evaluates the network at some steps only.

The walk is Euler's on every step of the schedule, so that it estimates granularity 1's picture and
not the ODE's: a method of higher order leaves that picture. Where the network is not evaluated,
its velocity is extrapolated. A coarser granularity is Euler's walk on its own grid by velocities
of the shared walk, interpolated between two evaluations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from g2rpo_ray.maths.sde import euler_step


@dataclass(frozen=True)
class Evaluation:
    """One of a walk."""

    index: int
    """Of the schedule."""
    v: Tensor
    """Velocity, float32 ``[tokens, channels]``."""


def walk_ahead(
    sigmas: Sequence[float], x: Tensor, here: Evaluation, previous: Evaluation | None, to_index: int
) -> Tensor:
    """Latents at ``to_index``, by Euler's method on every step from ``here``.

    Args:
        sigmas: the schedule, T + 1 noise levels.
        x: the latents there, float32 ``[tokens, channels]``.
        here: the last evaluation. Steps that begin after it use velocities linear in the noise
            level through those of ``previous`` and it; without ``previous``, its own.
    """
    for index in range(here.index, to_index):
        v = here.v if previous is None else _between(sigmas, previous, here, index)
        x = euler_step(x, v, sigmas[index], sigmas[index + 1])
    return x


def read_steps(
    sigmas: Sequence[float],
    x: Tensor,
    grid: Sequence[int],
    here: Evaluation,
    previous: Evaluation | None,
) -> Tensor:
    """Latents of Euler's walk on a grid, moved on by the steps that an evaluation decides.

    Args:
        sigmas: the schedule, T + 1 noise levels.
        x: latents at the grid's first index from ``previous`` on.
        grid: ascending schedule indices; the last is T, where noise is 0.
        here: an evaluation. Steps that begin before it use velocities linear in the noise level
            between ``previous`` and it; a step that begins at T - 1 uses its own.
    """
    last = len(sigmas) - 2
    for index, to_index in pairwise(grid):
        if previous is not None and previous.index <= index < here.index:
            v = _between(sigmas, previous, here, index)
        elif index == here.index == last:
            v = here.v
        else:
            continue
        x = euler_step(x, v, sigmas[index], sigmas[to_index])
    return x


def _between(sigmas: Sequence[float], previous: Evaluation, here: Evaluation, index: int) -> Tensor:
    """Velocity at an index, on the line through two; also outside of them."""
    share = (sigmas[index] - sigmas[here.index]) / (sigmas[previous.index] - sigmas[here.index])
    return here.v + share * (previous.v - here.v)
