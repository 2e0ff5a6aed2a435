"""What the runs of a comparison say at each step count: means, intervals, pairs that are settled.

    python scripts/judgement.py runs/compared --pack judged.npz --markdown judged.md
    python scripts/judgement.py docs/comparison/hard_judged.npz --rewards oracle

Reads the folder that ``compare_algorithms.py --keep --judge-steps`` filled, or what was packed of
such; of several, together. Every run is judged on the same prompts from the same noise, and so is
the base model: all differences are paired by prompt, and those of rows by seed. Intervals are 95%,
by bootstrap over seeds and over prompts. A pair of rows is settled where the interval of its
difference at the level of ``1 - 0.05 / pairs`` (Bonferroni) and a t interval over the seeds' means
at 95% both exclude zero: a bootstrap of few seeds is too sure. For the others, the seeds that would
settle them at a power of .8, if the difference is what was seen.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import measuring
import program
from comparing.runs import BASE

Array = npt.NDArray[np.float64]
DRAWS = 4000
Z = 1.96 + 0.84  # two-sided 5%, power .8
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t with 1, 2, ... degrees of freedom; beyond, the last is taken."""


@dataclass
class Of:
    """Whose result it is."""

    row: str
    seed: int = 0


@dataclass
class Judged:
    """What is read of a run's result."""

    job: Of
    done: bool
    judged: dict[int, dict[str, list[float]]]


Runs = dict[tuple[str, int], dict[int, dict[str, Array]]]
"""(row, seed) -> step count -> reward -> ``[prompts]``."""


def read_runs(source: Path) -> Runs:
    """Those of a folder that are done, or of a packed file.

    Raises:
        FileError: a file is not what was written.
    """
    if source.suffix == ".npz":
        return _unpacked(source)
    runs: Runs = {}
    for file in sorted(source.glob("*/result.json")):
        result = measuring.read_json(file, Judged)
        if result.done and result.judged:
            runs[result.job.row, result.job.seed] = {
                steps: {reward: np.array(values) for reward, values in rewards.items()}
                for steps, rewards in result.judged.items()
            }
    return runs


def pack(runs: Runs, file: Path) -> None:
    """As float32, in one file that may be kept with the tables."""
    arrays: dict[str, Any] = {
        f"{row}|{seed}|{steps}|{reward}": values.astype(np.float32)
        for (row, seed), judged in runs.items()
        for steps, rewards in judged.items()
        for reward, values in rewards.items()
    }
    np.savez_compressed(file, **arrays)


def _unpacked(file: Path) -> Runs:
    runs: Runs = {}
    try:
        with np.load(file) as kept:
            for name, values in kept.items():
                row, seed, steps, reward = name.split("|")
                of_run = runs.setdefault((row, int(seed)), {})
                of_run.setdefault(int(steps), {})[reward] = values.astype(np.float64)
    except (OSError, ValueError) as error:
        raise measuring.FileError(f"{file}: not what --pack writes: {error}") from error
    return runs


