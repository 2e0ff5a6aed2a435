"""Which transport a run uses."""

from g2rpo_ray.config import Config
from g2rpo_ray.weight_sync.base import WeightSync
from g2rpo_ray.weight_sync.nccl import NcclSync
from g2rpo_ray.weight_sync.object_store import ObjectStoreSync


def make_weight_sync(config: Config) -> WeightSync:
    """The transport of ``weight_sync.transport``.

    ``auto`` is NCCL for full weights where every role has whole cards of its own (NCCL takes no
    two members on one card), else the object store.
    """
    settings = config.weight_sync
    own_cards = min(config.rollout.gpus_per_worker, config.learner.gpus_per_rank) >= 1
    automatic = "nccl" if own_cards and config.model.lora is None else "object_store"
    transport = automatic if settings.transport == "auto" else settings.transport
    if transport == "nccl":
        return NcclSync(settings.bucket_mib, settings.timeout_s)
    return ObjectStoreSync(settings.timeout_s)
