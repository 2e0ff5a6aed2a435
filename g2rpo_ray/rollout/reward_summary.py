"""One reward's scores of one rollout as sums: means of an iteration then weigh scores alike."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RewardSummary:
    """Sums over what has a score; what has none adds to no sum and to no count."""

    scores: int
    """Pictures whose score is finite."""
    score_sum: float
    groups: int
    """(granularity, step) whose members all have a finite score."""
    spread_sum: float
    """Of their standard deviations over the members."""
    constant_groups: int
    """Those whose spread is at most ``advantage.min_spread``."""


def summarise(scores: Tensor, min_spread: float) -> RewardSummary:
    """
    Args:
        scores: float32 ``[granularities, K, M]``; NaN or infinite where there is no usable score.
        min_spread: ``advantage.min_spread``.
    """
    spreads = scores.double().std(dim=-1)
    scores, spreads = scores[scores.isfinite()].double(), spreads[spreads.isfinite()]
    return RewardSummary(
        scores=len(scores),
        score_sum=float(scores.sum()),
        groups=len(spreads),
        spread_sum=float(spreads.sum()),
        constant_groups=int((spreads <= min_spread).sum()),
    )
