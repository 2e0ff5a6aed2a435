"""Train the tiny model with each algorithm and compare at equal iterations, evaluations and time.

    python scripts/compare_algorithms.py --processes 2 --json runs/comparison.json \
        --markdown docs/comparison.md
    python scripts/compare_algorithms.py --config scripts/tiny_world/hard_run.yaml --cards 1 \
        --processes 9 --keep runs/compared --limit-s 500 --judge-steps 8 16 28 50

Every run is one process with one thread and no Ray: rollout, scorers and learner are the same
classes that the cluster runs. With ``--cards``, many of them share each card. With ``--keep``, a
run's weights, optimizer and measurements are kept in a folder of its own, and a comparison that was
stopped, also by ``--limit-s``, goes on with the same command. ``judgement.py`` reads the folder.
 A run's held-out rewards are measured every few iterations, so that
one run answers for all three budgets. With ``--tuning FILE``, each row's learning rate is chosen
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor

import measuring
from g2rpo_ray.common.device import role_device
from g2rpo_ray.common.files import replacing
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.learner.checkpoints.parts import StateReader, write_parts
from g2rpo_ray.learner.engine import LearnerEngine
from g2rpo_ray.learner.update import update_on_groups
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.weights import load_weights
from g2rpo_ray.prompts.dataset import Prompt, PromptOrder, evenly, read_config_prompts
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer
from g2rpo_ray.rollout.answers import HeldoutDraw
from g2rpo_ray.rollout.worker import RolloutWorker
from side_by_side import side_by_side

TUNING_SEED = 1000
WINDOW = 1 / 3
"""Share of a budget, at its end, over which a run's rewards are averaged."""

ROWS: dict[str, list[str]] = {
    "G2RPO Λ={1}": ["algorithm=g2rpo", "g2rpo.granularities=[1]"],
    "G2RPO Λ={1,2}": ["algorithm=g2rpo", "g2rpo.granularities=[1,2]"],
    "G2RPO Λ={1,2,3}": ["algorithm=g2rpo", "g2rpo.granularities=[1,2,3]"],
    "MixGRPO": ["algorithm=mix_grpo", "mix_grpo.window=2", "mix_grpo.shift_interval=10"],
    "Flow-GRPO": ["algorithm=flow_grpo"],
    "DanceGRPO": ["algorithm=dance_grpo", "sampling.sde=dance", "sampling.eta=0.3"],
}
"""Table row -> settings on top of the quickstart's."""


@dataclass(frozen=True)
class Point:
    """Held-out rewards after so much training."""

    iteration: int
    evaluations: int
    train_s: float
    """Wall time of training, evaluations on held-out prompts left out."""
    rewards: dict[str, float]


@dataclass(frozen=True)
class Job:
    """One training run."""

    row: str
    seed: int
    learning_rate: float
    max_iterations: int
    max_evaluations: int
    max_s: float
    every: int
    """Iterations between held-out evaluations."""
    overrides: list[str] = field(default_factory=list)
    config: Path = measuring.ROOT / "configs" / "quickstart.yaml"
    judge_steps: list[int] = field(default_factory=list)
    """Step counts at which the end is judged."""
    keep: Path | None = None
    """Folder of all runs."""
    until_s: float = math.inf
    """Time of the clock (``time.time``) at which the run pauses."""

    @property
    def folder(self) -> Path | None:
        """Its own."""
        name = "".join(c if c.isalnum() else "_" for c in self.row)
        return self.keep and self.keep / f"{name}-{self.learning_rate:g}-{self.seed}"


@dataclass
class Result:
    """What a run gave so far."""

    job: Job
    points: list[Point]
    first_max_abs_log_ratio: float | None
    """Largest |Δlog p| before an iteration's first update, over the whole run; None: not kept."""
    iteration: int = 0
    evaluations: int = 0
    train_s: float = 0.0
    done: bool = True
    judged: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """At the end: step count -> reward -> mean over the pictures of each held-out prompt."""

    @property
    def spent(self) -> bool:
        """Whether all budgets are."""
        job = self.job
        return (
            self.iteration >= job.max_iterations
            and self.evaluations >= job.max_evaluations
            and self.train_s >= job.max_s
        )


