"""Flow-GRPO and DanceGRPO: every step but the last is stochastic (arXiv 2505.05470, 2505.07818)."""

from g2rpo_ray.algorithms.member_walks import MemberWalks
from g2rpo_ray.config.sampling import FlowGrpoSection
from g2rpo_ray.maths.step_choice import random_steps


class FlowGrpo(MemberWalks):
    """All steps stochastic; which of them are trained is a setting of the algorithm's section."""

    def sde_steps(self, iteration: int) -> range:  # noqa: ARG002
        return range(self.config.sampling.steps - 1)

    def trained_steps(self, iteration: int) -> list[int]:
        recipe: FlowGrpoSection = getattr(self.config, self.config.algorithm)
        stochastic = self.sde_steps(iteration)
        if recipe.trained_steps == "random":
            assert recipe.fraction is not None
            return random_steps(self.config.seed, iteration, len(stochastic), recipe.fraction)
        return list(stochastic[: recipe.first])
