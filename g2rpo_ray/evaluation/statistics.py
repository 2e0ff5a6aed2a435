"""Means with bootstrap intervals, and paired differences. The unit is the prompt.

Pictures of one prompt are no independent samples of what a model does on prompts, so they are
averaged first and prompts are resampled (the cluster bootstrap).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95
_CHUNK = 4_000_000
"""Resampled values held at a time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    low: float
    """Lower end of the 95% percentile interval; NaN with fewer than two prompts."""
    high: float
    prompts: int
    """Prompts that it is over; those without a score are left out."""


@dataclass(frozen=True)
class PairedDifference:
    """How one set of weights differs from another on the same prompts and the same noise."""

    difference: Estimate
    worse_share: float
    """Part of the prompts whose score is lower than the base's."""


def estimate(values: Floats, seed: int = 0) -> Estimate:
    """Mean of ``[prompts]`` with its bootstrap interval; NaN values are left out.

    The interval is a function of the values and the seed alone.
    """
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(mean, np.nan, np.nan, 1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_resampled_means(values, seed), [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), len(values))


def paired_difference(values: Floats, base: Floats, seed: int = 0) -> PairedDifference:
    """``values - base`` over the prompts ``[prompts]`` that both have a score for."""
    differences = values - base
    differences = differences[np.isfinite(differences)]
    worse = float((differences < 0).mean()) if len(differences) else np.nan
    return PairedDifference(estimate(differences, seed), worse)


def _resampled_means(values: Floats, seed: int) -> Floats:
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(values))
    means = []
    for first in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - first)
        picks = generator.integers(len(values), size=(count, len(values)))
        means.append(values[picks].mean(axis=1))
    return np.concatenate(means)