BASE = "base model"
"""The row of the untrained model: judged, and never trained."""


def train(job: Job) -> Result:
    """Run one job in this process, until all of its budgets are spent or it has to pause."""
    result = kept_result(job)
    if result.done or time.time() > job.until_s:
        return result
    training = Training(job, result)
    if not result.points:
        result.points.append(Point(0, 0, 0.0, training.heldout_means()))
    while not result.spent and time.time() < job.until_s:
        seconds, (spent, ratio) = measuring.timed(partial(training.iterate, result.iteration))
        result.iteration += 1
        result.evaluations += spent
        result.train_s += seconds
        result.first_max_abs_log_ratio = max(result.first_max_abs_log_ratio or 0.0, ratio)
        if result.iteration % job.every == 0:
            rewards = training.heldout_means()
            result.points.append(
                Point(result.iteration, result.evaluations, result.train_s, rewards)
            )
            print(
                f"{job.row:<16} seed {job.seed} lr {job.learning_rate:g}  iteration "
                f"{result.iteration:>4}  {result.evaluations:>7,} evaluations  "
                f"{result.train_s:5.0f} s  "
                + "  ".join(f"{name} {value:.3f}" for name, value in rewards.items()),
                flush=True,
            )
            training.keep(result)
    if result.spent:
        result.judged = {steps: training.judge(steps) for steps in job.judge_steps}
        result.done = True
    training.keep(result)
    return result


def kept_result(job: Job) -> Result:
    """What its folder says, if it has one."""
    file = job.folder and job.folder / "result.json"
    if not (file and file.exists()):
        return Result(job, [], None, done=False)
    result = TypeAdapter(Result).validate_json(file.read_text())
    result.job = job
    return result


class Training:
    """What a run's roles do, in one process."""

    def __init__(self, job: Job, result: Result) -> None:
        settings = [
            f"seed={job.seed}",
            f"iterations={max(1, job.max_iterations)}",
            f"learner.learning_rate={job.learning_rate}",
            "learner.ranks=1",
            *ROWS.get(job.row, []),
            *job.overrides,
        ]
        self.config = config = load_config(job.config, settings)
        self.worker = local_worker(config)
        self.device = self.worker.device
        measuring.join_alone(self.device)
        self._folder = job.folder
        state = None
        if self._folder and result.iteration:
            state = StateReader([self._folder / f"state-{result.iteration}.safetensors"])
        policy = load_policy(config, self.device)
        self.engine = LearnerEngine(policy, config.learner, state, self._updates(result))
        if state is not None:
            self._show_weights()
        self.encoder = TextEncoder(config.model, config.prompts.max_sequence_length)
        self.texts = read_config_prompts(config, config.prompts.train)
        self.order = PromptOrder(
            len(self.texts), config.seed, config.sampling.prompts_per_iteration
        )
        heldout = list(enumerate(read_config_prompts(config, config.prompts.heldout)))
        self.heldout = [self.prompt(*each) for each in evenly(heldout, config.evaluation.prompts)]

    def _updates(self, result: Result) -> int:
        steps = len(self.worker.algorithm.trained_steps(0))
        per_step = self.config.learner.update == "per_sde_step"
        return result.iteration * (steps if per_step else 1)

    def keep(self, result: Result) -> None:
        """The result, and the weights and optimizer that it goes on from, if it does."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._folder / f"state-{result.iteration}.safetensors"
        if not result.done and result.iteration:
            with replacing(state) as file:
                write_parts(file, self.engine.state_parts())
        with replacing(self._folder / "result.json") as file:
            file.write_bytes(TypeAdapter(Result).dump_json(result))
        for older in self._folder.glob("state-*.safetensors"):
            if older != state or result.done:
                older.unlink()

    def judge(self, steps: int) -> dict[str, list[float]]:
        """Mean score of each held-out prompt's pictures, by reward."""
        draw = HeldoutDraw(steps, self.config.evaluation.pictures_per_prompt)
        results = [self.worker.evaluate(prompt, draw) for prompt in self.heldout]
        return {
            name: [round(float(result.scores[name].mean()), 5) for result in results]
            for name in results[0].scores
        }

    def _show_weights(self) -> None:
        load_weights(self.worker.policy, self.engine.weights())

    def prompt(self, number: int, text: str) -> Prompt:
        return Prompt(number, text, self.encoder.encode(text))

    def iterate(self, iteration: int) -> tuple[int, float]:
        """Evaluations of the rollout, and the largest |Δlog p| before the first update."""
        count = self.config.sampling.prompts_per_iteration
        groups = [
            self.worker.rollout(
                self.prompt(number, self.texts[number]), iteration * count + slot, iteration
            )[1]
            for slot, number in enumerate(self.order.batch(iteration))
        ]
        report = update_on_groups(
            self.engine,
            groups,
            [1.0] * count,
            config=self.config,
            prompts=count,
            ranks=1,
            device=self.device,
        )
        self._show_weights()
        first = [r.health.max_abs_log_ratio for r in report.records if r.update == 0]
        return sum(group.evaluations for group in groups), max(first)

    def heldout_means(self) -> dict[str, float]:
        results = [self.worker.evaluate(prompt) for prompt in self.heldout]
        return {
            name: fmean(float(score) for result in results for score in result.scores[name])
            for name in results[0].scores
        }


