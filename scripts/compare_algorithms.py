"""Train the tiny model with each algorithm and compare at equal iterations, evaluations and time.

    python scripts/compare_algorithms.py --processes 2 --json runs/comparison.json \
        --markdown docs/comparison.md
    python scripts/compare_algorithms.py --config scripts/tiny_world/hard_run.yaml --cards 1 \
        --rows-of paper --processes 9 --keep runs/compared --limit-s 500 --judge-steps 8 16 28 50

Every run is one process with one thread and no Ray: rollout, scorers and learner are the same
classes that the cluster runs. With ``--cards``, many of them share each card. With ``--keep``, a
run's weights, optimizer and measurements are kept in a folder of its own, and a comparison that was
stopped, also by ``--limit-s``, goes on with the same command. ``judgement.py`` reads the folder.
A run's held-out rewards are measured every few iterations, so that one run answers for all three
budgets. With ``--tuning FILE``, each row's learning rate is chosen
from ``--learning-rates`` by the trained rewards of a seed that is not used again; the choice is
kept in the file and taken from it where it exists. A run's value at a budget is the mean of the
line through its measurements over the last third of the budget: a single one moves by +-0.1 in the
oracle, and rows that are measured less often must not be read at an earlier point.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import Field, TypeAdapter

import measuring
import program
from comparing.runs import BASE, Job, Point, Result, train
from g2rpo_ray.config import load_config
from side_by_side import side_by_side

TUNING_SEED = 1000
ROWS = Path(__file__).parent / "comparing" / "rows.yaml"
"""Each row's settings on top of those of every run."""
RATE = "learner.learning_rate"
"""A row that sets it is not tuned."""
WINDOW = 1 / 3
"""Share of a budget, at its end, over which a run's rewards are averaged."""


def run_all(
    jobs: Sequence[Job], processes: int, cards: int = 0, keep: Path | None = None
) -> list[Result]:
    """Run jobs side by side, each in a fresh process: DeepSpeed knows one group a process.

    What is done is written to ``keep`` at once, so that a stopped comparison loses only the rest.
    """
    results: list[Result] = []
    for result in side_by_side(train, jobs, processes, cards=cards, fresh=True):
        results.append(result)
        measuring.write_json(keep, {"runs": as_json(results)})
    return sorted(results, key=lambda result: jobs.index(result.job))


@dataclass
class Compared:
    """What is read of an earlier ``--json``."""

    runs: Annotated[list[Result], Field(min_length=1)]


def as_json(results: Sequence[Result]) -> Any:
    """Without what says where they were made, and without what ``judgement.py`` reads."""
    places: dict[str, set[str] | bool] = {"job": {"config", "keep", "until_s"}, "judged": True}
    kind = TypeAdapter(list[Result])
    return kind.dump_python(list(results), mode="json", exclude={"__all__": places})


def learning_rates(options: argparse.Namespace, templates: Sequence[Job]) -> dict[str, float]:
    """Of each row; where they are to be tuned, from the file, to which missing rows are added.

    The best is that of the highest mean gain of the trained rewards.
    """
    if options.tuning is None:
        return dict.fromkeys(options.rows, options.learning_rates[0])
    known: dict[str, float] = {}
    if options.tuning.exists():
        known = measuring.read_json(options.tuning, dict[str, float])
    if missing := [template for template in templates if template.row not in known]:
        jobs = [
            replace(
                template,
                seed=TUNING_SEED,
                learning_rate=rate,
                max_iterations=options.tuning_iterations,
                max_evaluations=options.tuning_evaluations,
                max_s=0.0,
                judge_steps=[],
            )
            for template in missing
            for rate in options.learning_rates
        ]
        results = run_all(jobs, options.processes, options.cards)
        if not all(result.done for result in results):
            sys.exit("the rates are not tuned yet; the same command goes on")
        # The best comes last.
        for result in sorted(results, key=_trained_gain):
            row, rate = result.job.row, result.job.learning_rate
            print(f"tuning {row:<16} lr {rate:g}: {_trained_gain(result):+.4f}")
            known[row] = rate
        measuring.write_json(options.tuning, known)
    return known


