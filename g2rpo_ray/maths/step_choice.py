"""Which steps a baseline trains in an iteration: pure functions, so that a resumed run is exact."""

import math
import random
from collections.abc import Sequence

from g2rpo_ray.maths.choices import WindowSchedule
from g2rpo_ray.maths.noise import seed_of


def window_stays(
    schedule: WindowSchedule,
    places: Sequence[int],
    shift_interval: int,
    decay_after: int,
    decay_rate: float,
) -> list[int]:
    """Iterations that MixGRPO's window stays at each place (arXiv 2507.21802, section 3.2).

    ``progressive``: the interval everywhere. ``decaying``: it shrinks by
    ``exp(-decay_rate * max(0, place - decay_after))``, rounded up.
    """
    if schedule == "progressive":
        return [shift_interval] * len(places)
    return [
        math.ceil(shift_interval * math.exp(-decay_rate * max(0, place - decay_after)))
        for place in places
    ]


def place_at(iteration: int, places: Sequence[int], stays: Sequence[int], roll_back: bool) -> int:
    """Place of a window that walks over ``places`` and stays ``stays`` iterations at each.

    Args:
        iteration: counted from 0.
        roll_back: begin again after the last place; else the window stays there.
    """
    remaining = iteration % sum(stays) if roll_back else iteration
    for place, stay in zip(places, stays, strict=True):
        if remaining < stay:
            return place
        remaining -= stay
    return places[-1]


def random_place(run_seed: int, iteration: int, places: Sequence[int]) -> int:
    """A place drawn anew for every iteration."""
    return random.Random(seed_of(run_seed, iteration, "window")).choice(places)


def random_steps(run_seed: int, iteration: int, steps: int, fraction: float) -> list[int]:
    """A random share of the steps 0 .. ``steps`` - 1, at least one, in ascending order."""
    generator = random.Random(seed_of(run_seed, iteration, "trained steps"))
    return sorted(generator.sample(range(steps), max(1, round(fraction * steps))))