def local_worker(config: Config) -> RolloutWorker:
    """A rollout worker with its scorers in this process."""
    device = str(role_device(config.rollout.gpus_per_worker, "rollout.gpus_per_worker"))
    scorers = {n: make_scorer(r.kind, r.options, device) for n, r in config.rewards.items()}
    return RolloutWorker(config, LocalScoring(scorers))


@dataclass(frozen=True)
class LocalScoring:
    """The reward servers' place in one process."""

    scorers: dict[str, RewardScorer]

    @property
    def names(self) -> list[str]:
        return sorted(self.scorers)

    def submit(
        self,
        prompt_id: int,  # noqa: ARG002
        prompt: str,
        pictures: Tensor,
        names: list[str],
    ) -> "LocalScores":
        count = [prompt] * len(pictures)
        return LocalScores({name: self.scorers[name].score(pictures, count) for name in names})


@dataclass(frozen=True)
class LocalScores:
    """Scores that are there already."""

    scores: dict[str, Tensor]
    failures: list[str] = field(default_factory=list)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    waiting_for: str = ""

    def result(self) -> dict[str, Tensor]:
        return self.scores


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


def as_json(results: Sequence[Result]) -> Any:
    return TypeAdapter(list[Result]).dump_python(list(results), mode="json")


def learning_rates(options: argparse.Namespace, template: Job) -> dict[str, float]:
    """Of each row; where they are to be tuned, from the file, which is written if need be.

    The best is that of the highest mean gain of the trained rewards.
    """
    if options.tuning is None:
        return dict.fromkeys(options.rows, options.learning_rates[0])
    if not options.tuning.exists():
        tuned = replace(
            template,
            seed=TUNING_SEED,
            max_iterations=1,
            max_evaluations=options.tuning_evaluations,
            max_s=0.0,
        )
        jobs = [
            replace(tuned, row=row, learning_rate=rate)
            for row in options.rows
            for rate in options.learning_rates
        ]
        best: dict[str, float] = {}
        # The best comes last.
        for result in sorted(run_all(jobs, options.processes, options.cards), key=_trained_gain):
            row, rate = result.job.row, result.job.learning_rate
            print(f"tuning {row:<16} lr {rate:g}: {_trained_gain(result):+.4f}")
            best[row] = rate
        measuring.write_json(options.tuning, {row: best[row] for row in options.rows})
    return dict(json.loads(options.tuning.read_text()))


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
                        "spread": stdev(values) if len(values) > 1 else 0.0,
                    }
                    for reward, values in rewards.items()
                },
            }
        )
    return rows


