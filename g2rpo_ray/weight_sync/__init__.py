"""New weights to every rollout worker, proven to have arrived; one file a transport."""

from g2rpo_ray.weight_sync.base import Peer, SyncReport, WeightSync, WeightSyncError
from g2rpo_ray.weight_sync.choice import make_weight_sync
from g2rpo_ray.weight_sync.nccl import NcclSync
from g2rpo_ray.weight_sync.object_store import ObjectStoreSync, StoredWeights

__all__ = [
    "NcclSync",
    "ObjectStoreSync",
    "Peer",
    "StoredWeights",
    "SyncReport",
    "WeightSync",
    "WeightSyncError",
    "make_weight_sync",
]
