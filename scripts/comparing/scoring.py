"""Scorers in the process that draws, in the reward servers' place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from g2rpo_ray.rewards.scorer import RewardScorer


@dataclass(frozen=True)
class LocalScoring:
    """The reward servers' place in one process."""

    scorers: dict[str, RewardScorer]

    @property
    def names(self) -> list[str]:
        return sorted(self.scorers)

    def submit(
        self,
        prompt_id: int,  # noqa: ARG002
        prompt: str,
        pictures: Tensor,
        names: list[str],
    ) -> "LocalScores":
        return LocalScores(self.scores(pictures, [prompt] * len(pictures), names))

    def scores(
        self, pictures: Tensor, prompts: Sequence[str], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Of pictures of any prompts, by name float32 ``[B]``."""
        return {name: self.scorers[name].score(pictures, prompts) for name in names}


@dataclass(frozen=True)
class LocalScores:
    """Scores that are there already."""

    scores: dict[str, Tensor]
    failures: list[str] = field(default_factory=list)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    waiting_for: str = ""

    def result(self) -> dict[str, Tensor]:
        return self.scores
