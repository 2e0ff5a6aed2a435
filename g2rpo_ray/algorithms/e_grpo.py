"""E-GRPO: steps of low entropy are merged into stochastic steps of a higher (arXiv 2601.00423)."""

from functools import cached_property

from g2rpo_ray.algorithms.g2rpo import G2rpo
from g2rpo_ray.maths.step_choice import merged_spans


class EGrpo(G2rpo):
    """As G2RPO on the finest grid, but a stochastic step may span several of the schedule's."""

    @property
    def granularities(self) -> list[int]:
        return [1]

    def spans(self) -> list[range]:
        return self._spans

    @cached_property
    def _spans(self) -> list[range]:
        sampling, recipe = self.config.sampling, self.config.e_grpo
        return merged_spans(
            self.sigmas, sampling.sde, sampling.eta, recipe.first, recipe.entropy_threshold
        )

    def trained_in_words(self, iteration: int) -> str:  # noqa: ARG002
        return ", ".join("+".join(map(str, span)) for span in self.spans())
