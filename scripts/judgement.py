"""What the runs of a comparison say at each step count: means, intervals, pairs that are settled.

    python scripts/judgement.py runs/compared --markdown judged.md

Reads the folder that ``compare_algorithms.py --keep --judge-steps`` filled. Every run is judged on
the same prompts from the same noise, and so is the base model: all differences are paired by
prompt. Intervals are 95%, by bootstrap over seeds and, inside a seed, over prompts. A pair of rows
is settled where its difference's interval at the level of ``1 - 0.05 / pairs`` excludes zero
(Bonferroni). For the others, the seeds that would settle them at a power of .8, if the difference
is what was seen.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

import measuring
import program
from comparing.runs import BASE

Array = npt.NDArray[np.float64]
DRAWS = 4000
Z = 1.96 + 0.84  # two-sided 5%, power .8


@dataclass
class Of:
    """Whose result it is."""

    row: str


@dataclass
class Judged:
    """What is read of a run's result."""

    job: Of
    done: bool
    judged: dict[int, dict[str, list[float]]]


def read_runs(folder: Path) -> dict[str, dict[int, dict[str, Array]]]:
    """Row -> step count -> reward -> ``[seeds, prompts]``, of runs that are done."""
    runs: dict[str, list[dict[int, dict[str, list[float]]]]] = {}
    for file in sorted(folder.glob("*/result.json")):
        result = measuring.read_json(file, Judged)
        if result.done and result.judged:
            runs.setdefault(result.job.row, []).append(result.judged)
    return {
        row: {
            steps: {reward: np.array([run[steps][reward] for run in judged]) for reward in rewards}
            for steps, rewards in judged[0].items()
        }
        for row, judged in runs.items()
    }


def interval(values: Array, level: float = 0.95) -> tuple[float, float, float]:
    """Mean of ``[seeds, prompts]`` and its interval, by bootstrap over both."""
    generator = np.random.default_rng(0)
    seeds, prompts = values.shape
    means = np.empty(DRAWS)
    for draw in range(DRAWS):
        of_seeds = generator.integers(seeds, size=(seeds, 1))
        of_prompts = generator.integers(prompts, size=(1, prompts))
        means[draw] = values[of_seeds, of_prompts].mean()
    tail = (1 - level) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(values.mean()), float(low), float(high)


def seeds_needed(difference: Array) -> float:
    """Seeds that would settle a difference ``[seeds, prompts]`` of this mean and spread."""
    if len(difference) < 2 or difference.mean() == 0:
        return math.nan
    by_seed = difference.mean(axis=1)
    return math.ceil((Z * by_seed.std(ddof=1) / by_seed.mean()) ** 2)


def tables(runs: dict[str, dict[int, dict[str, Array]]]) -> Iterator[str]:
    """A table of rows and one of pairs for each step count."""
    base = runs[BASE]
    rows = [row for row in runs if row != BASE]
    pairs = list(combinations(rows, 2))
    for steps, of_base in base.items():
        rewards = list(of_base)
        yield f"### Judged at {steps} steps\n"
        yield "| row | seeds | " + " | ".join(rewards) + " | prompts that got worse (oracle) |"
        yield "| --- |" + " ---: |" * (len(rewards) + 2)
        yield "| base model | | " + " | ".join(f"{of_base[r].mean():.3f}" for r in rewards) + " | |"
        for row in rows:
            judged = runs[row][steps]
            cells = [_cell(interval(judged[reward])) for reward in rewards]
            worse = (
                (judged["oracle"] < of_base["oracle"] - 1e-6).mean() if "oracle" in judged else 0
            )
            yield f"| {row} | {len(judged[rewards[0]])} | {' | '.join(cells)} | {worse:.1%} |"
        yield "\n| pair | " + " | ".join(rewards) + " |"
        yield "| --- |" + " --- |" * len(rewards)
        for one, other in pairs:
            cells = [
                _pair(runs[one][steps][reward], runs[other][steps][reward], len(pairs))
                for reward in rewards
            ]
            yield f"| {one} - {other} | " + " | ".join(cells) + " |"
        yield ""


def _pair(one: Array, other: Array, pairs: int) -> str:
    seeds = min(len(one), len(other))
    difference = one[:seeds] - other[:seeds]
    mean, low, high = interval(difference, 1 - 0.05 / max(pairs, 1))
    if low > 0 or high < 0:
        return f"**{mean:+.3f}** settled"
    return f"{mean:+.3f} ({low:+.3f}, {high:+.3f}); {seeds_needed(difference):.0f} seeds"


def _cell(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} ({found[1]:.3f}, {found[2]:.3f})"


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of compare_algorithms.py --keep")
    parser.add_argument("--markdown", type=Path, help="write the tables")
    options = parser.parse_args()
    runs = read_runs(options.folder)
    if BASE not in runs or len(runs) < 2:
        what = "needs judged runs and the base model's"
        how = "give compare_algorithms.py --judge-steps and let it end"
        print(f"{options.folder} {what}; {how}", file=sys.stderr)
        return 2
    text = "\n".join(tables(runs))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    program.run(main)
