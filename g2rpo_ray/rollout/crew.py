"""Crew: the rollout workers as processes; started, brought up to date, replaced."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import ray

from g2rpo_ray.cluster.demand import autoscaler_says, living_nodes
from g2rpo_ray.cluster.postmortem import error_of, first_line, own_place, report
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.config import Config
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.rollout.member import GETTING_WEIGHTS, Event, Member
from g2rpo_ray.rollout.worker import Scoring
from g2rpo_ray.weight_sync import Peer, StoredWeights

NODE_FAILURES = 3
"""A node where so many workers failed in a row, with no task done between, is avoided."""
LONGEST_PAUSE_S = 60.0
PING_S = 15.0
DONORS = 2
"""So many workers are asked for the weights that a newcomer lacks, before the learner is."""
LONGEST_GAP_S = 2.0
"""Of the time between two calls of ``tend``, so much counts against a member."""

Hire = Callable[[Sequence[str]], Any]
"""Starts an actor on any node but those named."""
SyncWorkers = Callable[[Sequence[Peer]], WeightReceipt]
"""Sends the weights of now to these workers and verifies their answers."""


class RolloutError(RunError):
    """Rollout cannot go on; the message names worker, task and cause."""


class RolloutStartError(InputError):
    """The workers that the run is to start with did not come up; says what is missing."""


class Crew:
    """Keeps up to ``max_workers`` members. Not thread-safe: one thread calls it.

    Args:
        hire: starts one actor.
        tell: told of workers that came up, and of losses.
        role: what a member is called.
    """

    def __init__(
        self, config: Config, scoring: Scoring, hire: Hire, tell: Callable[[str], None], role: str
    ) -> None:
        self._config, self._scoring, self._hire, self._tell = config, scoring, hire, tell
        self._role = role
        self._most = config.rollout.most_workers
        self.work = config.rollout.workers
        """Tasks that are not done yet: so many members have something to do."""
        self._start_timeout_s = config.cluster.start_timeout_s
        self._needed_s = -math.inf
        """When there was last work for all members."""
        self.members: dict[int, Member] = {}
        self.losses = 0
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._started = 0
        self._losses_in_row = 0
        self._next_start_s = 0.0
        self._node_failures: Counter[str] = Counter()
        self._any_came_up = False
        self._weight_version = 0
        self._receipt: WeightReceipt | None = None
        """Of the weights that were sent last to all."""
        self._sync: SyncWorkers | None = None
        self._sync_lock = threading.Lock()
        self._short_since_s: float | None = None
        self._tended_s: float | None = None

    @property
    def _wanted(self) -> int:
        settings = self._config.rollout
        if settings.idle_timeout_s is None:
            return self._most
        return min(self._most, max(settings.min_workers, self.work))

    @property
    def ready(self) -> list[Member]:
        # A copy: a thread that sends to a newcomer asks for them, too.
        return [member for member in list(self.members.values()) if member.stage == "ready"]

    def watch(self, ref: Any, worker: int, what: str, task: int = -1) -> None:
        """Have the answer to ``ref`` come out of ``next_event``."""
        ref.future().add_done_callback(
            lambda future: self._events.put(Event(worker, what, task, future, time.monotonic()))
        )

    def next_event(self, timeout_s: float) -> Event | None:
        """The next answer of a member; None if there is none in time, or after ``wake``."""
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        return event if event.worker in self.members else None

    @property
    def is_read(self) -> bool:
        """Whether every answer that has come was taken out of ``next_event``."""
        return self._events.empty()

    def wake(self) -> None:
        """End a wait in ``next_event``; from any thread."""
        self._events.put(Event(-1, "wake", -1, Future(), time.monotonic()))

    def tend(self, now_s: float) -> None:
        """Start who is missing, and give up who does not come up.

        Time in which nobody calls this (the driver learns or saves) counts for no limit: what the
        members have answered meanwhile is not read yet. Nor does time in which a member waits for
        weights: others make it wait, and sending them has limits of its own.

        Raises:
            RolloutError: too few workers for too long.
        """
        self._skip_untended(now_s)
        while len(self.members) < self._wanted and now_s >= self._next_start_s:
            self._start(now_s)
        for member in list(self.members.values()):
            if member.stage == "loading" and now_s - member.since_s > self._start_timeout_s:
                self.lose(
                    member,
                    f"was {member.stage} for {self._start_timeout_s:g} s (cluster.start_timeout_s)",
                )
        self._tell_of_no_place(now_s)
        coming = [it for it in self.members.values() if it.stage in ("ready", GETTING_WEIGHTS)]
        if len(coming) >= self._config.rollout.min_workers:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s
        elif now_s - self._short_since_s > self._start_timeout_s + LONGEST_PAUSE_S:
            raise RolloutError(self.shortage(self._config.rollout.min_workers))

    def _tell_of_no_place(self, now_s: float) -> None:
        late = [
            member
            for member in self.members.values()
            if member.stage == "placing" and now_s - member.since_s > self._start_timeout_s
        ]
        if any(not member.told for member in late):
            self._tell(
                f"no place yet for {len(late)} more; going on with {len(self.ready)}, and each "
                f"joins when there is room: {self.shortage(len(self.members))}"
            )
        for member in late:
            member.told = True

    def release(self, now_s: float, busy: Container[int] = ()) -> list[Member]:
        """End members for which there was no work for ``rollout.idle_timeout_s``; returns them.

        Args:
            busy: numbers of those that have a task.
        """
        settings = self._config.rollout
        limit_s, spare = settings.idle_timeout_s, len(self.members) - self._wanted
        if limit_s is None or spare <= 0:
            self._needed_s = now_s
            return []
        # Who loads has its node already, and ends loading first: else it might never get so far.
        idle = [
            member
            for number, member in sorted(self.members.items(), reverse=True)
            if number not in busy
            and member.stage in ("placing", "ready")
            and now_s - max(member.since_s, self._needed_s) > limit_s
        ]
        for member in idle[:spare]:
            self.dismiss(member)
            self._tell(
                f"{member.name} ends, its place is free: no work for it in {limit_s:g} s "
                "(rollout.idle_timeout_s)"
            )
        return idle[:spare]

    def _skip_untended(self, now_s: float) -> None:
        last_s = now_s if self._tended_s is None else self._tended_s
        self._tended_s = now_s
        untended_s = max(0.0, now_s - last_s - LONGEST_GAP_S)
        for member in self.members.values():
            member.since_s = min(now_s, member.since_s + untended_s)
        if self._short_since_s is not None:
            self._short_since_s = min(now_s, self._short_since_s + untended_s)

    def shortage(self, wanted: int) -> str:
        """What is missing, in words."""
        settings = self._config.rollout
        stages = Counter(member.stage for member in self.members.values())
        found = ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items()))
        free = "; ".join(
            f"{node.node_id[:8]} CPU {node.free.get('CPU', 0):g} GPU {node.free.get('GPU', 0):g}"
            for node in living_nodes()
        )
        return (
            f"{wanted} {self._role}s are wanted, within cluster.start_timeout_s = "
            f"{self._start_timeout_s:g} s; there are: {found or 'none'} (placing = waiting for "
            f"CPU {settings.cpus_per_worker:g}, GPU {settings.gpus_per_worker:g} on one node, or "
            f"for a process to start there). Free by node: {free}. "
            f"Avoided nodes: {self._avoided() or 'none'}{autoscaler_says()}"
        )

    def handle(self, event: Event) -> Member | None:
        """Take a coming member one stage further; returns it when it is ready.

        Raises:
            InputError, RunError: it cannot load its models, and no worker ever could.
        """
        member = self.members[event.worker]
        error = event.future.exception()
        if error is not None:
            cause = getattr(error, "cause", error)
            if not self._any_came_up and isinstance(cause, InputError | RunError):
                raise cause from error
            self.lose(member, f"did not come up: {first_line(cause)}")
            return None
        # Not when it answered: nobody may have read it for long.
        member.since_s = time.monotonic()
        if event.what == "placed":
            member.place = event.future.result()
            member.stage = "loading" if member.stage == "placing" else member.stage
            return None
        self._any_came_up = True
        if event.what == "started" and (how := event.future.result()):
            self._tell(f"{member.name}: {how}")
        if event.what == "joined":
            receipt = event.future.result()
            member.weight_version = receipt.version
            self._tell(f"{member.name}: proved weights {receipt.version}, {receipt.checksum}")
        if self._sync is not None and member.weight_version < self._weight_version:
            # New, or sent to just before the others got newer weights.
            member.stage = GETTING_WEIGHTS
            threading.Thread(target=self._join, args=(member, self._sync), daemon=True).start()
            return None
        member.stage = "ready"
        return member

    def lose(self, member: Member, why: str, *, log: bool = False) -> None:
        """End a worker and have it replaced; with ``log``, tell the last lines of its log too."""
        self.dismiss(member)
        self.losses += 1
        self._losses_in_row += 1
        pause_s = 0.0 if self._losses_in_row == 1 else 2.0 ** (self._losses_in_row - 2)
        self._next_start_s = time.monotonic() + min(pause_s, LONGEST_PAUSE_S)
        if member.place is not None:
            self._node_failures[member.place.node_id] += 1
        self._tell(report(member.name, member.place, why) if log else f"{member.name} {why}")

    def close(self) -> None:
        """End every worker, and start none any more."""
        self._most = 0
        for member in list(self.members.values()):
            self.dismiss(member)

    def dismiss(self, member: Member) -> None:
        """End a worker for good."""
        self.members.pop(member.number, None)
        ray.kill(member.handle)

    def praise(self, member: Member, kind: str) -> None:
        """It has done a task: its node is good, and a first one ends the back-off."""
        if not member.finished:
            self._losses_in_row = 0
        member.finished.add(kind)
        member.since_s = time.monotonic()
        if member.place is not None:
            self._node_failures.pop(member.place.node_id, None)

    def sync_all(self, sync: SyncWorkers) -> WeightReceipt:
        """Send to every worker that has loaded its models; newcomers will get the same from now.

        Raises:
            WeightSyncError: of ``sync``.
        """
        while not self._sync_lock.acquire(timeout=0.2):
            # A newcomer is being sent to, which has a limit.
            self.tend(time.monotonic())
        try:
            self._sync = sync
            receivers = self.ready
            report = sync([member.peer for member in receivers])
            self._weight_version, self._receipt = report.version, report
            for member in receivers:
                member.weight_version = report.version
            return report
        finally:
            self._sync_lock.release()

    def silent(self, members: Sequence[Member]) -> list[Member]:
        """Those that do not answer a call that costs nothing, whatever they do or wait for."""
        asked = [member.handle.phase.remote() for member in members]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=PING_S)
        pairs = zip(members, asked, strict=True)
        return [m for m, ref in pairs if ref not in answered or error_of(ref) is not None]

    def _start(self, now_s: float) -> None:
        member = Member(self._started, self._hire(self._avoided()), now_s, self._role)
        self._started += 1
        self.members[member.number] = member
        self.watch(member.handle.__ray_call__.remote(own_place), member.number, "placed")
        started = member.handle.start.remote(self._config, self._scoring, member.number)
        self.watch(started, member.number, "started")

    def _join(self, member: Member, sync: SyncWorkers) -> None:
        """On a thread of its own: the others go on while a newcomer gets its weights."""
        future: Future = Future()
        with self._sync_lock:
            try:
                stored = self._weights_of_a_fellow()
                if stored is None:
                    self._tell(f"{member.name} waits for the learner to send it weights")
                future.set_result((stored.send if stored else sync)([member.peer]))
            except Exception as error:  # noqa: BLE001  (handed to the thread that tends the crew)
                future.set_exception(error)
            self._events.put(Event(member.number, "joined", -1, future, time.monotonic()))

    def _weights_of_a_fellow(self) -> StoredWeights | None:
        """The weights that were sent last, from a worker that has them.

        The learner may be busy with a long update, and must not be waited for.
        """
        expected, timeout_s = self._receipt, self._config.weight_sync.timeout_s
        fellows = [it for it in self.ready if it.weight_version == self._weight_version]
        for fellow in fellows[:DONORS]:
            held, weights = fellow.handle.export_weights.options(num_returns=2).remote()
            done, _ = ray.wait([held], timeout=timeout_s)
            # One that fails or has other weights is looked after elsewhere.
            if done and error_of(held) is None and ray.get(held) == expected:
                return StoredWeights(self._weight_version, held, weights, timeout_s)
        return None

    def _avoided(self) -> list[str]:
        bad = {node for node, failures in self._node_failures.items() if failures >= NODE_FAILURES}
        if not bad:
            return []
        alive = {node.node_id for node in living_nodes()}
        # Where every node is bad, the fault is not a node's.
        return sorted(bad) if alive - bad else []
