"""How well advantages rank branches: correlations, their intervals, table and figure."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from g2rpo_ray.config import Config
from g2rpo_ray.maths.advantage import integrate_advantages
from g2rpo_ray.maths.granularity import branch_plan

SETS = ((1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3))
SPANS = (1, 2, 3)
FINE = (28, 50)
"""Step counts of the judgement; 8 is drawn, too, and told apart."""
PUSHED = 28
Array = npt.NDArray[np.float64]


class Way(NamedTuple):
    """How a branch is finished."""

    span: int
    """Steps of the schedule that its stochastic step covers."""
    kind: str
    """``grid``: as in training; ``fine``; ``ahead``, ``behind``: see ``push``."""
    number: int
    """Granularity of a grid, else the step count of the schedule."""


def all_ways() -> list[Way]:
    ways = []
    for span in SPANS:
        grids = [1, 2, 3] if span == 1 else [1]
        ways += [Way(span, "grid", number) for number in grids]
        ways += [Way(span, "fine", number) for number in (8, *FINE)]
        ways += [Way(span, kind, PUSHED) for kind in ("ahead", "behind")]
    return ways


class Correlations:
    """Of advantages and values, from the scores of all prompts."""

    def __init__(self, scores: npt.NDArray[np.float32], names: list[str], config: Config) -> None:
        """
        Args:
            scores: ``[P, rewards, ways, K, M]``.
        """
        self.ways = {way: number for number, way in enumerate(all_ways())}
        self.config = config
        trained = sorted(config.trained_rewards)
        self.values = {
            "trained": scores[:, [names.index(name) for name in trained]].astype(np.float64),
            **{name: scores[:, [row]].astype(np.float64) for row, name in enumerate(names)},
        }

    def advantages(self, span: int, granularities: Sequence[int], reward: str = "trained") -> Array:
        """float64 ``[P, K, M]``: as the learner computes them."""
        ways = [self.ways[Way(span, "grid", g)] for g in granularities]
        return self._integrated(self.values[reward][:, :, ways])

    def fine(self, reward: str, steps: Sequence[int] = FINE, span: int = 1) -> Array:
        """float64 ``[P, K, M]``: the mean over step counts, several rewards as advantages."""
        ways = [self.ways[Way(span, "fine", n)] for n in steps]
        return self._integrated(self.values[reward][:, :, ways].mean(axis=2, keepdims=True))

    def push(self, reward: str, span: int = 1) -> Array:
        ahead, behind = (self.ways[Way(span, kind, PUSHED)] for kind in ("ahead", "behind"))
        of = self.values[reward]
        return self._integrated((of[:, :, ahead] - of[:, :, behind])[:, :, None])

    def _integrated(self, rewards: Array) -> Array:
        settings = self.config.advantage
        return np.stack(
            [
                integrate_advantages(
                    torch.from_numpy(each),
                    [1.0] * each.shape[0],
                    clamp=settings.clamp,
                    min_spread=settings.min_spread,
                )
                .values.double()
                .numpy()
                for each in rewards
            ]
        )


def correlation(a: Array, b: Array) -> Array:
    """Pearson's inside every group: ``[P, K]`` of ``[P, K, M]``; NaN where one is constant."""
    a, b = (x - x.mean(axis=-1, keepdims=True) for x in (a, b))
    norm = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    return np.where(norm > 1e-9, (a * b).sum(axis=-1) / np.maximum(norm, 1e-9), np.nan)


