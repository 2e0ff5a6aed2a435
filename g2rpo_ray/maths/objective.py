"""The clipped policy objective of a stochastic step, its options and its health."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo_ray.maths.choices import StepWeight
from g2rpo_ray.maths.sde import SdeStep


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of some members of a group, and what its health is read from."""

    loss: Tensor
    """Scalar with a graph: mean over members."""
    log_ratio: Tensor
    """``[M]`` without a graph: log p_new - log p_old; 0 where it is not usable."""
    usable: Tensor
    """bool ``[M]``: False where the ratio is not finite; such a member adds nothing to the loss."""


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip: float
) -> PolicyLoss:
    """PPO's clipped surrogate, ``mean(-min(A r, A clip(r, 1 - c, 1 + c)))`` (arXiv 1707.06347, 7).

    Args:
        log_prob: ``[M]`` under the weights in training, with a graph.
        old_log_prob: ``[M]`` under the weights that made the samples.
        advantages: ``[M]``.
        clip: half-width of the trust region around ratio 1; the papers use 1e-4.
    """
    log_ratio = log_prob - old_log_prob
    with torch.no_grad():
        usable = log_ratio.isfinite() & log_ratio.exp().isfinite()
    # Masked before exp: behind an infinite ratio even a zero gradient becomes NaN.
    log_ratio = torch.where(usable, log_ratio, 0.0)
    advantages = torch.where(usable, advantages, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
    return PolicyLoss(loss, log_ratio.detach(), usable)


@dataclass(frozen=True)
class PolicyHealth:
    """Numbers that tell whether the update of a group is healthy."""

    ratio_mean: float
    """Mean importance ratio; 1 before the first update of an iteration."""
    max_abs_log_ratio: float
    """max |log p_new - log p_old| over members."""
    approx_kl: float
    """Mean of ``ratio - 1 - log ratio``, an unbiased estimate of KL(old || new)."""
    clip_fraction_low: float
    """Share of members whose ratio lies below 1 - clip and is clipped (advantage < 0)."""
    clip_fraction_high: float
    """Share of members whose ratio lies above 1 + clip and is clipped (advantage > 0)."""


def policy_health(log_ratio: Tensor, advantages: Tensor, clip: float) -> PolicyHealth:
    """Health of one group; ``log_ratio`` and ``advantages`` are ``[M]``. NaN without members."""
    if not len(log_ratio):
        return PolicyHealth(math.nan, math.nan, math.nan, math.nan, math.nan)
    ratio = log_ratio.exp()
    low = (ratio < 1 - clip) & (advantages < 0)
    high = (ratio > 1 + clip) & (advantages > 0)
    # Together: each number that the host reads waits for the card.
    numbers = (
        ratio.mean(),
        log_ratio.abs().max(),
        (ratio - 1 - log_ratio).mean(),
        low.float().mean(),
        high.float().mean(),
    )
    return PolicyHealth(*torch.stack(numbers).tolist())


def step_weights(steps: Sequence[SdeStep], kind: StepWeight) -> list[float]:
    """Weight of each trained step in the loss, of mean 1 over them.

    ``noise`` is proportional to the standard deviation of the injected noise, sigma_t * sqrt(dt)
    (arXiv 2508.04324: steps that explore more are trained more); ``inverse_dt`` to 1 / dt (arXiv
    2510.22319: the velocity's share in the mean, and with it the gradient, grows with dt).
    """
    if kind == "uniform":
        return [1.0] * len(steps)
    raw = [step.std if kind == "noise" else 1 / step.dt for step in steps]
    return [value * len(raw) / sum(raw) for value in raw]


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: float) -> Tensor:
    """KL of two Gaussians of equal std, ``(mean - reference)^2 / (2 std^2)``, element mean.

    Args:
        mean: ``[..., tokens, channels]``, of the policy's stochastic step.
        reference_mean: the same of the reference's.

    Returns:
        Scalar: mean over every element (arXiv 2505.05470, section 4.1, per element).
    """
    return ((mean - reference_mean) ** 2).mean() / (2 * std**2)


def normalise_log_prob(log_prob: Tensor, mean: Tensor, old_mean: Tensor, std: float) -> Tensor:
    """Log-probability whose ratio has the same centre and scale at every step (GRPO-Guard).

    The Gaussian log-ratio is biased by ``-|mean - old_mean|^2 / (2 std^2)`` and grows as 1 / std;
    adding the first back and multiplying by std makes one clip range fit all steps (RatioNorm,
    arXiv 2510.22319). What is left of the log-ratio is ``noise * (mean - old_mean)``, averaged over
    elements. Apply it to ``log_prob`` and ``old_log_prob`` alike, the latter with
    ``mean = old_mean``.

    Args:
        log_prob: ``[M]``.
        mean: ``[..., tokens, channels]``, broadcast to the members.
        old_mean: likewise, of the weights that drew them.
    """
    bias = ((mean - old_mean) ** 2).mean(dim=(-2, -1)) / (2 * std**2)
    return std * (log_prob + bias)
