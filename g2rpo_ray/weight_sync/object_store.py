"""Weights through Ray's object store: one put, one get a worker, no process group to break."""

from collections.abc import Sequence
from dataclasses import dataclass

import ray

from g2rpo_ray.cluster.postmortem import error_of
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.weight_sync.base import Peer, WeightSource, WeightSync, WeightSyncError, verify


@dataclass(frozen=True)
class StoredWeights:
    """One version of the weights in the object store: sent as it is, whatever is learned since."""

    version: int
    receipt: ray.ObjectRef
    weights: ray.ObjectRef
    timeout_s: float

    def send(self, receivers: Sequence[Peer]) -> WeightReceipt:
        """Have the workers fetch them, and verify each one's answer; see ``WeightSync.sync``."""
        version = self.version
        answers = [peer.handle.receive_weights.remote(version, self.weights) for peer in receivers]
        _, missing = ray.wait(answers, num_returns=len(answers), timeout=self.timeout_s)
        asked = list(zip(receivers, answers, strict=True))
        silent = [peer for peer, answer in asked if answer in missing]
        if silent:
            raise WeightSyncError(
                f"weight sync of version {version} did not end within {self.timeout_s:g} s "
                f"(weight_sync.timeout_s) at {silent[0].name}",
                silent,
            )
        failed = [(peer, error) for peer, answer in asked if (error := error_of(answer))]
        if failed:
            peer, error = failed[0]
            raise WeightSyncError(
                f"weight sync of version {version} failed at {peer.name}: "
                f"{type(error).__name__}: {error}",
                [peer for peer, _ in failed],
            ) from error
        held = ray.get(answers)
        return verify(ray.get(self.receipt, timeout=self.timeout_s), receivers, held)


class ObjectStoreSync(WeightSync):
    """For adapters and models of up to a few GB."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sync(self, learner: WeightSource, receivers: Sequence[Peer], version: int) -> WeightReceipt:
        stored = StoredWeights(version, *learner.export_weight_refs(version), self._timeout_s)
        return stored.send(receivers)
