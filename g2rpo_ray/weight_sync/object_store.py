"""Weights through Ray's object store: one put, one get a worker, no process group to break."""

from collections.abc import Sequence

import ray

from g2rpo_ray.cluster.postmortem import error_of
from g2rpo_ray.weight_sync.base import (
    Peer,
    SyncReport,
    WeightSource,
    WeightSync,
    WeightSyncError,
    verify,
)


class ObjectStoreSync(WeightSync):
    """For adapters and models of up to a few GB."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sync(self, learner: WeightSource, receivers: Sequence[Peer], version: int) -> SyncReport:
        expected, weights = learner.export_weight_refs(version)
        return self.send(expected, weights, receivers, version)

    def send(
        self,
        expected: ray.ObjectRef,
        weights: ray.ObjectRef,
        receivers: Sequence[Peer],
        version: int,
    ) -> SyncReport:
        """As ``sync``, of weights (and their receipt) that are in the object store already."""
        answers = [peer.handle.receive_weights.remote(version, weights) for peer in receivers]
        _, missing = ray.wait(answers, num_returns=len(answers), timeout=self._timeout_s)
        asked = list(zip(receivers, answers, strict=True))
        silent = [peer for peer, answer in asked if answer in missing]
        if silent:
            raise WeightSyncError(
                f"weight sync of version {version} did not end within {self._timeout_s:g} s "
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
        return verify(ray.get(expected, timeout=self._timeout_s), receivers, held)
