"""Group-normalised advantages, integrated over granularities and rewards.

A group is the G members that share (prompt, SDE step). Rewards are compared only inside one
(group, reward, granularity), z-scored there, weighted, summed and clamped once
(arXiv 2510.01982, eq. 12-13; several rewards are added as advantages, after normalisation).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["std", "mean_only"]


@dataclass(frozen=True)
class Advantages:
    """Integrated advantages of one prompt and what was left out of them."""

    values: Tensor
    """float32 ``[K, M]``; zero where the group is invalid or constant in every reward."""
    valid: Tensor
    """bool ``[K]``: False where a reward of the group is NaN, infinite or missing."""
    constant: Tensor
    """bool ``[R, granularities, K]``: the spread was too small to compare members."""


def integrate_advantages(
    rewards: Tensor,
    weights: Sequence[float],
    *,
    clamp: float,
    min_spread: float,
    normalisation: Normalisation = "std",
) -> Advantages:
    """Turn the rewards of one prompt into one advantage per branch.

    Args:
        rewards: ``[R, granularities, K, M]``, any float dtype; NaN marks a failed reward.
        weights: R numbers, the share of each reward in the sum.
        clamp: the integrated advantage is cut to ``[-clamp, clamp]``.
        min_spread: a (reward, granularity, step) whose standard deviation is at most this counts
            as constant and gives zero: dividing by it would only amplify rounding.
        normalisation: ``std`` divides by the group's standard deviation (unbiased, as published);
            ``mean_only`` subtracts the mean and leaves the scale (arXiv 2503.20783).

    Raises:
        ValueError: shapes or weights do not match.
    """
    if rewards.ndim != 4 or rewards.shape[-1] < 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; expected [rewards, granularities, steps, "
            "members] with at least 2 members"
        )
    if len(weights) != rewards.shape[0]:
        raise ValueError(f"{len(weights)} weights given for {rewards.shape[0]} rewards")
    rewards = rewards.double()
    valid = rewards.isfinite().all(dim=-1).all(dim=0).all(dim=0)
    rewards = torch.where(valid[:, None], rewards, 0.0)

    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    spread = rewards.std(dim=-1, keepdim=True)
    constant = spread <= min_spread
    scaled = centred / (spread + 1e-8) if normalisation == "std" else centred
    scaled = scaled.masked_fill(constant, 0.0)

    weight = torch.tensor(weights, dtype=torch.float64).view(-1, 1, 1, 1)
    integrated = (weight * scaled).sum(dim=(0, 1)).clamp(-clamp, clamp)
    return Advantages(integrated.float(), valid, constant.squeeze(-1) & valid)
