"""What an algorithm gives: the trained stochastic steps, and pictures to score for them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from g2rpo_ray.config import Config
from g2rpo_ray.maths.granularity import RolloutCounts
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.sampling.sampler import Sampler


@dataclass(frozen=True)
class Draw:
    """One prompt drawn by an algorithm; see RolloutGroup for the meaning of the dimensions."""

    sde_steps: list[SdeStep]
    """K trained stochastic steps; none with ``times``."""
    step_indices: list[int]
    """K indices into the schedule; 0 to K - 1 with ``times``."""
    latents: Tensor
    """float32 ``[K, L, tokens, channels]``: x_k; ``[1, M, ...]`` x_0 with ``times``."""
    velocities: Tensor
    """float32 ``[K, L, tokens, channels]``."""
    granularities: int
    """Results of each member."""
    finished: Iterator[tuple[list[int], Tensor]]
    """Lazily: (positions among the K steps that these results reward,
    x_0 float32 ``[granularities, M, tokens, channels]``); together they cover every position."""
    times: Tensor | None = None
    """float32 ``[K, M]``: noise levels of the forward process, where that is trained on."""


class Algorithm(ABC):
    """An algorithm's way to draw; stateless, so that any worker can do any prompt."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def trained_steps(self, iteration: int) -> list[int]:
        """Schedule indices of the trained stochastic steps, in the order of their updates.

        A function of configuration, seed and iteration alone, so that a resumed run is exact.
        """

    @abstractmethod
    def draw(self, sampler: Sampler, embeds: Conditioning, key: GroupKey, iteration: int) -> Draw:
        """Draw one prompt."""

    @abstractmethod
    def counts(self, iteration: int) -> RolloutCounts:
        """What one prompt costs."""

    def learner_rows(self) -> int:
        """Latents in a learner's first pass, where no worker had to draw in smaller batches."""
        counts, settings = self.counts(0), self.config.learner
        # One where members share it.
        latents = counts.learner_passes // counts.groups
        of_a_part = max(1, latents // settings.updates_per_iteration)
        # Of several SDE steps in one pass, each has one batch.
        together = min(settings.steps_per_pass, counts.groups)
        return together * min(of_a_part, self.config.rollout.planned_batch_size)

    def trained_in_words(self, iteration: int) -> str:
        """What is trained, for people."""
        return ", ".join(map(str, self.trained_steps(iteration)))

    def noise_in_words(self) -> str:
        """How pictures are drawn, for people."""
        return f"{self.config.sampling.sde} SDE, eta {self.config.sampling.eta:g}"
