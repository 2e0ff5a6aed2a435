"""The loop of a run: generate, learn, sync, record. It alone knows every room."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from g2rpo_ray.algorithms import make_strategy
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.logs import log_as, log_file
from g2rpo_ray.common.text_files import replace_text
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.files import CheckpointInfo
from g2rpo_ray.learner.checkpoints.folders import SNAPSHOTS, checkpoint_folder
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.ranks import GroupsLostError, LearnerUpdate
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.plan.networks import policy_size
from g2rpo_ray.prompts.dataset import PromptOrder, check_apart, evenly, read_config_prompts
from g2rpo_ray.rollout.answers import RolloutSummary
from g2rpo_ray.run.folder import (
    Run,
    best_evaluated,
    changed_settings,
    give_up_later,
    heldout_before_after,
    open_run,
    versions,
)
from g2rpo_ray.run.stop import StopRequested, StopSignal
from g2rpo_ray.tracking.memory import PeakMemory
from g2rpo_ray.tracking.metrics import MetricsLog
from g2rpo_ray.tracking.progress import Progress, print_table
from g2rpo_ray.tracking.report.page import write_report
from g2rpo_ray.training.activity import Activity
from g2rpo_ray.training.collect import flop_metrics, rollout_metrics, sync_metrics, update_metrics
from g2rpo_ray.training.heldout import HeldoutEvaluation
from g2rpo_ray.training.roles import Roles, launch
from g2rpo_ray.weight_sync import SyncReport


def train(config: Config, resume: str = "none") -> None:
    """Run ``config`` to its end, or to a signal; always leaves a checkpoint and a report.

    Raises:
        StopRequested: a signal ended the run early, after its checkpoint was written.
    """
    # Imported here because it derives from the loop below.
    from g2rpo_ray.training.one_step_off import OneStepOffLoop

    check_model(config)
    train_prompts = read_config_prompts(config, config.prompts.train)
    heldout = read_config_prompts(config, config.prompts.heldout)
    check_apart(train_prompts, heldout)
    heldout_prompts = evenly(list(enumerate(heldout)), config.evaluation.prompts)
    changes = changed_settings(Path(config.run_dir), config) if resume != "none" else []
    run = open_run(config, resume)
    progress, stop = Progress(config.iterations, run.info.iteration), StopSignal()
    for change in changes:
        progress.note(f"changed since the run was started: {change}")

    starting = True

    def note(text: str) -> None:
        if starting:
            # Nothing is lost yet: a signal need not wait until all roles have started.
            stop.check()
        progress.note(text)

    log_as("driver")
    with (
        stop,
        log_file(run.folder / "log.jsonl"),
        PeakMemory() as memory,
        launch(config, run.checkpoint, note) as roles,
        MetricsLog(
            run.folder,
            config.tracking,
            config.model_dump(mode="json"),
            run.first_record,
        ) as log,
        progress,
    ):
        starting = False
        give_up_later(run)
        kind = TrainingLoop if config.pipeline == "sync" else OneStepOffLoop
        loop = kind(config, run, roles, log, progress, stop, memory, train_prompts, heldout_prompts)
        with closing(loop.heldout):
            loop.run()


@dataclass(frozen=True)
class Drawn:
    """One iteration's groups, and the small part of them that the driver looks at."""

    iteration: int
    summaries: list[RolloutSummary]
    groups: list[ray.ObjectRef]
    generate_s: float

    @property
    def oldest_version(self) -> int:
        """Of the weights that drew a group."""
        return min(summary.weight_version for summary in self.summaries)