class Judgement:
    """The runs by row, and what they say together."""

    def __init__(self, runs: Runs) -> None:
        self.base = next(judged for (row, _), judged in runs.items() if row == BASE)
        self.seeds: dict[str, list[int]] = {}
        for row, seed in sorted(runs, key=lambda run: run[1]):
            if row != BASE:
                self.seeds.setdefault(row, []).append(seed)
        self.rows = list(self.seeds)
        self.pairs = list(combinations(self.rows, 2))
        self._runs = runs

    def scores(self, row: str, steps: int, reward: str, seeds: Sequence[int] = ()) -> Array:
        """``[seeds, prompts]``; of all the row's seeds by default."""
        asked = seeds or self.seeds[row]
        return np.stack([self._runs[row, seed][steps][reward] for seed in asked])

    def difference(self, one: str, other: str, steps: int, reward: str) -> Array:
        """``[seeds, prompts]``, of the seeds that both rows have."""
        both = [seed for seed in self.seeds[one] if seed in self.seeds[other]]
        if not both:
            return np.empty((0, 0))
        return self.scores(one, steps, reward, both) - self.scores(other, steps, reward, both)

    def tables(self, rewards: Sequence[str] = ()) -> Iterator[str]:
        """For each reward (none: all) the rows, the best first, and their pairs."""
        counts = list(self.base)
        for reward in rewards or self.base[counts[0]]:
            yield from self._of_rows(counts, reward)
            yield "| pair | " + " | ".join(f"{steps} steps" for steps in counts) + " |"
            yield "| --- |" + " --- |" * len(counts)
            for one, other in combinations(self._best_first(counts[-1], reward), 2):
                cells = [self._pair(self.difference(one, other, s, reward)) for s in counts]
                yield f"| {one} - {other} | " + " | ".join(cells) + " |"
            yield ""

    def _best_first(self, steps: int, reward: str) -> list[str]:
        return sorted(self.rows, key=lambda row: -self.scores(row, steps, reward).mean())

    def _of_rows(self, counts: Sequence[int], reward: str) -> Iterator[str]:
        """With the share of prompts that are below the base model's."""
        few, many = counts[len(counts) > 2], counts[-1]
        base = {steps: self.base[steps][reward] for steps in counts}
        yield f"### {reward}\n"
        heads = [*(f"{s} steps" for s in counts), f"from {few} to {many}", f"worse at {many}"]
        yield "| row | seeds | " + " | ".join(heads) + " |"
        yield "| --- |" + " ---: |" * (len(heads) + 1)
        means = [f"{base[steps].mean():.3f}" for steps in counts]
        change = _cell(interval((base[many] - base[few])[None]))
        yield f"| base model | | {' | '.join(means)} | {change} | |"
        for row in self._best_first(many, reward):
            of = {steps: self.scores(row, steps, reward) for steps in counts}
            cells = [_cell(interval(of[steps])) for steps in counts]
            change = _cell(interval(of[many] - of[few]))
            worse = float((of[many] < base[many] - 1e-6).mean())
            seeds = len(self.seeds[row])
            yield f"| {row} | {seeds} | {' | '.join(cells)} | {change} | {worse:.0%} |"
        yield ""

    def _pair(self, difference: Array) -> str:
        if not difference.size:
            return "no seed in common"
        mean, low, high = interval(difference, 1 - 0.05 / len(self.pairs))
        half = t_half_width(difference)
        if (low > 0 or high < 0) and abs(mean) > half:
            return f"**{mean:+.3f}** settled"
        return f"{mean:+.3f} ± {half:.3f}; {seeds_needed(difference):.0f} seeds"


def interval(values: Array, level: float = 0.95) -> tuple[float, float, float]:
    """Mean of ``[seeds, prompts]`` and its interval, by bootstrap over both."""
    generator = np.random.default_rng(0)
    seeds, prompts = values.shape
    # How often each was drawn.
    of_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS)
    of_prompts = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS)
    means = ((of_seeds @ values) * of_prompts).sum(axis=1) / (seeds * prompts)
    tail = (1 - level) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(values.mean()), float(low), float(high)


def t_half_width(difference: Array) -> float:
    """Of the 95% t interval of the mean over seeds; of one seed there is none."""
    seeds = len(difference)
    if seeds < 2:
        return math.inf
    quantile = T_975[min(seeds - 1, len(T_975)) - 1]
    return float(quantile * difference.mean(axis=1).std(ddof=1) / math.sqrt(seeds))


def seeds_needed(difference: Array) -> float:
    """Seeds that would settle a difference ``[seeds, prompts]`` of this mean and spread."""
    if len(difference) < 2 or difference.mean() == 0:
        return math.nan
    by_seed = difference.mean(axis=1)
    return math.ceil((Z * by_seed.std(ddof=1) / by_seed.mean()) ** 2)


def _cell(found: tuple[float, float, float]) -> str:
    return f"{found[0]:.3f} ({found[1]:.3f}, {found[2]:.3f})"


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument(
        "sources", nargs="+", type=Path, help="folders of compare_algorithms.py --keep, or .npz"
    )
    parser.add_argument(
        "--pack", type=program.output, metavar="NPZ", help="keep what was read in one file"
    )
    parser.add_argument("--rewards", nargs="*", default=[], metavar="NAME", help="some of them")
    parser.add_argument("--markdown", type=program.output, help="write the tables")
    options = parser.parse_args()
    runs = {run: judged for each in options.sources for run, judged in read_runs(each).items()}
    rows = {row for row, _ in runs}
    if BASE not in rows or len(rows) < 2:
        what = "needs judged runs and the base model's"
        how = "give compare_algorithms.py --judge-steps and let it end"
        print(f"{options.sources[0]} {what}; {how}", file=sys.stderr)
        return 2
    text = "\n".join(Judgement(runs).tables(options.rewards))
    print(text)
    if options.pack:
        pack(runs, options.pack)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    program.run(main)
