"""LearnerGroup: the ranks seen as one learner by the driver, and rebuilt when one of them dies."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from g2rpo_ray.cluster.connect import free_address
from g2rpo_ray.cluster.deadlines import LearnedDeadline
from g2rpo_ray.cluster.postmortem import Place, own_place, report
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.fence import Fence
from g2rpo_ray.learner.checkpoints.folders import where_to_resume
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo, is_checkpoint_of
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.learner.waiting import GRACE_S, GroupsLostError, RankLostError, answers_of
from g2rpo_ray.learner.worker import LIVES, NO_SCALES, Learner

T = TypeVar("T")

LOOK_AGAIN_S = 0.2
"""So often who ends a run looks at what another thread, at a call, has started meanwhile."""
START_LIMIT, UPDATE_LIMIT = "cluster.start_timeout_s", "learner.min_deadline_s to timeout_s"
GRACE_LIMIT = "for an answer that costs nothing"
"""What messages say of limits other than ``learner.timeout_s``."""


@dataclass(frozen=True)
class _Writing:
    """A state that the ranks have copied and are writing."""

    folder: Path
    info: CheckpointInfo
    keep_also: Sequence[int]


@dataclass(frozen=True)
class _Learned:
    """What an update was made of."""

    groups: list[ray.ObjectRef]
    scales: Mapping[str, float]


class LearnerGroup:
    """Starts the ranks and calls them together.

    A rank that dies or hangs takes the group down. It is rebuilt from the newest state on the disk,
    makes the updates since then again with the same groups, and repeats the call: the same bits as
    if nothing had happened. Safe to call from several threads, one call at a time.

    After ``watch`` the ranks start anew as soon as one dies, whatever the caller waits for. Only
    the updates are left to the next call: until then the card's memory may be others' to use.
    """

    def __init__(
        self,
        config: Config,
        placement: PlacementGroup,
        checkpoint: Path | None,
        tell: Callable[[str], None] = print,
        version: int = 0,
    ) -> None:
        """
        Args:
            placement: rank r runs in bundle r.
            checkpoint: folder to continue from.
            version: of the weights there.
            tell: told of failures and rebuilds.
        """
        settings = config.learner
        self._config, self._placement, self._tell = config, placement, tell
        self._timeout_s = settings.timeout_s
        self._lock = threading.RLock()
        """Held during every call."""
        self.version = version
        """Of the weights of now: one more after every ``update``."""
        self._state: Path | None = checkpoint
        self._since: list[_Learned | _Writing] = []
        """What was done since ``_state``: every update, and the state under way."""
        self._undone: list[_Learned | _Writing] = []
        """Of that, what the ranks have not made again since they were started anew."""
        self._failures: deque[float] = deque()
        self._fence = Fence(Path(config.run_dir))
        self._is_lost = self._is_watched = self._is_closed = False
        self._failed: Exception | None = None
        """Why the ranks could not be brought to the weights of now: for every later call."""
        self.rebuilds = 0
        self.busy_s = 0.0
        """Time that updates took, since the start."""
        self.written_s = 0.0
        """Time that the slowest rank wrote states in the background, since the start."""
        self.saved_unix_s: float | None = None
        """When the last of them was found whole."""
        self.ranks: list[ActorHandle] = []
        self._places: list[Place] = []

    def start(self) -> None:
        """Start the ranks, which only ``close`` ends; any thread may call that meanwhile.

        Raises:
            CheckpointError: ``checkpoint`` is damaged.
            LearnerError: a rank fails, or ``close`` came meanwhile.
        """
        # A node that died a moment ago is still offered by Ray; a rebuild has started them.
        self._recovering(lambda: None if self.ranks else self._start())

    def update(
        self, groups: Sequence[ray.ObjectRef], scales: Mapping[str, float] = NO_SCALES
    ) -> UpdateReport:
        """Train on one iteration's groups, given in id order.

        Args:
            scales: what the weights of rewards are multiplied by; 1 of those not named.

        Raises:
            GroupsLostError: groups were lost with their node; the learner is as before the call.
            LearnerError: too many failures, or one that would come again.
            DiskError, CheckpointError: the state under way could not be written.
        """
        with self._lock:
            self._recovering(lambda: self._settle(wait=False))
            learned = _Learned(list(groups), dict(scales))
            update = self._recovering(lambda: self._update(learned))
            self._since.append(learned)
            self.version += 1
            return update

    def export_weight_refs(self, version: int) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to (receipt, weights) of rank 0, put into the object store once."""

        def export() -> tuple[ray.ObjectRef, ray.ObjectRef]:
            calls = [
                rank.export_weights.options(num_returns=2).remote(version) for rank in self.ranks
            ]
            answers_of([receipt for receipt, _ in calls], "export", self._timeout_s, self._tell)
            return calls[0][0], calls[0][1]

        return self._recovering(export)

    def compute(self, phase: str, work: Callable[[object, Config], T]) -> T:
        """Rank 0's answer to ``work(actor, config)``: it has the libraries, the driver has not.

        Raises:
            LearnerError: too many failures, or one that would come again.
        """

        def ask() -> list[T]:
            call = self.ranks[0].__ray_call__.remote(work, self._config)
            return answers_of([call], phase, self._timeout_s, self._tell)

        return self._recovering(ask)[0]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the ranks have the weights of ``version``, and no other thread calls them."""
        with self._lock:
            self._recovering(lambda: None)
            yield

    def watch(self) -> None:
        """From now on the death of a rank is noticed at once."""
        with self._lock:
            self._is_watched = True
            self._watch()

    def heal(self) -> bool:
        """Look whether a rank died or hangs outside of a call made here; True after a rebuild."""

        with self._lock:
            rebuilds = self.rebuilds
            self._recovering(lambda: self._ask("heal", _place_of, GRACE_S, GRACE_LIMIT))
            return self.rebuilds > rebuilds

    def save(self, folder: Path, info: CheckpointInfo, keep_also: Sequence[int] = ()) -> None:
        """Begin to write the state of now; returns when every rank has copied its part.

        One state is written at a time: this waits for the one before.

        Args:
            keep_also: iterations whose checkpoints outlive ``checkpoint.keep_last``.

        Raises:
            DiskError, CheckpointError: this one cannot be begun, or the one before not be written.
        """
        with self._lock:
            self.finish_save()
            writing = _Writing(folder, info, keep_also)
            self._recovering(lambda: self._begin_save(writing))
            self._since.append(writing)

    def finish_save(self) -> None:
        """Return when the state under way, if any, is whole on the disk.

        Raises:
            DiskError, CheckpointError: it could not be written; those before are kept.
        """
        with self._lock:
            self._recovering(self._settle)

    def let_write(self) -> None:
        """Before a run ends by an error: as ``finish_save``, but nothing is rebuilt for it, and a
        rebuild under way is not waited for.

        Raises:
            RankLostError: a rank has died, and what it was writing is lost.
            DiskError, CheckpointError: as of ``finish_save``.
        """
        while True:
            is_held = self._lock.acquire(timeout=LOOK_AGAIN_S)
            try:
                if not (writing := self._writing) or self._is_lost:
                    return
                if writing in self._undone:
                    raise RankLostError("learner: a rank died meanwhile")
                if is_held:
                    self._tell("learner: what is being written becomes whole before the run ends")
                    self._settle()
                    return
            finally:
                if is_held:
                    self._lock.release()

    def checksum(self) -> str:
        """Of the trainable weights as they are now."""
        checksums = self._recovering(lambda: self._ask("checksum", lambda r: r.checksum.remote()))
        return str(checksums[0])

    def close(self) -> None:
        """End every rank, also those that another thread is starting."""
        self._is_closed = True
        while not self._lock.acquire(timeout=LOOK_AGAIN_S):
            self._end_ranks()
        self._end_ranks()
        self._lock.release()

    def _end_ranks(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)

    def _start(self) -> None:
        settings = self._config.learner
        # Before they read: ranks of before that are cut off must not delete what these read.
        self._fence = self._fence.following()
        # The first update after a start compiles; only then is there a duration to compare with.
        self._deadline = LearnedDeadline(settings.timeout_s, settings.min_deadline_s)
        self.ranks = [
            ray.remote(concurrency_groups={LIVES: 1})(Learner)
            .options(
                num_cpus=settings.cpus_per_rank,
                num_gpus=settings.gpus_per_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=rank
                ),
            )
            .remote(self._config, rank)
            for rank in range(settings.ranks)
        ]
        if self._is_closed:
            # By another thread, which may have come before these ranks.
            self._end_ranks()
            raise RankLostError("learner: ended while it started")
        if self._is_watched:
            self._watch()
        self._places = []
        timeout_s = self._config.cluster.start_timeout_s
        self._places = self._ask("placement", _place_of, timeout_s, START_LIMIT)
        meeting = self.ranks[0].__ray_call__.remote(free_address)
        ((address, port),) = answers_of([meeting], "address", self._timeout_s, self._tell)
        self.coverage: str = self._ask(
            "start",
            lambda rank: rank.start.remote(address, port, self._state, self._fence),
            timeout_s,
            START_LIMIT,
        )[0]
        self.weight_senders = self.ranks if settings.zero_stage == 3 else self.ranks[:1]
        """Ranks that hold a part of the weights which no other rank can send."""

    def _watch(self) -> None:
        ranks = self.ranks

        def start_anew(_: Future) -> None:
            threading.Thread(target=self._start_anew, args=(ranks,), daemon=True).start()

        for rank in ranks:
            lives = rank.lives.options(concurrency_group=LIVES).remote()
            lives.future().add_done_callback(start_anew)

    def _start_anew(self, ranks: list[ActorHandle]) -> None:
        """On a thread of its own: one of these ranks died."""
        with self._lock:
            # A call that was under way has noticed it, too; and who rebuilds or closes ends ranks.
            if self.ranks is ranks and not self._is_closed:
                try:
                    look = partial(self._ask, "rest", _place_of, GRACE_S, GRACE_LIMIT)
                    self._recovering(look, catch_up=False)
                except Exception as error:  # noqa: BLE001  (handed to whoever calls next)
                    self._failed = error

    def _update(self, it: _Learned) -> UpdateReport:
        started_s = time.monotonic()
        reports: list[UpdateReport] = self._ask(
            "update",
            lambda rank: rank.update.remote(it.groups, it.scales),
            self._deadline.deadline_s,
            UPDATE_LIMIT,
        )
        seconds = time.monotonic() - started_s
        self._deadline.record(seconds)
        self.busy_s += seconds
        records = [record for report in reports for record in report.records]
        records.sort(key=lambda record: (record.group_id, record.position))
        return UpdateReport(records, reports[0].grad_norms, reports[0].learning_rate)

    def _recovering(self, call: Callable[[], T], catch_up: bool = True) -> T:
        """Make a call; rebuild and repeat when a rank is lost, as often as is allowed.

        Args:
            catch_up: whether the call needs the weights of now.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            lost: LearnerError | None = None
            failures = 0
            while True:
                try:
                    if lost is not None:
                        self._rebuild()
                    if catch_up:
                        self._catch_up()
                    if isinstance(lost, GroupsLostError):
                        raise lost
                    return call()
                except RankLostError as error:
                    if self._is_closed:
                        raise
                    lost = error
                except GroupsLostError as error:
                    if lost is error:
                        raise
                    lost = error
                except Exception as error:
                    if self._undone:
                        # Half made again: no later call may go on from there.
                        self._failed = error
                    raise
                failures += 1
                self._count(lost, failures)

    def _count(self, error: LearnerError, in_this_call: int) -> None:
        settings, now_s = self._config.learner, time.monotonic()
        self._failures.append(now_s)
        while now_s - self._failures[0] > settings.failure_window_s:
            self._failures.popleft()
        # One that hangs every time may take longer to fail again than the window is long.
        if max(len(self._failures), in_this_call) > settings.max_failures:
            self._is_lost = True
            reports = "\n".join(
                report(f"learner rank {rank}", place, "as found now")
                for rank, place in enumerate(self._places)
            )
            # What they have not written by now is never whole.
            self._end_ranks()
            raise LearnerError(
                f"{error}\nThat is failure {in_this_call} of this call, and "
                f"{len(self._failures)} within {settings.failure_window_s:g} s; "
                f"learner.max_failures is {settings.max_failures}.\n{reports}\n"
                f"{self._what_is_left()}"
            ) from error
        self._tell(f"{error}; rebuilding the learner")

    def _what_is_left(self) -> str:
        """In words, once no rank writes any more."""
        resume = where_to_resume(Path(self._config.run_dir))
        if not (writing := self._writing) or is_checkpoint_of(writing.folder, writing.info):
            return resume
        return (
            f"the state of iteration {writing.info.iteration}, which was being written, is lost; "
            f"{resume}"
        )

    def _rebuild(self) -> None:
        """From the newest state; ``_catch_up`` makes the updates since then again."""
        self._end_ranks()
        # It has its name only since it is whole, and may have got it before the rank was lost.
        if (writing := self._writing) and is_checkpoint_of(writing.folder, writing.info):
            self._take(writing)
        # Before they start: ranks that do not come so far have made none of it.
        self._undone = list(self._since)
        self._start()
        self.rebuilds += 1
        updates = sum(isinstance(done, _Learned) for done in self._undone)
        self._tell(f"learner: its ranks have started anew; updates to be made again: {updates}")

    def _catch_up(self) -> None:
        """A state that was being written is written again, too, from the weights of then."""
        while self._undone:
            if isinstance(done := self._undone[0], _Writing):
                self._begin_save(done)
            else:
                self._update(done)
            del self._undone[0]

    def _begin_save(self, state: _Writing) -> None:
        arguments = state.folder, state.info, state.keep_also
        self._ask("checkpoint", lambda rank: rank.begin_save.remote(*arguments))

    @property
    def _writing(self) -> _Writing | None:
        return next((done for done in self._since if isinstance(done, _Writing)), None)

    def _settle(self, wait: bool = True) -> None:
        if writing := self._writing:
            seconds = self._ask("end of the checkpoint", lambda rank: rank.finish_save.remote(wait))
            if None not in seconds:
                self.written_s += max(seconds)
                self.saved_unix_s = time.time()
                self._take(writing)

    def _take(self, written: _Writing) -> None:
        self._state = written.folder
        del self._since[: self._since.index(written) + 1]

    def _ask(
        self,
        phase: str,
        call: Callable[[ActorHandle], ray.ObjectRef],
        timeout_s: float | None = None,
        limit: str = "learner.timeout_s",
    ) -> list[Any]:
        """Every rank's answer; see ``answers_of``."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return answers_of([call(rank) for rank in self.ranks], phase, timeout_s, self._tell, limit)


def _place_of(rank: ActorHandle) -> ray.ObjectRef:
    return rank.__ray_call__.remote(own_place)
