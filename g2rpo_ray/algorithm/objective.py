"""The clipped policy objective of one (prompt, SDE step), its KL term and its health metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of one group with the numbers that tell whether the update is healthy."""

    loss: Tensor
    """Scalar with a graph: mean over members."""
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


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip: float
) -> PolicyLoss:
    """PPO's clipped surrogate, ``mean(-min(A r, A clip(r, 1 - c, 1 + c)))`` (arXiv 1707.06347, 7).

    Args:
        log_prob: ``[M]`` under the weights in training, with a graph.
        old_log_prob: ``[M]`` under the weights that made the samples.
        advantages: ``[M]``.
        clip: half-width of the trust region around ratio 1; the FLUX papers use 1e-4.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
    with torch.no_grad():
        low = (ratio < 1 - clip) & (advantages < 0)
        high = (ratio > 1 + clip) & (advantages > 0)
        return PolicyLoss(
            loss=loss,
            ratio_mean=float(ratio.mean()),
            max_abs_log_ratio=float(log_ratio.abs().max()),
            approx_kl=float((ratio - 1 - log_ratio).mean()),
            clip_fraction_low=float(low.float().mean()),
            clip_fraction_high=float(high.float().mean()),
        )


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: float) -> Tensor:
    """KL of two Gaussians of equal std, ``(mean - reference)^2 / (2 std^2)``, element mean.

    Args:
        mean, reference_mean: ``[..., tokens, channels]`` means of the same stochastic step.

    Returns:
        Scalar: mean over every element (arXiv 2505.05470, section 4.1, per element).
    """
    return ((mean - reference_mean) ** 2).mean() / (2 * std**2)


def normalise_log_prob(log_prob: Tensor, mean: Tensor, old_mean: Tensor, std: float) -> Tensor:
    """Log-probability whose ratio has the same centre and scale at every step (GRPO-Guard).

    The Gaussian log-ratio is biased by ``-|mean - old_mean|^2 / (2 std^2)`` and grows as 1 / std;
    adding the first back and multiplying by std makes one clip range fit all steps
    (arXiv 2510.22319, section 4.1). Apply it to ``log_prob`` and ``old_log_prob`` alike, the
    latter with ``mean = old_mean``.

    Args:
        log_prob: ``[M]``.
        mean, old_mean: ``[..., tokens, channels]``, broadcast to the members.
    """
    bias = ((mean - old_mean) ** 2).mean(dim=(-2, -1)) / (2 * std**2)
    return std * (log_prob + bias)
