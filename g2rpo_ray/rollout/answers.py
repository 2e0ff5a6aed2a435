"""What a rollout worker is asked for and answers with; without the libraries of the models."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from g2rpo_ray.common.errors import RunError


class BrokenLatentsError(RunError):
    """The network gave pictures that are not finite, and the run is to stop then."""


@dataclass(frozen=True)
class RewardSummary:
    """One reward's scores of one rollout as sums: means of an iteration then weigh scores alike.

    What has no score adds to no sum and to no count.
    """

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


@dataclass(frozen=True)
class RolloutSummary:
    """The small part of a rollout that the driver looks at."""

    group_id: int
    weight_version: int
    evaluations: int
    pictures: int
    seconds: dict[str, float]
    rewards: dict[str, RewardSummary]
    failures: list[str]
    """Rewards that failed for good, in words."""
    measured: list[dict[str, dict[str, float]]]
    """What each request to the reward servers took, see ``PendingScores.measured``."""
    peak_gib: float
    """Most device memory that the worker's tensors have held so far; 0 on the CPU."""
    warnings: list[str]
    """What else the user should know, such as a batch that had to be halved."""
    broken_pictures: int = 0
    """Pictures whose latents are not finite."""
    replica_busy_s: Counter[str] = field(default_factory=Counter)
    """Reward replica -> time that it has worked since its start, as of its last answer."""
    own_s: float = 0.0
    """Time of the worker's own work."""
    waited_s: float = 0.0
    """Time in which the worker waited for scores."""


@dataclass(frozen=True)
class HeldoutDraw:
    """How held-out pictures are drawn."""

    steps: int
    """Evaluations of a whole trajectory."""
    pictures: int
    """Pictures of each prompt, each from its own fixed seed."""
    first: int = 0
    """Schedule index to start from; above 0 the latents there must be given."""
    last: int | None = None
    """Schedule index to stop at; None walks to the end."""


@dataclass(frozen=True)
class HeldoutPictures:
    """Evaluation of one held-out prompt."""

    prompt_id: int
    prompt: str
    pictures: Tensor
    """uint8 ``[J, H, W, 3]``."""
    scores: dict[str, Tensor]
    """Reward name -> float32 ``[J]``; NaN where there is no score."""
    evaluations: int
    failures: list[str] = field(default_factory=list)
    """Why scores are missing, in words."""
    broken_pictures: int = 0
    """Pictures whose latents are not finite; they have no scores."""
    own_s: float = 0.0
    """Time of the worker's own work."""
