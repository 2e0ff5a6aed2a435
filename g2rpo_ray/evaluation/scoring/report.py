"""How rewards judge the same pictures: their scores, where they agree, what a threshold keeps."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from g2rpo_ray.common.formatting import NOTHING
from g2rpo_ray.evaluation.scoring.results import Results
from g2rpo_ray.evaluation.statistics import Floats, estimate
from g2rpo_ray.evaluation.table import Part, estimate_cell, markdown

Threshold = tuple[str, float]
"""A reward, and the lowest score that passes."""
BEST_SHARE = 0.1
QUANTILES = (0.05, 0.5, 0.95)
SHOWN_PROBLEMS = 20


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing theirs.

    Args:
        one: ``[pictures]``; NaN where there is no score, which leaves the picture out.
        other: likewise.

    Returns:
        -1 to 1; NaN with fewer than two pictures, or where all have the same score.
    """
    both = np.isfinite(one) & np.isfinite(other)
    first, second = _ranks(one[both]), _ranks(other[both])
    if not both.any() or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: Floats = np.cumsum(counts) - (counts - 1) / 2
    return shared[inverse]


def rank_correlation_within(one: Floats, other: Floats, groups: NDArray[np.int64]) -> float:
    """Mean of the rank correlations inside each group ``[pictures]`` that has one; else NaN."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order])) + 1
    found = [
        rank_correlation(one[part], other[part])
        for part in np.split(order, starts)
        if len(part) > 1
    ]
    known = [value for value in found if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def report(
    results: Results,
    rewards: Sequence[str],
    pictures: Sequence[str],
    thresholds: Sequence[Threshold],
    told: Sequence[str],
) -> str:
    """The report as Markdown.

    Args:
        thresholds: to look at; none: for each reward the score that the best tenth reach.
        told: what was said while pictures were scored.
    """
    rows = [results.rows[name] for name in pictures]
    values = {name: results.values(name, pictures) for name in rewards}
    prompts = np.unique([row.prompt or row.picture for row in rows], return_inverse=True)[1]
    categories = np.array([row.category or "" for row in rows])
    parts = [
        _scores(values, prompts),
        _agreement("Agreement", _AGREEMENT, values, None),
        _agreement("Agreement within prompts", _WITHIN, values, prompts),
        _passing(values, thresholds),
        _by_category(values, prompts, categories),
    ]
    text = markdown([part for part in parts if part.cells], "Rewards on these pictures")
    causes = Counter[str]()
    first: dict[str, str] = {}
    for row in rows:
        for reward, cause in row.problems.items():
            line = f"{reward}: {cause}" if reward else cause
            causes[line] += 1
            first.setdefault(line, row.picture)
    lines = [f"{line} ({n} pictures, first {first[line]})" for line, n in causes.most_common()]
    if len(lines) > SHOWN_PROBLEMS:
        lines[SHOWN_PROBLEMS:] = [f"{len(lines) - SHOWN_PROBLEMS} other kinds: scores.parquet"]
    if lines or told:
        text += "\n## Told\n\n" + "".join(
            f"- {' '.join(line.split())}\n" for line in (*told, *lines)
        )
    return text


_AGREEMENT = (
    "Rank correlation (Spearman) over all pictures that both have scored: 1, the same order; 0, "
    "none in common; below, they contradict each other."
)
_WITHIN = (
    "The same among the pictures of one prompt, averaged over prompts: what an advantage sees. A "
    "reward that a judge contradicts here can rise in training while the judge's falls."
)


def _scores(values: Mapping[str, Floats], prompts: NDArray[np.int64]) -> Part:
    cells = []
    for name, scores in values.items():
        known = scores[np.isfinite(scores)]
        quantiles = (
            [f"{value:.4f}" for value in np.quantile(known, QUANTILES)] if len(known) else []
        )
        means = _prompt_means(scores, prompts)
        cells.append(
            [
                name,
                str(len(known)),
                str(len(scores) - len(known)),
                estimate_cell(estimate(means), int(np.isfinite(means).sum())),
                *(quantiles or [NOTHING] * len(QUANTILES)),
            ]
        )
    head = ["reward", "pictures", "without", "mean", "5 %", "median", "95 %"]
    lead = "Means are over prompts, with 95% bootstrap intervals."
    return Part("Scores", lead, head, cells, words=1)


def _prompt_means(scores: Floats, prompts: NDArray[np.int64]) -> Floats:
    """``[prompts]``, of the pictures that have a score; NaN where none has."""
    known = np.isfinite(scores)
    counts = np.bincount(prompts[known], minlength=prompts.max() + 1)
    sums = np.bincount(prompts[known], scores[known], minlength=prompts.max() + 1)
    means: Floats = np.divide(sums, counts, where=counts > 0, out=np.full(len(counts), np.nan))
    return means


def _agreement(
    title: str, lead: str, values: Mapping[str, Floats], groups: NDArray[np.int64] | None
) -> Part:
    names = list(values)
    cells = []
    for name in names if len(names) > 1 else []:
        row = [name]
        for other in names:
            if groups is None:
                number = rank_correlation(values[name], values[other])
            else:
                number = rank_correlation_within(values[name], values[other], groups)
            row.append(NOTHING if name == other or np.isnan(number) else f"{number:.3f}")
        cells.append(row)
    if groups is not None and all(cell == NOTHING for row in cells for cell in row[1:]):
        # Every prompt has one picture.
        cells = []
    return Part(title, lead, ["", *names], cells, words=1)


def _passing(values: Mapping[str, Floats], thresholds: Sequence[Threshold]) -> Part:
    chosen = thresholds or [
        (name, _best(scores)) for name, scores in values.items() if np.isfinite(scores).any()
    ]
    passed = [
        (f"{name} ≥ {at:.4g}", values[name] >= at, np.isfinite(values[name])) for name, at in chosen
    ]
    if len(thresholds) > 1:
        every = np.logical_and.reduce([passes for _, passes, _ in passed])
        known = np.logical_and.reduce([known for _, _, known in passed])
        passed.append(("all of them", every, known))
    cells = []
    for label, passes, known in passed:
        share = f"{passes.sum() / known.sum():.1%}" if known.any() else NOTHING
        cells.append([label, share])
        for scores in values.values():
            pass_, fail = (scores[mask & np.isfinite(scores)] for mask in (passes, known & ~passes))
            both = len(pass_) and len(fail)
            cells[-1].append(f"{pass_.mean() - fail.mean():+.4f}" if both else NOTHING)
    lead = "How much higher the mean of each reward is for pictures that pass than for the others."
    return Part("Thresholds", lead, ["threshold", "pass", *values], cells, words=1)


def _best(scores: Floats) -> float:
    """What the best tenth reach; of a reward of few values the highest."""
    known = scores[np.isfinite(scores)]
    value = float(np.quantile(known, 1 - BEST_SHARE))
    return value if value > known.min() else float(known.max())


def _by_category(
    values: Mapping[str, Floats], prompts: NDArray[np.int64], categories: NDArray[np.str_]
) -> Part:
    places = defaultdict[str, list[int]](list)
    for place, category in enumerate(categories):
        places[str(category)].append(place)
    cells = []
    for category, inside in sorted(places.items()) if set(places) != {""} else []:
        row = [category or "without", str(len(inside))]
        for scores in values.values():
            means = _prompt_means(scores[inside], prompts[inside])
            means = means[np.isfinite(means)]
            row.append(estimate_cell(estimate(means), len(means)))
        cells.append(row)
    lead = "By what the prompt file says of its prompts (category, tag or style)."
    return Part("By category", lead, ["category", "pictures", *values], cells, words=1)
