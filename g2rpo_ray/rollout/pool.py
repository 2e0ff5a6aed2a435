"""RolloutPool: rollout workers as one; prompts handed out one by one, nothing lost."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray

from g2rpo_ray.cluster.deadlines import LearnedDeadline
from g2rpo_ray.cluster.postmortem import first_line
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.stop import heed
from g2rpo_ray.config import Config
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.rollout.actor import hire_actor
from g2rpo_ray.rollout.answers import (
    BrokenLatentsError,
    HeldoutDraw,
    HeldoutPictures,
    RolloutSummary,
)
from g2rpo_ray.rollout.crew import Crew, Hire, RolloutError, RolloutStartError, SyncWorkers
from g2rpo_ray.rollout.dispatch import Dispatch
from g2rpo_ray.rollout.member import Event, Member
from g2rpo_ray.rollout.supply import Supply
from g2rpo_ray.rollout.waits import WAIT_LINE_S, Waits
from g2rpo_ray.rollout.watchdog import PHASE, Watchdog
from g2rpo_ray.rollout.worker import Scoring
from g2rpo_ray.weight_sync import WeightSyncError

POLL_S = 0.5
BROKEN_LATENTS_TRIES = 2
"""A second worker that gives the same broken latents shows that the weights are at fault."""
SYNC_ROUNDS = 3

OnWait = Callable[[int, int], None]
"""Called with (done, total) while the pool waits; may raise to give up."""
Call = Callable[[int, Any], list[Any]]
"""Starts a task on a worker; the first reference answers it."""
Fault = Callable[[int, Member, int, Any], str | None]
"""What is wrong with (task, worker, attempt, answer); None if nothing is."""


def _broken_fault(pictures: int, attempt: int) -> str | None:
    """Pictures with broken latents are the worker's fault until a second one gives them, too."""
    if pictures and attempt < BROKEN_LATENTS_TRIES:
        return f"gave {pictures} pictures whose latents are not finite"
    return None


