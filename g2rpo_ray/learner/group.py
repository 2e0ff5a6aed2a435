"""LearnerGroup: the ranks seen as one learner by the driver, and rebuilt when one of them dies."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from g2rpo_ray.config import Config
from g2rpo_ray.errors import InputError, RunError
from g2rpo_ray.learner.checkpoint import CheckpointInfo
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.update import StepRecord, UpdateReport
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.patience import Patience
from g2rpo_ray.postmortem import Place, first_line, own_place, report

GRACE_S = 15.0
"""When one rank fails, the others' answers are waited for so long: one of them may be dead."""
T = TypeVar("T")


class RankLostError(LearnerError):
    """A rank died or hangs: its group cannot go on, but can be rebuilt."""


class GroupsLostError(LearnerError):
    """Rollout groups were lost with their node before the update; they can be drawn again."""


@dataclass(frozen=True)
class LearnerUpdate:
    """One iteration's update over all ranks."""

    records: list[StepRecord]
    """Every (group, SDE step) once, in the order of group and position."""
    grad_norms: list[float]
    learning_rate: float


@dataclass(frozen=True)
class _Snapshot:
    """A state on the disk that is still being written."""

    folder: Path
    answers: list[ray.ObjectRef]
    updates: int
    """How many of the kept updates it contains."""


