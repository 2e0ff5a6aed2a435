"""New weights to every rollout worker, proven to have arrived; one file a transport."""

from g2rpo_ray.config import Config
from g2rpo_ray.weight_sync.base import Peer, WeightSync, WeightSyncError
from g2rpo_ray.weight_sync.nccl import NcclSync
from g2rpo_ray.weight_sync.object_store import ObjectStoreSync, StoredWeights

__all__ = [
    "NcclSync",
    "ObjectStoreSync",
    "Peer",
    "StoredWeights",
    "WeightSync",
    "WeightSyncError",
    "make_weight_sync",
]


def make_weight_sync(config: Config) -> WeightSync:
    """The transport that the configuration chooses, see ``Config.weight_transport``."""
    settings = config.weight_sync
    if config.weight_transport == "nccl":
        return NcclSync(settings.bucket_mib, settings.timeout_s)
    return ObjectStoreSync(settings.timeout_s)
