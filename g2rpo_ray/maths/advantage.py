"""Group-normalised advantages, integrated over granularities and rewards.

A group is the G members that share (prompt, SDE step). Rewards are compared only inside one
(group, reward, granularity), z-scored there, weighted, summed and clamped once
(arXiv 2510.01982, eq. 12-13). Several rewards are added as advantages, after normalisation; the
alternative is to z-score their weighted sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo_ray.maths.choices import Combination, Normalisation


@dataclass(frozen=True)
class Advantages:
    """Integrated advantages of one prompt and what was left out of them."""

    values: Tensor
    """float32 ``[K, M]``; zero where the group is invalid or constant in every reward."""
    valid: Tensor
    """bool ``[K]``: False where a required reward is NaN or infinite, or no reward is left."""
    constant: Tensor
    """bool ``[R, granularities, K]``: the spread was too small to compare members."""


def integrate_advantages(
    rewards: Tensor,
    weights: Sequence[float],
    *,
    clamp: float,
    min_spread: float,
    normalisation: Normalisation = "std",
    combine: Combination = "advantages",
    required: Sequence[bool] | None = None,
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
        combine: ``advantages`` normalises each reward by itself, then weighs and adds;
            ``rewards`` weighs and adds first, so that a reward of wide scale counts more.
        required: R flags, all set by default; where one is not, an invalid reward is left out of
            its group and the others decide.

    Raises:
        ValueError: shapes, weights or flags do not match.
    """
    if rewards.ndim != 4 or rewards.shape[-1] < 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; expected [rewards, granularities, steps, "
            "members] with at least 2 members"
        )
    if len(weights) != rewards.shape[0]:
        raise ValueError(f"{len(weights)} weights given for {rewards.shape[0]} rewards")
    needed = torch.tensor([True] * len(weights) if required is None else list(required))
    if len(needed) != len(weights):
        raise ValueError(f"{len(needed)} flags 'required' given for {len(weights)} rewards")
    rewards = rewards.double()
    usable = rewards.isfinite().all(dim=-1).all(dim=1)
    valid = (usable | ~needed[:, None]).all(dim=0) & usable.any(dim=0)
    kept = (usable & valid)[:, None, :, None]
    rewards = torch.where(kept, rewards, 0.0)
    constant = (rewards.std(dim=-1, keepdim=True) <= min_spread).squeeze(-1) & kept.squeeze(-1)

    weight = torch.tensor(weights, dtype=torch.float64).view(-1, 1, 1, 1)
    if combine == "rewards":
        rewards, weight = (weight * rewards).sum(dim=0, keepdim=True), torch.ones(1, 1, 1, 1)
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    spread = rewards.std(dim=-1, keepdim=True)
    scaled = centred / (spread + 1e-8) if normalisation == "std" else centred
    scaled = scaled.masked_fill(spread <= min_spread, 0.0)
    integrated = (weight * scaled).sum(dim=(0, 1)).clamp(-clamp, clamp)
    return Advantages(integrated.float(), valid, constant)