def markdown_tables(report: dict[str, Any]) -> Iterator[str]:
    """The three tables, one for each budget."""
    titles = {
        "iteration": "At equal iterations ({:,.0f})",
        "evaluations": "At equal evaluations ({:,.0f})",
        "train_s": "At equal wall time ({:,.0f} s of one core)",
    }
    rewards = list(report["before"])
    for budget, title in titles.items():
        yield f"### {title.format(report['budgets'][budget])}\n"
        heads = ["algorithm", "lr", "iterations", "evaluations", "s", *rewards]
        yield "| " + " | ".join(heads) + " |"
        yield "| --- |" + " ---: |" * (len(heads) - 1)
        before = " | ".join(f"{report['before'][reward]:.3f}" for reward in rewards)
        yield f"| base model | | | | | {before} |"
        for row in report["tables"][budget]:
            scores = " | ".join(
                f"{row['rewards'][reward]['mean']:.3f} ± {row['rewards'][reward]['spread']:.3f}"
                for reward in rewards
            )
            yield (
                f"| {row['row']} | {row['learning_rate']:g} | {row['iterations']:.0f} | "
                f"{row['evaluations']:,.0f} | {row['train_s']:.0f} | {scores} |"
            )
        yield ""


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
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only tune")
    parser.add_argument("--iterations", type=int, default=100, help="budget (a)")
    parser.add_argument("--evaluations", type=int, default=44_000, help="budget (b)")
    parser.add_argument("--seconds", type=float, default=0.0, help="budget (c); 0: the fastest row")
    parser.add_argument("--every", type=int, default=20, help="iterations between evaluations")
    parser.add_argument("--heldout", type=int, default=96, help="held-out prompts")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-4])
    parser.add_argument("--tuning", type=Path, help="file of each row's learning rate")
    parser.add_argument("--tuning-evaluations", type=int, default=22_000, help="budget of tuning")
    parser.add_argument("--runs", type=Path, help="an earlier --json to show; nothing is trained")
    parser.add_argument("--config", type=Path, default=Job.config, help="settings of every run")
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--cards", type=int, default=0, help="to share; 0: the CPU")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where runs are kept")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="pause after this")
    parser.add_argument("--judge-steps", nargs="*", type=int, default=[], metavar="N")
    parser.add_argument("--plot", type=Path, help="write the curves as SVG")
    parser.add_argument("--markdown", type=Path, help="write the tables")
    options = parser.parse_args()
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
        overrides=[
            f"evaluation.prompts={options.heldout}",
            *(measuring.settings("shared_card") if options.cards else []),
        ],
        config=options.config,
        judge_steps=options.judge_steps,
        keep=options.keep,
        until_s=time.time() + options.limit_s,
    )
    rates = learning_rates(options, template)
    jobs = [
        replace(template, row=row, learning_rate=rates[row], seed=seed)
        for row in options.rows
        for seed in options.seeds
    ]
    if not jobs:
        return 0
    if options.judge_steps:
        base = replace(template, row=BASE, learning_rate=1.0, max_iterations=0)
        base = replace(base, max_evaluations=0, max_s=0.0)
        jobs.insert(0, base)
    if options.runs:
        runs = json.loads(options.runs.read_text())["runs"]
        results = TypeAdapter(list[Result]).validate_python(runs)
    else:
        results = run_all(jobs, options.processes, options.cards, options.json)
    if waiting := [result for result in results if not result.done]:
        print(f"{len(waiting)} of {len(results)} runs are not done; the same command goes on")
        return 3
    results = [result for result in results if result.job.row != BASE]
    try:
        report = make_report(results, options)
    except ValueError as error:
        print(f"no tables: {error}; give a larger budget, or a smaller --every", file=sys.stderr)
        return 2
    text = "\n".join(markdown_tables(report))
    print(text)
    print(f"max |Δlog p| before the first update: {report['first_max_abs_log_ratio']}")
    measuring.write_json(options.json, report)
    if options.plot:
        plot(results, options.plot)
    if options.markdown:
        options.markdown.write_text(text)
    return 0


def make_report(results: Sequence[Result], options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, with a table for each budget.

    Raises:
        ValueError: a run was not measured where a table is to be read.
    """
    asked = {
        "iteration": options.iterations,
        "evaluations": options.evaluations,
        "train_s": options.seconds or math.inf,
    }
    # No row is read beyond what every run was measured for.
    budgets = {
        budget: min(limit, *(getattr(result.points[-1], budget) for result in results))
        for budget, limit in asked.items()
    }
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
        "tables": {budget: table(results, budget, limit) for budget, limit in budgets.items()},
        "runs": as_json(results),
    }


if __name__ == "__main__":
    sys.exit(main())