class TrainingLoop:
    """One iteration is: generate, learn, sync, record; evaluate and save when due."""

    def __init__(
        self,
        config: Config,
        run: Run,
        roles: Roles,
        log: MetricsLog,
        progress: Progress,
        stop: StopSignal,
        memory: PeakMemory,
        train_prompts: list[str],
        heldout_prompts: list[tuple[int, str]],
    ) -> None:
        self.config, self.run_folder, self.state = config, run.folder, run.info
        self.roles, self.log, self.progress = roles, log, progress
        self.stop, self.memory = stop, memory
        self.train_prompts = train_prompts
        self.order = PromptOrder(
            len(train_prompts), config.seed, config.sampling.prompts_per_iteration
        )
        self.seconds: dict[str, float] = {}
        self.evaluation_tflop = policy_size(config).evaluation.tflop
        self.heldout = HeldoutEvaluation(
            config, run.folder, roles, log, progress.note, lambda: self.encode(heldout_prompts)
        )
        self.activity = Activity(roles, self.heldout)

    def run(self) -> None:
        """Train to the end; on a signal, save and re-raise."""
        saved = start = self.state.iteration
        self.log.live(
            {
                "run/iterations": self.config.iterations,
                "run/iteration": start,
                "run/started_unix_s": time.time(),
                "run/clip": self.config.learner.clip,
            }
        )
        try:
            if start > 0:
                self.sync()
            if start == 0 or self.is_due(self.config.evaluation.every):
                # Also one that a stop cut off.
                self.evaluate()
            while not self.is_last():
                # Recorded before it is saved: a resumed run never lacks the line of its checkpoint.
                self.record(self.train_iteration())
                self.heldout.collect()
                if self.is_due(self.config.evaluation.every):
                    self.evaluate()
                if self.is_due(self.config.checkpoint.every) or self.is_last():
                    self.save()
                    saved = self.state.iteration
                elif self.is_due(self.config.checkpoint.snapshot_every):
                    self.snapshot()
            self.finish()
        except StopRequested as request:
            if saved < self.state.iteration:
                self.save()
            self.finish_save()
            self.progress.note(
                f"stopped by {request} after iteration {self.state.iteration} of "
                f"{self.config.iterations}; its state was on the disk "
                f"{time.monotonic() - request.received_s:.1f} s after the signal; --resume auto "
                "continues from there"
            )
            write_report(self.run_folder)
            raise
        except RunError as error:
            if not isinstance(error, LearnerError):
                # The learner is well: what it still writes is not lost.
                self.finish_save()
            raise

    def train_iteration(self) -> dict[str, float]:
        """The algorithm: rollout groups, integrated advantages, clipped updates, new weights."""
        started_s = time.perf_counter()
        drawn = self.draw(self.state.iteration)
        with self.stop.held():
            drawn, update = self.learn(drawn)
            report = self.sync()
            return self.advance(drawn, update, report, started_s)

    def draw(self, iteration: int) -> Drawn:
        """One group for each prompt of an iteration, with the weights that the workers have."""
        started_s = time.perf_counter()
        with self.phase("generate"):
            batch = [(number, self.train_prompts[number]) for number in self.order.batch(iteration)]
            summaries, groups = self.roles.pool.generate(
                self.encode(batch), iteration, self.on_wait
            )
        for failure in (failure for summary in summaries for failure in summary.failures):
            self.progress.note(f"dropped a group: {failure}")
        for warning in (warning for summary in summaries for warning in summary.warnings):
            self.progress.note(f"warning: {warning}")
        return Drawn(iteration, summaries, groups, time.perf_counter() - started_s)

    def learn(self, drawn: Drawn) -> tuple[Drawn, LearnerUpdate]:
        """Train on an iteration's groups, or on new ones where they are lost with a node.

        Returns:
            What was trained on, and the update.
        """
        while True:
            try:
                with self.phase("learn"):
                    return drawn, self.roles.learner.update(drawn.groups)
            except GroupsLostError as lost:
                self.progress.note(f"{lost}; drawing iteration {drawn.iteration} again")
                drawn = self.draw(drawn.iteration)

    def sync(self) -> SyncReport:
        """Bring the learner's weights to every rollout worker, verified."""
        with self.phase("sync"):
            return self.roles.sync()

    def advance(
        self, drawn: Drawn, update: LearnerUpdate, report: SyncReport | None, started_s: float
    ) -> dict[str, float]:
        """The state after an iteration, and its numbers; no report where the run is stopping."""
        if not update.taught:
            self.progress.note(
                f"warning: all groups of iteration {drawn.iteration + 1} were dropped: it taught "
                "nothing, and the weights stay as they are"
            )
        staleness = self.state.weight_version - drawn.oldest_version
        self.state = replace(
            self.state,
            iteration=drawn.iteration + 1,
            weight_version=self.roles.learner.version,
            updates=self.state.updates + len(update.grad_norms),
            evaluations=self.state.evaluations + sum(s.evaluations for s in drawn.summaries),
            train_s=self.state.train_s + time.perf_counter() - started_s,
        )
        self.log.observe("rollout/prompt_s", [sum(s.seconds.values()) for s in drawn.summaries])
        return (
            rollout_metrics(drawn.summaries, drawn.generate_s)
            | flop_metrics(drawn.summaries, self.evaluation_tflop)
            | {"rollout/staleness": staleness}
            | update_metrics(update)
            | (sync_metrics(report) if report else {})
        )

    def evaluate(self) -> None:
        """Have the weights of now judged on the held-out prompts."""
        with self.phase("evaluate"):
            self.heldout.evaluate(self.state.iteration, self.on_wait)

    def record(self, values: dict[str, float]) -> None:
        """Write one iteration's line; an evaluation or checkpoint counts to the line after it."""
        times = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        values |= times | {"time/iteration_s": sum(times.values())} | self.activity.lap()
        values["memory/pss_gib"] = self.memory.pss_gib
        self.seconds = {}
        self.log.record(self.state.iteration, values)
        if self.roles.learner.saved_unix_s is not None:
            self.log.live({"run/checkpoint_unix_s": self.roles.learner.saved_unix_s})
        self.progress.iteration(self.state.iteration, values)

    def save(self) -> None:
        """Begin a checkpoint of the state of now; the learner writes it while training goes on."""
        # The last one must be there to be found the best.
        self.finish_save()
        self.begin_save(self.run_folder, self.heldout.kept)

    def snapshot(self) -> None:
        """As ``save``, but kept only until the next checkpoint."""
        self.begin_save(self.run_folder / SNAPSHOTS)

    def begin_save(self, folder: Path, keep_also: Sequence[int] = ()) -> None:
        """Have the ranks copy the state of now; waits for the state before to be whole."""
        with self.phase("checkpoint"):
            target = checkpoint_folder(folder, self.state.iteration)
            self.roles.learner.save(target, self.checkpoint_info(), keep_also)

    def finish_save(self) -> None:
        """Wait until the last checkpoint is whole."""
        with self.phase("checkpoint"):
            self.roles.learner.finish_save()

    def checkpoint_info(self) -> CheckpointInfo:
        trained_steps = make_strategy(self.config).trained_steps(self.state.iteration)
        return replace(self.state, trained_steps=trained_steps)

    def finish(self) -> None:
        """The last checkpoint and evaluation, summary.json, the table and the report."""
        self.finish_save()
        with self.phase("evaluate"):
            self.heldout.finish(self.state.iteration, self.on_wait)
        summary = {
            "algorithm": self.config.algorithm,
            "seed": self.config.seed,
            "iterations": self.state.iteration,
            "stopped_early": self.state.iteration < self.config.iterations,
            "best_iteration": best_evaluated(self.config),
            "train_s": round(self.state.train_s, 1),
            "evaluations": self.state.evaluations,
            "peak_rss_gib": round(self.memory.peak_rss_gib, 2),
            "weights_checksum": self.roles.learner.checksum(),
            "heldout": heldout_before_after(self.run_folder),
            "trained_rewards": list(self.config.trained_rewards),
            "versions": versions(),
        }
        replace_text(self.run_folder / "summary.json", json.dumps(summary, indent=1))
        report = write_report(self.run_folder)
        print_table(summary, report)

    def encode(self, prompts: list[tuple[int, str]]) -> list[ray.ObjectRef]:
        """References to prompts (id, text) with their embeddings, in the order given."""
        return [self.roles.encoder.encode.remote(number, text) for number, text in prompts]

    def on_wait(self, done: int, total: int) -> None:
        """Called while prompts are drawn: stopping here loses only what is under way."""
        self.progress.waiting(done, total, "prompts")
        self.log.live({"rollout/prompts_left": total - done})
        self.stop.check()

    def is_due(self, every: int) -> bool:
        return every > 0 and self.state.iteration % every == 0

    def is_last(self) -> bool:
        return self.heldout.is_stalled or self.state.iteration == self.config.iterations

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what the run does, and add up the time it takes."""
        self.progress.phase(name)
        started_s = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s
