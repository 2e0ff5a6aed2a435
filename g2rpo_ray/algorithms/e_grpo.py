"""E-GRPO: steps of low entropy are merged into stochastic steps of a higher (arXiv 2601.00423)."""

from functools import cached_property

from g2rpo_ray.algorithms.g2rpo import G2rpo
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.maths.step_choice import merged_spans
from g2rpo_ray.models.families import latents_of, open_family


class EGrpo(G2rpo):
    """As G2RPO on the finest grid, but a stochastic step may span several of the schedule's."""

    @property
    def granularities(self) -> list[int]:
        return [1]

    def spans(self) -> list[range]:
        return self._spans

    @cached_property
    def _spans(self) -> list[range]:
        # The driver asks, too, and has no policy: only the model folder's configuration is read.
        sampling, recipe = self.config.sampling, self.config.e_grpo
        sigmas = static_shift_schedule(sampling.steps, sampling.shift)
        if sampling.schedule == "dynamic":
            family = open_family(resolve_path(self.config.model.path))
            sigmas = family.schedule(sampling.steps, latents_of(self.config, family))
        return merged_spans(
            sigmas, sampling.sde, sampling.eta, recipe.first, recipe.entropy_threshold
        )

    def trained_in_words(self, iteration: int) -> str:  # noqa: ARG002
        return ", ".join("+".join(map(str, span)) for span in self.spans())