class LearnerGroup:
    """Starts the ranks and calls them together.

    A rank that dies or hangs takes the group down. It is rebuilt from the newest state on the disk,
    makes the updates since then again with the same groups, and repeats the call: the same bits as
    if nothing had happened. Safe to call from several threads, one call at a time.
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
        self._patience = Patience(settings.timeout_s, settings.min_deadline_s)
        self.lock = threading.RLock()
        """Held during every call; hold it to keep weights and ``version`` together."""
        self.version = version
        """Of the weights of now: one more after every ``update``."""
        self._state: Path | None = checkpoint
        self._updates: list[list[ray.ObjectRef]] = []
        """Groups of every update since ``_state``."""
        self._snapshot: _Snapshot | None = None
        self._failures: deque[float] = deque()
        self.rebuilds = 0
        self.busy_s = 0.0
        """Time that updates took, since the start."""
        self.ranks: list[ActorHandle] = []
        self._places: list[Place] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def update(self, groups: Sequence[ray.ObjectRef]) -> LearnerUpdate:
        """Train on one iteration's groups, given in id order.

        Raises:
            GroupsLostError: groups were lost with their node; the learner is as before the call.
            LearnerError: too many failures, or one that would come again.
        """
        with self.lock:
            update = self._recovering(lambda: self._update(list(groups)))
            self._updates.append(list(groups))
            self.version += 1
            return update

    def export_weight_refs(self, version: int) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to (receipt, weights) of rank 0, put into the object store once."""

        def export() -> tuple[ray.ObjectRef, ray.ObjectRef]:
            calls = [
                rank.export_weights.options(num_returns=2).remote(version) for rank in self.ranks
            ]
            self._answers([receipt for receipt, _ in calls], "export")
            return calls[0][0], calls[0][1]

        return self._recovering(export)

    def heal(self) -> bool:
        """Look whether a rank died or hangs outside of a call made here; True after a rebuild."""

        def ask() -> None:
            asked = [rank.__ray_call__.remote(own_place) for rank in self.ranks]
            self._answers(asked, "heal", GRACE_S)

        with self.lock:
            rebuilds = self.rebuilds
            self._recovering(ask)
            return self.rebuilds > rebuilds

    def snapshot(self, folder: Path, info: CheckpointInfo) -> None:
        """Begin to write the state of now; the ranks do it while the next groups are drawn."""
        with self.lock:
            self._settle_snapshot()
            answers = [rank.save.remote(folder, info) for rank in self.ranks]
            self._snapshot = _Snapshot(folder, answers, len(self._updates))

    def save(self, folder: Path, info: CheckpointInfo, keep_also: Sequence[int] = ()) -> None:
        """Write a checkpoint; returns when it is whole on the disk.

        Args:
            keep_also: iterations whose checkpoints outlive ``checkpoint.keep_last``.
        """

        def save() -> None:
            answers = [rank.save.remote(folder, info, keep_also) for rank in self.ranks]
            self._answers(answers, "checkpoint")

        with self.lock:
            self._recovering(save)
            self._state, self._snapshot = folder, None
            self._updates.clear()

    def checksum(self) -> str:
        """Of the trainable weights as they are now."""
        checksum: str = self._recovering(
            lambda: self._answers([rank.checksum.remote() for rank in self.ranks], "checksum")[0]
        )
        return checksum

    def close(self) -> None:
        """End every rank."""
        for rank in self.ranks:
            ray.kill(rank)

    def _start(self) -> None:
        settings = self._config.learner
        self.ranks = [
            ray.remote(Learner)
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
        self._places = []
        timeout_s = self._config.cluster.start_timeout_s
        asked = [rank.__ray_call__.remote(own_place) for rank in self.ranks]
        self._places = self._answers(asked, "placement", timeout_s)
        address, port = self._answers([self.ranks[0].free_address.remote()], "address")[0]
        started = [rank.start.remote(address, port, self._state) for rank in self.ranks]
        self.coverage: str = self._answers(started, "start", timeout_s)[0]
        self.weight_senders = self.ranks if settings.zero_stage == 3 else self.ranks[:1]
        """Ranks that hold a part of the weights which no other rank can send."""

    def _update(self, groups: list[ray.ObjectRef]) -> LearnerUpdate:
        started_s = time.monotonic()
        # The first update after a start compiles; only then is there a duration to compare with.
        reports: list[UpdateReport] = self._answers(
            [rank.update.remote(groups) for rank in self.ranks],
            "update",
            self._patience.deadline_s,
        )
        seconds = time.monotonic() - started_s
        self._patience.record(seconds)
        self.busy_s += seconds
        records = [record for report in reports for record in report.records]
        records.sort(key=lambda record: (record.group_id, record.position))
        return LearnerUpdate(records, reports[0].grad_norms, reports[0].learning_rate)

    def _recovering(self, call: Callable[[], T]) -> T:
        """Make a call; rebuild and repeat when a rank is lost, as often as is allowed."""
        with self.lock:
            lost: LearnerError | None = None
            while True:
                try:
                    if lost is not None:
                        self._rebuild()
                        if isinstance(lost, GroupsLostError):
                            raise lost
                    return call()
                except RankLostError as error:
                    lost = error
                except GroupsLostError as error:
                    if lost is error:
                        raise
                    lost = error
                self._count(lost)

    def _count(self, error: LearnerError) -> None:
        settings, now_s = self._config.learner, time.monotonic()
        self._failures.append(now_s)
        while now_s - self._failures[0] > settings.failure_window_s:
            self._failures.popleft()
        if len(self._failures) > settings.max_failures:
            raise LearnerError(
                f"{error}\nThat is failure {len(self._failures)} within "
                f"{settings.failure_window_s:g} s; learner.max_failures is "
                f"{settings.max_failures}.\n{self._report()}\n"
                "--resume auto continues from the last snapshot or checkpoint"
            ) from error
        self._tell(f"{error}; rebuilding the learner")

    def _rebuild(self) -> None:
        """From the newest state, with the updates since then made again."""
        self.close()
        pending = self._snapshot
        if pending is not None and pending.folder.exists():
            # A state appears under its name only when it is whole.
            self._take(pending)
        self._snapshot = None
        self._start()
        for groups in self._updates:
            self._update(groups)
        self.rebuilds += 1

    def _settle_snapshot(self) -> None:
        """Wait for the last snapshot; the ranks wrote it before any call that has returned since.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._snapshot is None:
            return
        try:
            self._answers(self._snapshot.answers, "snapshot")
        except RankLostError:
            # Whoever calls next finds the group dead, and rebuilds it.
            return
        self._take(self._snapshot)
        self._snapshot = None

    def _take(self, snapshot: _Snapshot) -> None:
        self._state = snapshot.folder
        del self._updates[: snapshot.updates]

    def _answers(
        self, refs: list[ray.ObjectRef], phase: str, timeout_s: float | None = None
    ) -> list[Any]:
        """Every rank's answer.

        Raises:
            RankLostError: a rank died, or did not answer in time.
            GroupsLostError: an argument was lost with its node.
            LearnerError: a rank failed while all of them live: it would fail again.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return ray.get(refs, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise RankLostError(
                f"learner: '{phase}' did not end within {timeout_s:g} s (learner.timeout_s); a "
                "rank may hang in a collective, see the ranks' logs"
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ray.exceptions.ObjectLostError):
                raise GroupsLostError(f"learner: '{phase}': {first_line(cause)}") from error
            if isinstance(cause, InputError | RunError):
                raise cause from error
            # A rank whose peer died fails in a collective, often before the death is known.
            self._raise_if_lost(refs, phase)
            raise LearnerError(
                f"learner: '{phase}' failed with {type(cause).__name__}: {cause} (the traceback is "
                "in the rank's log)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise RankLostError(
                f"learner: a rank died during '{phase}': {first_line(error)}"
            ) from error

    def _raise_if_lost(self, refs: list[ray.ObjectRef], phase: str) -> None:
        done, silent = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
        if silent:
            raise RankLostError(
                f"learner: rank {refs.index(silent[0])} does not answer in '{phase}', and another "
                "failed"
            )
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError as error:
                raise RankLostError(
                    f"learner: rank {refs.index(ref)} died during '{phase}': {first_line(error)}"
                ) from error
            except ray.exceptions.RayError:
                continue

    def _report(self) -> str:
        return "\n".join(
            report(f"learner rank {rank}", place, "as found now")
            for rank, place in enumerate(self._places)
        )
