"""Which steps a baseline trains in an iteration: pure functions, so that a resumed run is exact."""

import math
import random
from collections.abc import Sequence

from torch import Tensor

from g2rpo_ray.maths.choices import SdeKind, WindowSchedule
from g2rpo_ray.maths.noise import seed_of
from g2rpo_ray.maths.sde import SdeStep


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


def merged_spans(
    sigmas: Tensor, kind: SdeKind, eta: float, first: int, threshold: float
) -> list[range]:
    """Steps 0, 1, ... of which each goes on until its noise has entropy enough (arXiv 2601.00423).

    That of a Gaussian is ``h = log(2 pi e std^2) / 2`` nats an element, so ``e^h = sqrt(2 pi e)
    std``. A step below the threshold takes in the next ones; the next begins where it ends.

    Args:
        sigmas: ``[T + 1]``.
        first: spans begin at steps below this, at most T - 1.
        threshold: tau, of e^h. Where it is not reached, a span ends before the last step, which
            must be deterministic.
    """
    spans: list[range] = []
    start, last = 0, len(sigmas) - 2
    while start < first:
        end = start + 1
        while end < last and _exp_entropy(sigmas, kind, eta, start, end) < threshold:
            end += 1
        spans.append(range(start, end))
        start = end
    return spans


def _exp_entropy(sigmas: Tensor, kind: SdeKind, eta: float, start: int, end: int) -> float:
    return math.sqrt(2 * math.pi * math.e) * SdeStep.at(sigmas, start, kind, eta, end - start).std