def with_interval(groups: Array, seed: int = 0) -> tuple[float, float, float]:
    """Mean and 95% interval over prompts of ``[P, ...]``, by bootstrap; NaN are left out."""
    flat = groups.reshape(len(groups), -1)
    sums, counts = np.nansum(flat, axis=1), np.isfinite(flat).sum(axis=1)
    if not counts.any():
        return (float("nan"),) * 3
    chosen = np.random.default_rng(seed).integers(len(flat), size=(2000, len(flat)))
    means = sums[chosen].sum(axis=1) / np.maximum(counts[chosen].sum(axis=1), 1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(sums.sum() / counts.sum()), float(low), float(high)


def rows_of(found: Correlations) -> list[dict[str, Any]]:
    """A row for each Λ and each merged step, with correlations ``[P, K]`` by their name."""
    steps, trained = found.config.sampling.steps, found.config.g2rpo.sde_steps
    rows = []
    asked = [(1, granularities) for granularities in SETS] + [(span, (1,)) for span in SPANS[1:]]
    one = found.advantages(1, (1,))
    for span, granularities in asked:
        fits = [k for k in trained if k + span <= steps - 1]
        plans = [branch_plan(steps, k + span - 1, granularities) for k in fits]
        advantages = found.advantages(span, granularities)
        label = f"Λ={{{','.join(map(str, granularities))}}}"
        rows.append(
            {
                "row": label if span == 1 else f"merged {span}, Λ={{1}}",
                "evaluations": fmean(plan.evaluations for plan in plans),
                "with Λ={1}": correlation(advantages, one),
                **{
                    f"{kind} {reward}": correlation(
                        advantages, getattr(found, kind)(reward, span=span)
                    )
                    for kind in ("fine", "push")
                    for reward in ("trained", "oracle")
                },
                **{
                    f"at {n} steps": correlation(advantages, found.fine("trained", (n,), span))
                    for n in (8, *FINE)
                },
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table; and what each Λ has more than {1}, group by group."""
    names = [name for name in rows[0] if name not in ("row", "evaluations")]
    yield "| advantage | evaluations a branch | " + " | ".join(names) + " |"
    yield "| --- |" + " ---: |" * (len(names) + 1)
    for row in rows:
        cells = [_cell(row[name]) for name in names]
        yield f"| {row['row']} | {row['evaluations']:.1f} | " + " | ".join(cells) + " |"
    yield "\n| less that of Λ={1} | " + " | ".join(names[1:]) + " | signal an evaluation |"
    yield "| --- |" + " ---: |" * len(names)
    for row in rows[1:]:
        cells = [_cell(row[name] - rows[0][name]) for name in names[1:]]
        first = _signal(rows[0])
        share = _signal(row) / first if first else float("nan")
        yield f"| {row['row']} | " + " | ".join(cells) + f" | {share:.2f} |"


def _signal(row: dict[str, Any]) -> float:
    """Of a sum over members, signal to noise squared grows with members times correlation squared:
    this is what an evaluation buys of it."""
    return float(np.nanmean(row["push trained"]) ** 2 / row["evaluations"])


def _cell(groups: Array) -> str:
    mean, low, high = with_interval(groups)
    return f"{mean:.3f} ({low:.3f}, {high:.3f})"


def plot(rows: list[dict[str, Any]], steps: Sequence[int], path: Path) -> None:
    """Correlation at each SDE step, and over the evaluations of a branch."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    kinds = ["fine trained", "push trained", "push oracle"]
    figure, axes = pyplot.subplots(2, len(kinds), figsize=(4.6 * len(kinds), 7))
    for (above, below), kind in zip(axes.T, kinds, strict=True):
        for row in rows:
            by_step = np.array(
                [with_interval(row[kind][:, [place]]) for place in range(len(steps))]
            )
            whole = with_interval(row[kind])
            dashed = "--" if row["row"].startswith("merged") else "-"
            (line,) = above.plot(steps, by_step[:, 0], dashed, label=row["row"])
            above.fill_between(
                steps, by_step[:, 1], by_step[:, 2], alpha=0.1, color=line.get_color()
            )
            error = [[whole[0] - whole[1]], [whole[2] - whole[0]]]
            below.errorbar(row["evaluations"], whole[0], yerr=error, fmt="o", ms=4)
            below.annotate(
                row["row"], (row["evaluations"], whole[0]), (4, 3), textcoords="offset points",
                fontsize=7,
            )  # fmt: skip
        above.set(title=f"correlation with {kind}", xlabel="SDE step k")
        below.set(xlabel="evaluations a branch")
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
