"""What each line of ``train.py`` does: the steps of a run, timed, told and recorded."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.common.files import replace_text
from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.learner.checkpoints.folders import SNAPSHOTS, checkpoint_folder, where_to_resume
from g2rpo_ray.learner.ranks import GroupsLostError
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.prompts.dataset import PromptOrder
from g2rpo_ray.rollout.answers import RolloutSummary
from g2rpo_ray.run.scores import best_evaluated, heldout_before_after
from g2rpo_ray.run.versions import versions
from g2rpo_ray.tracking.progress import print_table
from g2rpo_ray.tracking.report.live import LiveReport
from g2rpo_ray.training.activity import Activity
from g2rpo_ray.training.collect import rollout_metrics, update_metrics
from g2rpo_ray.training.heldout import HeldoutEvaluation
from g2rpo_ray.training.roles import Roles
from g2rpo_ray.training.session import Session


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


class Trainer:
    """The steps of ``pipeline: sync``: every group is drawn with the weights of now."""

    def __init__(self, session: Session, roles: Roles) -> None:
        config = session.config
        self.session, self.roles, self.config, self.stop = session, roles, config, session.stop
        self.state = session.run.info
        """As the next checkpoint has it."""
        self.saved = self.state.iteration
        """Iteration of the last checkpoint."""
        self.heldout = HeldoutEvaluation(session, roles)
        self.activity = Activity(roles, self.heldout)
        self.report = LiveReport(session.run.folder, session.note)
        batch = config.sampling.prompts_per_iteration
        self.order = PromptOrder(len(session.train_prompts), config.seed, batch)
        self._encoded: dict[int, list[ray.ObjectRef]] = {}
        """Prompts of iterations that are not drawn yet."""
        self.tflop = roles.tflop
        """Of one evaluation."""
        self.started_s = 0.0
        """When the iteration under way began."""

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.state.iteration

    @property
    def is_last(self) -> bool:
        """Whether no iteration comes any more."""
        return self.heldout.is_stalled or self.iteration == self.config.iterations

    def is_due(self, every: int) -> bool:
        return every > 0 and self.iteration % every == 0

    def begin(self) -> None:
        """Show where the run stands; the workers of a resumed one get its weights."""
        self.session.log.live(
            {
                "run/iterations": self.config.iterations,
                "run/iteration": self.iteration,
                "run/started_unix_s": time.time(),
                "run/clip": self.config.learner.clip,
            }
        )
        if self.iteration > 0:
            self.sync()
        texts = [*self.session.train_prompts, *(text for _, text in self.session.heldout_prompts)]
        length = self.config.prompts.max_sequence_length
        if told := self.roles.encoder.cut(texts, length):
            self.session.note(told)

    def generate(self) -> Drawn:
        """The groups to train on next."""
        self.started_s = time.perf_counter()
        return self.draw(self.iteration)

    def draw(self, iteration: int) -> Drawn:
        """One group for each prompt of an iteration, with the weights that the workers have."""
        started_s, session = time.perf_counter(), self.session
        with session.phase("generate"):
            prompts = self.encoded(iteration)
            summaries, groups = self.roles.pool.generate(prompts, iteration, session.on_wait)
        for failure in (failure for summary in summaries for failure in summary.failures):
            session.note(f"dropped a group: {failure}")
        for warning in (warning for summary in summaries for warning in summary.warnings):
            session.note(f"warning: {warning}")
        return Drawn(iteration, summaries, groups, time.perf_counter() - started_s)

    def encoded(self, iteration: int) -> list[ray.ObjectRef]:
        """An iteration's prompts. Those of the next are asked for, too: the encoder has the time of
        an iteration for them, so that a held-out prompt that it is at is not waited for."""
        for wanted in (iteration, iteration + 1):
            if wanted not in self._encoded and wanted < self.config.iterations:
                prompts = [(n, self.session.train_prompts[n]) for n in self.order.batch(wanted)]
                self._encoded[wanted] = self.roles.encoder.training(prompts)
        return self._encoded.pop(iteration)

    def learn(self, drawn: Drawn) -> tuple[Drawn, UpdateReport]:
        """Train on an iteration's groups, or on new ones where they are lost with a node.

        Returns:
            What was trained on, and the update.
        """
        while True:
            try:
                with self.away("learn"):
                    return drawn, self.update(drawn)
            except GroupsLostError as lost:
                self.session.note(f"{lost}; drawing iteration {drawn.iteration} again")
                drawn = self.draw(drawn.iteration)

    @contextmanager
    def away(self, phase: str) -> Iterator[None]:
        """A phase in which the learner works and the driver has nothing for the workers."""
        with self.session.phase(phase), self.roles.pool.resting():
            yield

    def update(self, drawn: Drawn) -> UpdateReport:
        """The learner's work on an iteration."""
        return self.roles.learner.update(drawn.groups, self.heldout.reward_scales)

    def sync(self) -> WeightReceipt | None:
        """Bring the learner's weights to every rollout worker, verified."""
        with self.session.phase("sync"):
            return self.roles.sync()

    def record(self, drawn: Drawn, update: UpdateReport, report: WeightReceipt | None) -> None:
        """The state after an iteration, and its line of numbers; no report where none was synced.

        An evaluation or a checkpoint counts to the line after it.
        """
        session, learner = self.session, self.roles.learner
        if not update.taught:
            session.note(
                f"warning: all groups of iteration {drawn.iteration + 1} were dropped: it taught "
                "nothing, and the weights stay as they are"
            )
        values = (
            rollout_metrics(drawn.summaries, drawn.generate_s, self.tflop)
            | {"rollout/staleness": self.state.weight_version - drawn.oldest_version}
            | update_metrics(update)
        )
        if any(g.then == "lower_weight" for g in self.config.evaluation.guards.values()):
            weighted = self.config.reweighted(self.heldout.reward_scales).trained_rewards
            values |= {f"reward/{name}/weight": it.weight for name, it in weighted.items()}
        if report is not None:
            values |= {"sync/bytes": report.bytes, "sync/tensors": report.tensors}
        self.state = replace(
            self.state,
            iteration=drawn.iteration + 1,
            weight_version=learner.version,
            updates=self.state.updates + len(update.grad_norms),
            evaluations=self.state.evaluations + sum(s.evaluations for s in drawn.summaries),
            train_s=self.state.train_s + time.perf_counter() - self.started_s,
        )
        times = {f"time/{phase}_s": seconds for phase, seconds in session.seconds.items()}
        session.seconds = {}
        values |= times | {"time/iteration_s": sum(times.values())} | self.activity.lap()
        values["memory/pss_gib"] = session.memory.pss_gib
        session.log.observe("rollout/prompt_s", [sum(s.seconds.values()) for s in drawn.summaries])
        session.log.record(self.iteration, values)
        if learner.saved_unix_s is not None:
            session.log.live({"run/checkpoint_unix_s": learner.saved_unix_s})
        session.progress.iteration(self.iteration, values)
        self.report.renew()

    def evaluate(self) -> None:
        """Have the weights of now judged on the held-out prompts."""
        with self.session.phase("evaluate"):
            self.heldout.evaluate(self.iteration)

    def save(self) -> None:
        """Begin a checkpoint of the state of now; the learner writes it while training goes on."""
        # The last one must be there to be found the best.
        self.finish_save()
        self._begin_save(self.session.run.folder, self.heldout.kept)
        self.saved = self.iteration

    def snapshot(self) -> None:
        """As ``save``, but kept only until the next checkpoint."""
        self._begin_save(self.session.run.folder / SNAPSHOTS)

    def _begin_save(self, folder: Path, keep_also: Sequence[int] = ()) -> None:
        """Have the ranks copy the state of now; waits for the state before to be whole."""
        with self.away("checkpoint"):
            trained_steps = make_algorithm(self.config).trained_steps(self.iteration)
            info = replace(
                self.state,
                trained_steps=trained_steps,
                reward_scales=self.heldout.reward_scales,
                judged=self.heldout.judged,
            )
            self.roles.learner.save(checkpoint_folder(folder, self.iteration), info, keep_also)

    def finish_save(self) -> None:
        """Wait until the last checkpoint is whole."""
        with self.away("checkpoint"):
            self.roles.learner.finish_save()

    def let_write(self, error: BaseException) -> None:
        """Before ``error`` ends the run: the state that is being written, if any, becomes whole."""
        try:
            self.roles.learner.let_write()
        except Exception as failed:  # noqa: BLE001  (what ends the run is the other one)
            if str(failed) != str(error):
                self.session.note(
                    f"the state that was being written is lost: {failed}; "
                    f"{where_to_resume(self.session.run.folder)}"
                )

    def save_stopped(self, request: StopRequested) -> None:
        """Leave a checkpoint and a report of the state at which a signal ended the run."""
        if self.saved < self.iteration:
            self.save()
        self.finish_save()
        self.session.note(
            f"stopped by {request} after iteration {self.iteration} of {self.config.iterations}; "
            f"its state was on the disk {time.monotonic() - request.received_s:.1f} s after the "
            "signal; --resume auto continues from there"
        )
        self.report.write_last()

    def finish(self) -> None:
        """The last checkpoint and evaluation, summary.json, the table and the report."""
        self.finish_save()
        with self.session.phase("evaluate"):
            self.heldout.finish(self.iteration)
        folder, memory = self.session.run.folder, self.session.memory
        summary = {
            "algorithm": self.config.algorithm,
            "seed": self.config.seed,
            "iterations": self.iteration,
            "stopped_early": self.iteration < self.config.iterations,
            "best_iteration": best_evaluated(self.config),
            "train_s": round(self.state.train_s, 1),
            "evaluations": self.state.evaluations,
            "peak_rss_gib": round(memory.peak_rss_gib, 2),
            "weights_checksum": self.roles.learner.checksum(),
            "heldout": heldout_before_after(folder),
            "trained_rewards": list(self.config.trained_rewards),
            "versions": versions(),
        }
        replace_text(folder / "summary.json", json.dumps(summary, indent=1))
        print_table(summary, self.report.write_last())

    def close(self) -> None:
        """Give up what is under way."""
        self.heldout.close()
        self.report.close()
