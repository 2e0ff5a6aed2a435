"""Weights through Ray's object store: one put, one get a worker, no process group to break."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from g2rpo_ray.weight_sync.base import SyncReport, WeightSync, WeightSyncError, verify

if TYPE_CHECKING:
    from g2rpo_ray.learner.group import LearnerGroup


class ObjectStoreSync(WeightSync):
    """For adapters and models of up to a few GB."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def sync(
        self, learner: "LearnerGroup", workers: Sequence[ActorHandle], version: int
    ) -> SyncReport:
        expected, weights = learner.export_weight_refs(version)
        answers = [worker.receive_weights.remote(version, weights) for worker in workers]
        try:
            receipts = ray.get([expected, *answers], timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise WeightSyncError(
                f"weight sync of version {version} did not end within {self._timeout_s:g} s "
                "(weight_sync.timeout_s)"
            ) from None
        except ray.exceptions.RayError as error:
            raise WeightSyncError(f"weight sync of version {version} failed: {error}") from error
        return verify(receipts[0], receipts[1:])
