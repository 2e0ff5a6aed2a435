"""Sigma schedules: T + 1 numbers from 1 (noise) down to 0 (picture).

In float64 by default. The engine asks for float32, since diffusers' scheduler and the published
code compute the schedule in float32: networks multiply sigma by 1000 before they take sines, and so
turn the last bit of sigma into a relative difference of 5e-6 in the latents.
"""

import torch
from torch import Tensor


def static_shift_schedule(steps: int, shift: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Linear schedule with the static shift of SD3 and of the GRPO papers.

    ``s_i = shift * t_i / (1 + (shift - 1) * t_i)`` with ``t_i = 1 - i / steps``
    (arXiv 2403.03206, eq. 23).

    Args:
        steps: number of evaluations T of one trajectory, at least 1.
        shift: > 0; 1 is the linear schedule, 3 is what the papers use.
        dtype: of the arithmetic and of the result.

    Returns:
        ``[steps + 1]``, strictly decreasing from 1 to 0.

    Raises:
        ValueError: ``steps`` below 1 or ``shift`` not positive.
    """
    if shift <= 0:
        raise ValueError(
            f"shift is {shift}; it must be greater than 0 (1 leaves the schedule linear)"
        )
    times = _linear_times(steps, dtype)
    return _starting_at_one(shift * times / (1 + (shift - 1) * times))


def _linear_times(steps: int, dtype: torch.dtype) -> Tensor:
    if steps < 1:
        raise ValueError(f"steps is {steps}; a schedule needs at least 1 step")
    return torch.linspace(1, 0, steps + 1, dtype=dtype)


def _starting_at_one(sigmas: Tensor) -> Tensor:
    # Rounding gives 1 - 2e-16 for some shifts: there the flow SDE has a pole (see SdeStep).
    sigmas[0] = 1.0
    return sigmas
