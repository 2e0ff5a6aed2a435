"""The interface of a transport, and the check that every transport ends with."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from g2rpo_ray.errors import RunError
from g2rpo_ray.models.weights import WeightReceipt

if TYPE_CHECKING:
    from g2rpo_ray.learner.group import LearnerGroup


class WeightSyncError(RunError):
    """A rollout worker does not hold the learner's weights; it must not go on with them.

    Args:
        workers: places in the list of receivers of those at fault; they can be replaced. None are
            named where the fault is not a receiver's, or nobody knows whose.
    """

    def __init__(self, message: str, workers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.workers = list(workers)


@dataclass(frozen=True)
class SyncReport:
    """What was sent to each receiver."""

    version: int
    tensors: int
    bytes: int
    checksum: str


class WeightSync(ABC):
    """A way to bring the learner's weights to the rollout workers."""

    @abstractmethod
    def sync(
        self, learner: "LearnerGroup", workers: Sequence[ActorHandle], version: int
    ) -> SyncReport:
        """Send version ``version`` to these rollout workers and verify each one's answer.

        The workers may be others than last time: some died, or one joined and is sent to alone.

        Raises:
            WeightSyncError: a worker did not answer in time, or holds something else.
        """


def verify(expected: WeightReceipt, answers: Sequence[WeightReceipt]) -> SyncReport:
    """Compare what every receiver holds with what the learner sent.

    Raises:
        WeightSyncError: nothing was sent, or an answer differs; the receiver and both are named.
    """
    if expected.tensors == 0:
        raise WeightSyncError("weight sync sent no tensor: the model has nothing that is trained")
    wrong = [worker for worker, answer in enumerate(answers) if answer != expected]
    if wrong:
        raise WeightSyncError(
            f"rollout worker {wrong[0]} holds other weights than the learner sent: "
            f"{answers[wrong[0]]} instead of {expected}",
            wrong,
        )
    return SyncReport(expected.version, expected.tensors, expected.bytes, expected.checksum)
