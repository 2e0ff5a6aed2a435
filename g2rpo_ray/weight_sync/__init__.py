"""Weight sync: trained weights from the learner to every rollout worker, proven to have arrived."""

from g2rpo_ray.weight_sync.base import SyncReport, WeightSync, WeightSyncError
from g2rpo_ray.weight_sync.object_store import ObjectStoreSync

__all__ = ["ObjectStoreSync", "SyncReport", "WeightSync", "WeightSyncError"]
