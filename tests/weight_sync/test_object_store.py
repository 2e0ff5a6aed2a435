"""Weight sync: every receiver proves what it holds, or the run stops."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import ray
import torch
from torch import Tensor

from g2rpo_ray.models.weights import WeightReceipt, receipt
from g2rpo_ray.weight_sync import ObjectStoreSync, Peer, WeightSyncError
from g2rpo_ray.weight_sync.base import verify

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
SENT = receipt(3, WEIGHTS)


HANG_S = 2.0


class Receiver:
    """Takes weights as a rollout worker does, in one of several ways."""

    def behave(self, behaviour: str) -> None:
        self.behaviour = behaviour

    def receive_weights(self, version: int, weights: dict[str, Tensor]) -> WeightReceipt:
        held = {name: tensor.clone() for name, tensor in weights.items()}
        if self.behaviour == "garble":
            held["a"][0, 0] += 1
        if self.behaviour == "raise":
            raise KeyError("no such tensor")
        if self.behaviour == "hang":
            time.sleep(HANG_S)
        return receipt(version, held)


@dataclass
class Sender:
    """The learner, as far as a transport sees it."""

    weights: dict[str, Tensor]

    def export_weight_refs(self, version: int) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        return ray.put(receipt(version, self.weights)), ray.put(self.weights)


Sync = Callable[..., WeightReceipt]


@pytest.fixture(scope="module")
def sync(ray_cluster: None) -> Iterator[Sync]:  # noqa: ARG001
    """Sends weights to two receivers, the second of which behaves as told."""
    workers = [ray.remote(Receiver).options(num_cpus=0).remote() for _ in range(2)]

    def send(
        behaviour: str, weights: dict[str, Tensor] = WEIGHTS, timeout_s: float = 300
    ) -> WeightReceipt:
        ray.get([workers[0].behave.remote("well"), workers[1].behave.remote(behaviour)])
        receivers = [Peer(f"worker {number}", worker) for number, worker in enumerate(workers)]
        return ObjectStoreSync(timeout_s).sync(Sender(weights), receivers, 3)  # type: ignore[arg-type]

    yield send
    for worker in workers:
        ray.kill(worker)


def test_every_receiver_holds_what_was_sent(sync: Sync) -> None:
    assert sync("well") == WeightReceipt(3, 2, 40, SENT.checksum)


def test_a_receiver_with_other_weights_is_named(sync: Sync) -> None:
    with pytest.raises(WeightSyncError) as caught:
        sync("garble")
    assert [peer.name for peer in caught.value.receivers] == ["worker 1"]
    assert "worker 1 holds other weights than the learner sent" in str(caught.value)
    assert SENT.checksum in str(caught.value)


def test_a_receiver_that_raises_stops_the_run(sync: Sync) -> None:
    with pytest.raises(WeightSyncError, match="version 3 failed at worker 1") as caught:
        sync("raise")
    assert "no such tensor" in str(caught.value)


def test_a_receiver_that_hangs_is_named_with_the_setting(sync: Sync) -> None:
    with pytest.raises(WeightSyncError) as caught:
        sync("hang", timeout_s=1.0)
    # The other may be late, too, on a busy machine.
    said = r"did not end within 1 s \(weight_sync\.timeout_s\) at (worker 0, )?worker 1"
    assert re.search(said, str(caught.value))


def test_sending_nothing_is_no_success(sync: Sync) -> None:
    with pytest.raises(WeightSyncError, match="sent no tensor"):
        sync("well", weights={})


@pytest.mark.parametrize(
    "answer",
    [
        replace(SENT, version=2),
        replace(SENT, tensors=1),
        replace(SENT, bytes=36),
        replace(SENT, checksum="0" * 16),
    ],
)
def test_any_difference_stops_the_run_and_both_sides_are_shown(answer: WeightReceipt) -> None:
    with pytest.raises(WeightSyncError) as caught:
        verify(SENT, [Peer(name, None) for name in "abc"], [SENT, SENT, answer])
    assert "c holds other weights" in str(caught.value)
    assert str(answer) in str(caught.value)
    assert str(SENT) in str(caught.value)
