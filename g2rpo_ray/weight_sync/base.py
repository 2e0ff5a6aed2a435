"""The interface of a transport, and the check that every transport ends with."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import ray
from ray.actor import ActorHandle

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.models.weights import WeightReceipt


@dataclass(frozen=True)
class Peer:
    """An actor that sends or receives weights."""

    name: str
    """For messages."""
    handle: ActorHandle


class WeightSource(Protocol):
    """What a transport needs of the learner."""

    weight_senders: list[ActorHandle]
    """Ranks that hold a part of the weights which no other rank can send, in their order."""

    def export_weight_refs(self, version: int) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to (WeightReceipt, PackedWeights), put into the object store once."""


class WeightSyncError(RunError):
    """A worker does not hold the learner's weights; it must not go on with them.

    Args:
        receivers: those at fault; they can be replaced. None are named where the fault is not a
            receiver's, or nobody knows whose.
    """

    def __init__(self, message: str, receivers: Sequence[Peer] = ()) -> None:
        super().__init__(message)
        self.receivers = list(receivers)


class WeightSync(ABC):
    """A way to bring the learner's weights to the workers."""

    @abstractmethod
    def sync(self, learner: WeightSource, receivers: Sequence[Peer], version: int) -> WeightReceipt:
        """Send version ``version`` to these workers, verify each one's answer, and return what
        each of them holds.

        They may be others than last time: some died, or one joined and is sent to alone.

        Raises:
            WeightSyncError: a worker did not answer in time, or holds something else.
        """


def verify(
    expected: WeightReceipt, receivers: Sequence[Peer], answers: Sequence[WeightReceipt]
) -> WeightReceipt:
    """Compare what every receiver holds with what the learner sent, and return it.

    Args:
        answers: of the receivers, in their order.

    Raises:
        WeightSyncError: nothing was sent, or an answer differs; the receiver and both are named.
    """
    if expected.tensors == 0:
        raise WeightSyncError("weight sync sent no tensor: the model has nothing that is trained")
    held = zip(receivers, answers, strict=True)
    wrong = [(receiver, answer) for receiver, answer in held if answer != expected]
    if wrong:
        receiver, answer = wrong[0]
        raise WeightSyncError(
            f"{receiver.name} holds other weights than the learner sent: "
            f"{answer} instead of {expected}",
            [receiver for receiver, _ in wrong],
        )
    return expected