def _trained_gain(result: Result) -> float:
    # The mean of the last half of a run: single measurements are noisy.
    names = load_config(result.job.config).trained_rewards
    late = result.points[-(len(result.points) // 2) :]
    start = result.points[0].rewards
    return fmean(point.rewards[n] - start[n] for point in late for n in names)


def at_budget(result: Result, budget: str, limit: float) -> Point:
    """Where a run stands at a budget, with its mean rewards over the budget's last third.

    Between two measurements both are read off a straight line, so that how often a row was measured
    does not decide where it is read. The untrained model is no measurement of a row.

    Raises:
        ValueError: the run was not measured over the whole of that third.
    """
    trained = [point for point in result.points if point.iteration > 0]
    spent = [getattr(point, budget) for point in trained]
    start = limit * (1 - WINDOW)
    if not spent or start < spent[0] or spent[-1] < limit:
        raise ValueError(
            f"{result.job.row}, seed {result.job.seed}: {budget} {limit:g} needs measurements from "
            f"{start:g} or before to {limit:g} or after; there are {spent}"
        )

    places = [start, *(place for place in spent if start < place < limit), limit]

    def now(name: str) -> float:
        return float(np.interp(limit, spent, [getattr(point, name) for point in trained]))

    def mean(reward: str) -> float:
        line = np.interp(places, spent, [point.rewards[reward] for point in trained])
        return float(np.trapezoid(line, places) / (limit - start))

    rewards = {name: mean(name) for name in trained[0].rewards}
    return Point(round(now("iteration")), round(now("evaluations")), now("train_s"), rewards)


def table(results: Sequence[Result], budget: str, limit: float) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every row at a budget."""
    rows = []
    for name in dict.fromkeys(result.job.row for result in results):
        runs = [result for result in results if result.job.row == name]
        points = [at_budget(run, budget, limit) for run in runs]
        rewards = {r: [point.rewards[r] for point in points] for r in points[0].rewards}
        rows.append(
            {
                "row": name,
                "learning_rate": runs[0].job.learning_rate,
                "iterations": fmean(p.iteration for p in points),
                "evaluations": fmean(p.evaluations for p in points),
                "train_s": fmean(p.train_s for p in points),
                "rewards": {
                    reward: {
                        "mean": fmean(values),
                        "spread": stdev(values) if len(values) > 1 else None,
                    }
                    for reward, values in rewards.items()
                },
            }
        )
    return rows


def markdown_tables(report: dict[str, Any]) -> Iterator[str]:
    """A table for each budget that has one."""
    titles = {
        "iteration": "At equal iterations ({:,.0f})",
        "evaluations": "At equal evaluations ({:,.0f})",
        "train_s": "At equal wall time ({:,.0f} s of a run)",
    }
    rewards = list(report["before"])
    for budget, rows in report["tables"].items():
        title = titles[budget]
        yield f"### {title.format(report['budgets'][budget])}\n"
        heads = ["algorithm", "lr", "iterations", "evaluations", "s", *rewards]
        yield "| " + " | ".join(heads) + " |"
        yield "| --- |" + " ---: |" * (len(heads) - 1)
        before = " | ".join(f"{report['before'][reward]:.3f}" for reward in rewards)
        yield f"| base model | | | | | {before} |"
        for row in rows:
            scores = " | ".join(_scores(**row["rewards"][reward]) for reward in rewards)
            yield (
                f"| {row['row']} | {row['learning_rate']:g} | {row['iterations']:.0f} | "
                f"{row['evaluations']:,.0f} | {row['train_s']:.0f} | {scores} |"
            )
        yield ""


def _scores(mean: float, spread: float | None) -> str:
    return f"{mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def plot(results: Sequence[Result], path: Path) -> None:
    """Held-out rewards over evaluations: mean over seeds, with their range."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rewards = list(results[0].points[0].rewards)
    figure, axes = pyplot.subplots(1, len(rewards), figsize=(5 * len(rewards), 3.6))
    for axis, reward in zip(axes, rewards, strict=True):
        for name in dict.fromkeys(result.job.row for result in results):
            curves = [r.points for r in results if r.job.row == name]
            places = list(zip(*curves, strict=False))
            x = [fmean(p.evaluations for p in place) / 1000 for place in places]
            values = np.array([[p.rewards[reward] for p in place] for place in places])
            (line,) = axis.plot(x, values.mean(axis=1), label=name)
            low, high = values.min(axis=1), values.max(axis=1)
            axis.fill_between(x, low, high, alpha=0.12, color=line.get_color())
        axis.set(title=reward, xlabel="evaluations (thousands)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    known = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--rows-of", choices=tuple(known), default="quickstart", help="see ROWS")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="some of them")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only tune")
    parser.add_argument("--iterations", type=int, default=100, help="budget (a)")
    parser.add_argument("--evaluations", type=int, default=44_000, help="(b); 0: the cheapest row")
    parser.add_argument("--seconds", type=float, default=0.0, help="budget (c); 0: the fastest row")
    parser.add_argument("--every", type=int, default=20, help="iterations between evaluations")
    parser.add_argument("--also", nargs="*", type=int, default=[], help="one after these, too")
    parser.add_argument("--heldout", type=int, default=96, help="held-out prompts")
    parser.add_argument("--curve-prompts", type=int, help="of them, before the end; none: all")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-4])
    parser.add_argument("--tuning", type=Path, help="file of each row's learning rate")
    parser.add_argument("--tuning-evaluations", type=int, default=22_000, help="budget of tuning")
    parser.add_argument("--tuning-iterations", type=int, default=1, help="and at least so many")
    parser.add_argument(
        "--runs", nargs="+", type=Path, metavar="JSON", help="show earlier ones; nothing is trained"
    )
    parser.add_argument("--config", type=Path, default=Job.config, help="settings of every run")
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--cards", type=int, default=0, help="to share; 0: the CPU")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where runs are kept")
    parser.add_argument("--limit-s", type=float, default=1e11, help="pause after this")
    parser.add_argument("--judge-steps", nargs="*", type=int, default=[], metavar="N")
    parser.add_argument("--plot", type=program.output, help="write the curves as SVG")
    parser.add_argument("--markdown", type=program.output, help="write the tables")
    options = parser.parse_args()
    own_rates = {
        row: settings.pop(RATE)
        for row, settings in known[options.rows_of].items()
        if RATE in settings
    }
    rows = {
        row: [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        for row, settings in known[options.rows_of].items()
    }
    options.rows = options.rows or list(rows)
    if unknown := sorted(set(options.rows) - rows.keys()):
        print(f"unknown rows {unknown}; allowed: {', '.join(rows)}", file=sys.stderr)
        return 2
    if len(options.learning_rates) > 1 and options.tuning is None:
        print("several --learning-rates need --tuning FILE", file=sys.stderr)
        return 2
    template = Job(
        row="",
        seed=0,
        learning_rate=0.0,
        max_iterations=options.iterations,
        max_evaluations=options.evaluations,
        max_s=options.seconds,
        every=options.every,
        also=options.also,
        curve_prompts=options.curve_prompts,
        overrides=[
            f"evaluation.prompts={options.heldout}",
            *(measuring.settings("shared_card") if options.cards else []),
        ],
        config=options.config,
        judge_steps=options.judge_steps,
        keep=options.keep,
        until_s=time.time() + options.limit_s,
    )
    templates = [
        replace(template, row=row, overrides=[*rows[row], *template.overrides])
        for row in options.rows
    ]
    if options.runs:
        results = [run for each in options.runs for run in measuring.read_json(each, Compared).runs]
    else:
        tuned = [each for each in templates if each.row not in own_rates]
        rates = learning_rates(options, tuned) | own_rates
        jobs = [
            replace(each, learning_rate=rates[each.row], seed=seed)
            # Every row has as many seeds as another where time ends it.
            for seed in options.seeds
            for each in templates
        ]
        if not jobs:
            return 0
        if options.judge_steps:
            base = replace(template, row=BASE, learning_rate=1.0, max_iterations=0)
            base = replace(base, max_evaluations=0, max_s=0.0)
            jobs.insert(0, base)
        results = run_all(jobs, options.processes, options.cards, options.json)
    if waiting := [result for result in results if not result.done]:
        print(f"{len(waiting)} of {len(results)} runs are not done; the same command goes on")
        return 3
    results = [result for result in results if result.job.row != BASE]
    report = make_report(results, options)
    text = "\n".join(markdown_tables(report))
    print(text)
    print(f"max |Δlog p| before the first update: {report['first_max_abs_log_ratio']}")
    measuring.write_json(options.json, report)
    if options.plot:
        plot(results, options.plot)
    if options.markdown:
        options.markdown.write_text(text)
    return 0 if report["tables"] else 2


def make_report(results: Sequence[Result], options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, with a table for each budget at which every run was measured."""
    asked = {
        "iteration": options.iterations,
        "evaluations": options.evaluations or math.inf,
        "train_s": options.seconds or math.inf,
    }
    # No row is read beyond what every run was measured for.
    budgets = {
        budget: min(limit, *(getattr(result.points[-1], budget) for result in results))
        for budget, limit in asked.items()
    }
    tables = {}
    for budget, limit in budgets.items():
        try:
            tables[budget] = table(results, budget, limit)
        except ValueError as error:
            print(f"no table: {error}; give a larger budget, or a smaller --every", file=sys.stderr)
    ratios = [
        (result.job.row, result.first_max_abs_log_ratio)
        for result in results
        if result.first_max_abs_log_ratio is not None
    ]
    return {
        "machine": {"cpu_count": os.cpu_count(), "python": platform.python_version()},
        "command": " ".join(sys.argv),
        "budgets": budgets,
        "before": {
            name: fmean(result.points[0].rewards[name] for result in results)
            for name in results[0].points[0].rewards
        },
        "first_max_abs_log_ratio": {
            row: max((ratio for name, ratio in ratios if name == row), default=None)
            for row in options.rows
        },
        "tables": tables,
        "runs": as_json(results),
    }


if __name__ == "__main__":
    program.run(main)
