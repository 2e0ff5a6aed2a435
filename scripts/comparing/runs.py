"""The runs of a comparison: what each does, in one process, and how it is kept."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

import measuring
from comparing.scoring import LocalScoring
from comparing.together import Together, of_rows
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
from g2rpo_ray.rollout.worker import RolloutWorker, heldout_noise

BASE = "base model"
"""The row of the untrained model: judged, and never trained."""
_AS_IT_IS = ConfigDict(ser_json_inf_nan="constants")
"""A score that is NaN is kept as NaN, not as a null that cannot be read again."""


WEIGHTS = "weights.safetensors"
"""Of a run that is done: what it draws with at its end, in half precision."""

RECORDED_SHAPES = 32
"""Kept as CUDA graphs: batches of a prompt get smaller, as its completions end."""


def run_name(row: str, learning_rate: float, seed: int) -> str:
    """Of the run's folder."""
    name = "".join(c if c.isalnum() else "_" for c in row)
    return f"{name}-{learning_rate:g}-{seed}"


@dataclass(frozen=True)
class Point:
    """Held-out rewards after so much training."""

    iteration: int
    evaluations: int
    train_s: float
    """Wall time of training, evaluations on held-out prompts left out."""
    rewards: dict[str, float]
    __pydantic_config__: ClassVar[ConfigDict] = _AS_IT_IS


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
    until_s: float = 1e12
    """Time of the clock (``time.time``) at which the run pauses."""
    also: list[int] = field(default_factory=list)
    """Iterations after which there is one, too."""
    curve_prompts: int | None = None
    """Of the held-out prompts, those that are measured on the way; none: all."""

    @property
    def folder(self) -> Path | None:
        """Its own."""
        return self.keep and self.keep / run_name(self.row, self.learning_rate, self.seed)


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
    updates: int = 0
    done: bool = True
    judged: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """At the end: step count -> reward -> mean over the pictures of each held-out prompt."""
    __pydantic_config__: ClassVar[ConfigDict] = _AS_IT_IS

    @property
    def spent(self) -> bool:
        """Whether all budgets are."""
        job = self.job
        return (
            self.iteration >= job.max_iterations
            and self.evaluations >= job.max_evaluations
            and self.train_s >= job.max_s
        )


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
        if result.iteration % job.every == 0 or result.iteration in job.also:
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
    """What its folder says, if it has one; anew where it has no state to go on from, as in a
    folder whose results alone were brought from another machine."""
    file = job.folder and job.folder / "result.json"
    if file and file.exists():
        result = measuring.read_json(file, Result)
        state = file.with_name(f"state-{result.iteration}.safetensors")
        if result.done or result.iteration == 0 or state.exists():
            result.job = job
            return result
        print(f"{state}: not there; the run starts anew", flush=True)
    return Result(job, [], None, done=False)


