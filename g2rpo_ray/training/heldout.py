"""Evaluation during training: by the rollout workers, or beside it by workers of its own."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import ray

from g2rpo_ray.cluster.postmortem import first_line
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.prompts.dataset import evenly
from g2rpo_ray.rollout.answers import HeldoutPictures
from g2rpo_ray.rollout.pool import POLL_S, RolloutPool
from g2rpo_ray.run.scores import (
    best_evaluated,
    evaluated_iterations,
    fallen_most,
    fallen_rewards,
    is_stalled,
    lowered_scales,
    save_heldout,
    stopping_guard,
)
from g2rpo_ray.training.collect import heldout_metrics
from g2rpo_ray.training.roles import Roles
from g2rpo_ray.training.session import Session

logger = logging.getLogger(__name__)

FALLEN_SHOWN = 4
"""Prompts that a guard names."""
CLOSE_S = 2.0
"""For the thread to notice; what it waits for else ends with its workers."""


@dataclass
class _UnderWay:
    """An evaluation beside the training."""

    iteration: int
    results: "Future[list[HeldoutPictures]]"
    progress: tuple[int, int]
    """(done, total) in prompts."""


class HeldoutEvaluation:
    """Judges the weights of a run on held-out prompts, and remembers what came of it.

    With workers of its own an evaluation goes on beside the training, which never waits for it but
    where both ask a reward server: one that fails is told, counted and has no numbers; while one is
    under way no other is begun.
    """

    def __init__(self, session: Session, roles: Roles) -> None:
        self._session, self._config, self._roles = session, session.config, roles
        self._beside: _UnderWay | None = None
        self._closed = threading.Event()
        self._last: int | None = None
        """Iteration whose evaluation was begun last."""
        info = session.run.info
        self.reward_scales, self.judged = dict(info.reward_scales), info.judged
        """What guards have multiplied the weights of trained rewards by, and the iteration of the
        last evaluation that this takes into account."""
        self._lower_weights()
        self.missed = 0
        """Evaluations that failed or were left out, since the start."""
        self.is_stalled = is_stalled(self._config) or stopping_guard(self._config) is not None
        """Whether ``evaluation.patience`` is used up, or a guard ends the run."""

    def evaluate(self, iteration: int) -> None:
        """Judge the weights of now, if nobody has; returns at once with workers of its own."""
        self.collect()
        if iteration == self._last or iteration in evaluated_iterations(self._config):
            return
        if self._beside is not None:
            done, total = self._beside.progress
            self._miss(
                f"evaluation of iteration {iteration} is left out: that of iteration "
                f"{self._beside.iteration} is still under way ({done} of {total} prompts); give it "
                "more evaluation.workers, or a longer evaluation.every"
            )
            return
        self._last = iteration
        prompts = self._roles.encoder.heldout(self._session.heldout_prompts)
        if pool := self._roles.evaluation_pool:
            self._beside = self._begin(iteration, pool, prompts)
        else:
            self._record(iteration, self._roles.pool.evaluate(prompts, self._session.on_wait))

    def _begin(
        self, iteration: int, pool: RolloutPool, prompts: Sequence[ray.ObjectRef]
    ) -> _UnderWay:
        weights = self._roles.weights_of_now(self._config.weight_sync.timeout_s)
        beside = _UnderWay(iteration, Future(), (0, len(prompts)))

        def on_wait(done: int, total: int) -> None:
            beside.progress = done, total
            if self._closed.is_set():
                raise RunError(f"evaluation of iteration {iteration} is given up")

        def draw() -> None:
            try:
                pool.sync(weights.send)
                beside.results.set_result(pool.evaluate(prompts, on_wait))
            except Exception as error:  # noqa: BLE001  (handed to the thread that trains)
                beside.results.set_exception(error)

        threading.Thread(target=draw, daemon=True).start()
        return beside

    def collect(self) -> None:
        """Record the evaluation beside the training, if it has ended."""
        ended = self._beside
        if ended is None or not ended.results.done():
            return
        self._beside = None
        error = ended.results.exception()
        if error is None:
            self._record(ended.iteration, ended.results.result())
            return
        logger.warning("evaluation of iteration %d", ended.iteration, exc_info=error)
        known = isinstance(error, RunError)
        cause = first_line(error) if known else f"{type(error).__name__}: {error}"
        self._miss(f"evaluation of iteration {ended.iteration} failed, it has no numbers: {cause}")

    def finish(self, iteration: int) -> None:
        """See to it that the last weights are judged, too; returns when all is recorded."""
        self._wait()
        self.evaluate(iteration)
        self._wait()

    def _wait(self) -> None:
        while self._beside is not None:
            self._session.on_wait(*self._beside.progress)
            time.sleep(POLL_S / 5)
            self.collect()

    def close(self) -> None:
        """Give up what is under way."""
        self.collect()
        self._closed.set()
        if self._beside is not None:
            self._session.note(
                f"evaluation of iteration {self._beside.iteration} is given up: no numbers"
            )
            wait([self._beside.results], CLOSE_S)

    @property
    def kept(self) -> list[int]:
        """Iterations whose checkpoints are kept: the best, and the one that may become it."""
        if self._config.checkpoint.best is None:
            return []
        best = best_evaluated(self._config)
        beside = self._beside.iteration if self._beside else None
        return [iteration for iteration in (best, beside) if iteration is not None]

    def _record(self, iteration: int, results: list[HeldoutPictures]) -> None:
        session = self._session
        for failure in (failure for result in results for failure in result.failures):
            session.note(f"evaluation of iteration {iteration} lacks a score: {failure}")
        session.log.record(iteration, heldout_metrics(results))
        shown = evenly(results, self._config.evaluation.pictures_shown)
        save_heldout(session.run.folder, iteration, self._kept(iteration, results, shown))
        pictures = {result.prompt: result.pictures[0].numpy() for result in shown}
        session.log.pictures(iteration, pictures)
        self._lower_weights()
        if not self.is_stalled and (guard := stopping_guard(self._config)):
            self.is_stalled = True
            session.note(f"evaluation.guards.{guard}.then is stop: the run ends early")
        if not self.is_stalled and is_stalled(self._config):
            self.is_stalled = True
            session.note(
                f"no new highest held-out {self._config.checkpoint.best} in the last "
                f"{self._config.evaluation.patience} evaluations (evaluation.patience): the run "
                "ends early"
            )

    def _lower_weights(self) -> None:
        """By the evaluations that came since: of a resumed run, also those that came too late for
        its checkpoint."""
        for iteration in sorted(evaluated_iterations(self._config)):
            if iteration <= self.judged:
                continue
            before, self.judged = self.reward_scales, iteration
            self.reward_scales = lowered_scales(self._config, before, iteration)
            for name, scale in self.reward_scales.items():
                if scale != before.get(name, 1.0):
                    self._session.note(
                        f"evaluation of iteration {iteration}: the weight of {name} is lowered to "
                        f"{scale:g} of rewards.{name}.weight (evaluation.guards, lower_weight)"
                    )

    def _kept(
        self, iteration: int, results: list[HeldoutPictures], shown: list[HeldoutPictures]
    ) -> list[HeldoutPictures]:
        """Whose pictures are kept: ``shown``, and those that a guard tells of."""
        guards = self._config.evaluation.guards
        if guards and evaluated_iterations(self._config) == {iteration}:
            return results
        texts = {result.prompt_id: result.prompt for result in results}
        kept = {result.prompt_id for result in shown}
        for name, drop in fallen_rewards(self._config).items():
            most = fallen_most(self._session.run.folder, name, results, FALLEN_SHOWN)
            kept |= most.keys()
            words = "; ".join(f"{fall:.4f} on {texts[n]!r:.80}" for n, fall in most.items())
            self._session.note(
                f"evaluation of iteration {iteration}: held-out {name} is {drop:.4f} below the "
                f"first, more than evaluation.guards.{name}.max_drop ({guards[name].max_drop:g}); "
                f"most fell {words or 'none whose pictures were kept'}"
            )
        return [result for result in results if result.prompt_id in kept]

    def _miss(self, why: str) -> None:
        self.missed += 1
        self._session.note(why)
