"""Which transport a run uses."""

from g2rpo_ray.config import Config
from g2rpo_ray.weight_sync.base import WeightSync
from g2rpo_ray.weight_sync.nccl import NcclSync
from g2rpo_ray.weight_sync.object_store import ObjectStoreSync


def make_weight_sync(config: Config) -> WeightSync:
    """The transport of ``weight_sync.transport``."""
    settings = config.weight_sync
    if config.weight_transport == "nccl":
        return NcclSync(settings.bucket_mib, settings.timeout_s)
    return ObjectStoreSync(settings.timeout_s)