class Training:
    """What a run's roles do, in one process."""

    def __init__(self, job: Job, result: Result) -> None:
        settings = [
            f"seed={job.seed}",
            f"iterations={max(1, job.max_iterations)}",
            f"learner.learning_rate={job.learning_rate}",
            "learner.ranks=1",
            *job.overrides,
        ]
        self.config = config = load_config(job.config, settings)
        self.worker = local_worker(config)
        self.together, self.device = Together(self.worker), self.worker.device
        measuring.join_alone(self.device)
        self._folder, self._curve_prompts = job.folder, job.curve_prompts
        state = None
        if self._folder and result.iteration:
            state = StateReader([self._folder / f"state-{result.iteration}.safetensors"])
        policy = load_policy(config, self.device)
        self.engine = LearnerEngine(
            policy, config.learner, state, result.updates, old_policy=config.draws_average
        )
        if state is not None:
            self._show_weights()
        self.encoder = TextEncoder(config.model, config.prompts.max_sequence_length)
        self.texts = read_config_prompts(config, config.prompts.train)
        self.order = PromptOrder(
            len(self.texts), config.seed, config.sampling.prompts_per_iteration
        )
        heldout = list(enumerate(read_config_prompts(config, config.prompts.heldout)))
        self.heldout = [self.prompt(*each) for each in evenly(heldout, config.evaluation.prompts)]

    def keep(self, result: Result) -> None:
        """The result, and the weights and optimizer that it goes on from, if it does; at the end
        the weights alone."""
        if self._folder is None:
            return
        result.updates = self.engine.updates
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._folder / f"state-{result.iteration}.safetensors"
        if not result.done and result.iteration:
            with replacing(state) as file:
                write_parts(file, self.engine.state_parts())
        elif result.iteration:
            weights = {n: w.detach().half().cpu() for n, w in self.engine.weights().items()}
            with replacing(self._folder / WEIGHTS) as file:
                save_file(weights, file)
        with replacing(self._folder / "result.json") as file:
            file.write_bytes(TypeAdapter(Result).dump_json(result))
        for older in self._folder.glob("state-*.safetensors"):
            if older != state or result.done:
                older.unlink()

    def judge(self, steps: int) -> dict[str, list[float]]:
        """Mean score of each held-out prompt's pictures, by reward."""
        results = self.heldout_scores(steps, self.heldout)
        return {
            name: [round(float(scores[name].mean()), 5) for scores in results]
            for name in results[0]
        }

    def _show_weights(self) -> None:
        load_weights(self.worker.policy, self.engine.weights())

    def prompt(self, number: int, text: str) -> Prompt:
        return Prompt(number, text, self.encoder.encode(text))

    def iterate(self, iteration: int) -> tuple[int, float]:
        """Evaluations of the rollout, and the largest |Δlog p| before the first update."""
        count = self.config.sampling.prompts_per_iteration
        prompts = [self.prompt(n, self.texts[n]) for n in self.order.batch(iteration)]
        groups = self.together.rollouts(prompts, iteration * count, iteration)
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
        few = evenly(self.heldout, self._curve_prompts or len(self.heldout))
        results = self.heldout_scores(self.config.evaluation.steps, few)
        return {
            name: fmean(float(score) for scores in results for score in scores[name])
            for name in results[0]
        }

    def heldout_scores(self, steps: int, asked: Sequence[Prompt]) -> list[dict[str, Tensor]]:
        """Of each prompt, by reward float32 ``[J]``: those of ``RolloutWorker.evaluate``, but for
        rounding.

        A pass takes as many prompts as fit: a card waits for the host of so small a network.
        """
        engine, count = self.worker.engine, self.config.evaluation.pictures_per_prompt
        shape, sampler = self.worker.policy.shape.packed, engine.sampler(steps)
        together, found = max(1, engine.batch_size // count), []
        for first in range(0, len(asked), together):
            prompts = asked[first : first + together]
            noises = [heldout_noise(shape, prompt.prompt_id, count) for prompt in prompts]
            embeds = of_rows([prompt.embeds for prompt in prompts], [count] * len(prompts))
            start, embeds = torch.cat(noises).to(self.device), embeds.to(self.device)
            x0 = sampler.arrive(start, embeds)
            broken = ~x0.isfinite().flatten(1).all(dim=1).cpu()
            texts = [prompt.text for prompt in prompts for _ in range(count)]
            scoring = self.together.scoring
            scores = scoring.scores(engine.decoder.decode(x0), texts, scoring.names)
            parts = {n: s.masked_fill(broken, torch.nan).split(count) for n, s in scores.items()}
            found += [{n: parts[n][place] for n in parts} for place in range(len(prompts))]
        return found


def local_worker(config: Config) -> RolloutWorker:
    """A rollout worker with its scorers in this process."""
    device = str(role_device(config.rollout.gpus_per_worker, "rollout.gpus_per_worker"))
    if device != "cpu":
        # Worker and learner share this process: float32's products are TF32 in both.
        torch.set_float32_matmul_precision("high")
    scorers = {n: make_scorer(r.kind, r.options, device) for n, r in config.rewards.items()}
    worker = RolloutWorker(config, LocalScoring(scorers))
    worker.engine.exact.record_all(RECORDED_SHAPES)
    return worker