class RolloutPool:
    """Spreads work over a crew of workers; results come back in the order asked for.

    A worker that dies, answers too late or answers wrongly is replaced, and its group is drawn
    elsewhere: noise is a function of the seeds, so the group is the same.
    """

    def __init__(
        self,
        config: Config,
        scoring: Scoring,
        tell: Callable[[str], None] = print,
        hire: Hire | None = None,
        role: str = "rollout worker",
    ) -> None:
        """Starts the workers without waiting for them.

        Args:
            scoring: handed to every worker.
            tell: told of workers that came up, and of those that were lost.
            hire: starts one worker's actor; tests and benchmarks have their own.
            role: what messages call a worker.
        """
        self._settings = settings = config.rollout
        self._tell, self._role = tell, role
        self._start_timeout_s = config.cluster.start_timeout_s
        self._crew = Crew(config, scoring, hire or partial(hire_actor, config), tell, role)
        self._deadlines = {
            kind: LearnedDeadline(settings.timeout_s, settings.min_deadline_s)
            for kind in ("rollout", "evaluate", "walk")
        }
        self._waits = Waits(tell)
        self._last_tended_s, self._runs = -math.inf, 0
        self.repeats = 0
        """Tasks that were handed out again, since the start."""
        self.busy_s = 0.0
        """Time that tasks took, summed over the workers, since the start."""
        self.encoder_wait_s = self.store_wait_s = 0.0
        """Time, summed over the workers, since the start: without a prompt, since those left have
        no embeddings; and with one that is on its way to or from the worker."""
        self.replica_busy_s: Counter[str] = Counter()
        """Reward replica -> time that it has worked since its start, as far as is known."""
        self._tend()

    @property
    def workers(self) -> list[Any]:
        """Handles of the workers that are ready."""
        return [member.handle for member in self._crew.ready]

    @property
    def replacements(self) -> int:
        """Workers that were lost since the start."""
        return self._crew.losses

    def wait_until_ready(self) -> None:
        """Wait for the workers that the run is to start with.

        Raises:
            RolloutStartError: not all came up within ``cluster.start_timeout_s``.
        """
        started_s, line_s, wanted = time.monotonic(), WAIT_LINE_S, self._settings.workers
        while len(self._crew.ready) < wanted:
            heed()
            self._next_event()
            waited_s = time.monotonic() - started_s
            if waited_s > self._start_timeout_s:
                raise RolloutStartError(self._crew.shortage(wanted))
            if waited_s > line_s:
                line_s += WAIT_LINE_S
                self._tell(f"waiting for {self._role}s: {self._crew.shortage(wanted)}")

    def close(self) -> None:
        """End every worker."""
        self._crew.close()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While the caller is busy elsewhere and leaves the pool alone: idle workers may end."""
        if self._settings.idle_timeout_s is None:
            yield
            return
        over = threading.Event()

        def rest() -> None:
            while not over.wait(POLL_S):
                self._crew.release(time.monotonic())

        thread = threading.Thread(target=rest, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def sync(self, sync_workers: SyncWorkers) -> WeightReceipt:
        """Bring new weights to every worker, and to every one that joins later, before its work.

        Args:
            sync_workers: ``WeightSync.sync`` with everything but the workers filled in.

        Returns:
            Its report. Workers that did not prove to hold the weights are replaced.
        """
        for attempt in range(1, SYNC_ROUNDS + 1):
            while not self._crew.ready:
                self._next_event()
            try:
                return self._crew.sync_all(sync_workers)
            except WeightSyncError as error:
                ready = self._crew.ready
                named = [member for member in ready if member.peer in error.receivers]
                failed = named or self._crew.silent(ready)
                if not failed or attempt == SYNC_ROUNDS:
                    raise
                for member in failed:
                    self._crew.lose(member, str(error))
        raise AssertionError("unreachable")

    def generate(
        self, prompts: Sequence[ray.ObjectRef], iteration: int, on_wait: OnWait
    ) -> tuple[list[RolloutSummary], list[ray.ObjectRef]]:
        """Draw one group for each prompt.

        Args:
            prompts: references to Prompt, by slot.
            iteration: counted from 0; it makes the group ids.

        Returns:
            Summaries, and references to the RolloutGroups, both by slot.

        Raises:
            SupplyError: a prompt has no embeddings, or none came in time.
            RolloutError: a prompt cannot be drawn.
        """
        first_id = iteration * len(prompts)

        def call(slot: int, worker: Any) -> list[Any]:
            rollout = worker.rollout.options(num_returns=2)
            return list(rollout.remote(prompts[slot], first_id + slot, iteration))

        def fault(slot: int, member: Member, attempt: int, summary: RolloutSummary) -> str | None:
            if summary.group_id != first_id + slot:
                return f"answered with group {summary.group_id} for {first_id + slot}"
            if summary.weight_version != member.weight_version:
                return f"drew with weights {summary.weight_version}, not {member.weight_version}"
            return _broken_fault(summary.broken_pictures, attempt)

        done = self._run("rollout", prompts, call, fault, on_wait)
        for summary, _ in done:
            self.replica_busy_s |= summary.replica_busy_s
        return [summary for summary, _ in done], [group for _, group in done]

    def evaluate(
        self,
        prompts: Sequence[ray.ObjectRef],
        on_wait: OnWait,
        draw: HeldoutDraw | None = None,
        latents: Sequence[ray.ObjectRef | None] | None = None,
    ) -> list[HeldoutPictures]:
        """Draw and score held-out prompts, in their order; see ``RolloutWorker.evaluate``."""
        starts = latents or [None] * len(prompts)
        done = self._run(
            "evaluate",
            prompts,
            lambda number, worker: [worker.evaluate.remote(prompts[number], draw, starts[number])],
            lambda _task, _member, attempt, it: _broken_fault(it.broken_pictures, attempt),
            on_wait,
        )
        return [result for result, _ in done]

    def walk(
        self, prompts: Sequence[ray.ObjectRef], on_wait: OnWait, draw: HeldoutDraw
    ) -> list[ray.ObjectRef]:
        """References to the latents of held-out prompts at ``draw.last``, in their order."""
        done = self._run(
            "walk",
            prompts,
            lambda number, worker: [worker.walk.remote(prompts[number], draw)],
            lambda *_: None,
            on_wait,
        )
        return [reference for _, reference in done]

    def _run(
        self, kind: str, prompts: Sequence[ray.ObjectRef], call: Call, fault: Fault, on_wait: OnWait
    ) -> list[tuple[Any, ray.ObjectRef]]:
        """Have every prompt done by some worker; the answers, each with its call's last reference.

        A prompt is handed out once its embeddings are there.
        """
        done: list[Any] = [None] * len(prompts)
        dispatch = Dispatch(len(prompts), self._deadlines[kind])
        watchdog = Watchdog(dispatch, self._crew, self._settings.timeout_s, self._waits)
        for member in self._crew.ready:
            dispatch.join(member.number, seasoned=kind in member.finished)
        self._runs += 1
        answer = f"answer in run {self._runs}"
        references: dict[int, list[Any]] = {}
        with Supply(prompts, self._crew.wake, self._settings.timeout_s, self._waits) as supply:
            while not dispatch.is_done:
                now_s = time.monotonic()
                supply.offer_to(dispatch, now_s)
                for worker, task in dispatch.assign(now_s):
                    references[worker] = call(task, self._crew.members[worker].handle)
                    self._crew.watch(references[worker][0], worker, answer, task)
                event = self._next_event(dispatch, kind, watchdog)
                self.encoder_wait_s += dispatch.starved * (time.monotonic() - now_s)
                on_wait(dispatch.done, dispatch.tasks)
                if event is None or event.what != answer:
                    # The latter belongs to a run that was given up.
                    continue
                member, task = self._crew.members[event.worker], event.task
                supply.check(task, event.future.exception())
                cause = self._fault_of(event, dispatch.attempts(task), member, fault)
                if cause is not None:
                    self._lose(member, cause, dispatch)
                elif self._accept(event, dispatch):
                    done[task] = event.future.result(), references.pop(member.number)[-1]
                    self._crew.praise(member, kind)
        self._crew.work = 0
        return done

    def _accept(self, event: Event, dispatch: Dispatch) -> bool:
        """Count a good answer, and what it took."""
        held_s = dispatch.held_s(event.worker, event.task, event.at_s)
        if held_s is None:
            return False
        answer, own_s = event.future.result(), held_s
        if isinstance(answer, RolloutSummary | HeldoutPictures):
            own_s = answer.own_s
        if isinstance(answer, RolloutSummary):
            self.store_wait_s += max(0.0, held_s - own_s - answer.waited_s)
        self.busy_s += held_s
        return dispatch.accept(event.worker, event.task, own_s)

    def _next_event(
        self, dispatch: Dispatch | None = None, kind: str = "", watchdog: Watchdog | None = None
    ) -> Event | None:
        """Wait for an answer to a task; comings and goings of workers are dealt with here."""
        self._tend(dispatch)
        event = self._crew.next_event(POLL_S)
        if dispatch is not None and watchdog is not None:
            if event is not None and event.what == PHASE:
                if cause := watchdog.hear(event):
                    self._lose(self._crew.members[event.worker], cause, dispatch)
                return None
            # Nobody is judged before all that has come was read.
            if event is None and self._crew.is_read:
                for worker, cause in watchdog.look(time.monotonic()):
                    self._lose(self._crew.members[worker], cause, dispatch)
        if event is None or event.what == PHASE or event.what.startswith("answer"):
            return event
        member = self._crew.handle(event)
        if member is not None and dispatch is not None:
            dispatch.join(member.number, seasoned=kind in member.finished)
        return None

    def _fault_of(self, event: Event, attempt: int, member: Member, fault: Fault) -> str | None:
        """What is wrong with a worker's answer, if it is the worker's fault.

        Raises:
            RolloutError: it is not: another worker would answer the same.
        """
        error = event.future.exception()
        if error is None:
            return fault(event.task, member, attempt, event.future.result())
        cause = getattr(error, "cause", error)
        broken = isinstance(cause, BrokenLatentsError) and attempt < BROKEN_LATENTS_TRIES
        if isinstance(cause, InputError | RunError) and not broken:
            raise RolloutError(f"{member.name} failed: {cause}") from error
        if isinstance(error, ray.exceptions.RayActorError):
            return f"died: {first_line(error)}"
        return f"failed with {type(cause).__name__}: {first_line(cause)}"

    def _lose(self, member: Member, cause: str, dispatch: Dispatch) -> None:
        task = dispatch.leave(member.number)
        last = task is not None and dispatch.attempts(task) >= self._settings.attempts
        self._crew.lose(member, cause, log=last)
        if task is None:
            return
        self.repeats += 1
        if last:
            raise RolloutError(
                f"task {task} failed on {dispatch.attempts(task)} workers (rollout.attempts), last "
                f"on {member.name}: {cause}; --resume auto continues from the last snapshot"
            )

    def _tend(self, dispatch: Dispatch | None = None) -> None:
        # Its cost grows with the number of workers that are starting: not for every answer.
        now_s = time.monotonic()
        if now_s - self._last_tended_s <= POLL_S:
            return
        self._last_tended_s = now_s
        if dispatch is not None:
            self._crew.work = dispatch.tasks - dispatch.done
            for member in self._crew.release(now_s, dispatch.busy):
                dispatch.leave(member.number)
        self._crew.tend(now_s)
