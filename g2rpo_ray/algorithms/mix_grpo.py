"""MixGRPO: stochastic steps inside a sliding window, ODE outside (arXiv 2507.21802)."""

from collections.abc import Sequence

from g2rpo_ray.algorithms.member_walks import MemberWalks
from g2rpo_ray.maths.granularity import compressed_indices
from g2rpo_ray.maths.step_choice import place_at, random_place, window_stays


class MixGrpo(MemberWalks):
    """The window's steps are the trained ones; its place is a function of the iteration."""

    def sde_steps(self, iteration: int) -> range:
        place = self._place(iteration)
        return range(place, place + self.config.mix_grpo.window)

    def trained_steps(self, iteration: int) -> list[int]:
        return list(self.sde_steps(iteration))

    def indices(self, iteration: int) -> Sequence[int]:
        steps, recipe = self.config.sampling.steps, self.config.mix_grpo
        if recipe.flash == "off":
            return range(steps + 1)
        window_end = self.sde_steps(iteration).stop
        compressed = compressed_indices(steps, window_end, recipe.flash_ratio)
        return [*range(window_end), *compressed]

    def second_order_from(self, iteration: int) -> int | None:
        uses_solver = self.config.mix_grpo.flash == "dpm_solver"
        return self.sde_steps(iteration).stop if uses_solver else None

    def _place(self, iteration: int) -> int:
        recipe = self.config.mix_grpo
        # The last step of the schedule must be deterministic.
        last_place = self.config.sampling.steps - 1 - recipe.window
        places = range(0, last_place + 1, recipe.stride)
        if recipe.schedule == "random":
            return random_place(self.config.seed, iteration, places)
        stays = window_stays(
            recipe.schedule, places, recipe.shift_interval, recipe.decay_after, recipe.decay_rate
        )
        return place_at(iteration, places, stays, recipe.roll_back)
