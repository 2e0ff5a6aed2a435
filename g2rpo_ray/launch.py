"""Starting every role of a run on a Ray cluster, and ending all of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from g2rpo_ray.cluster import (
    ClusterError,
    Demand,
    encoder_demand,
    learner_demand,
    living_nodes,
    overview,
    placed,
    ray_cluster,
    reward_demands,
    rollout_demand,
    shortage,
    wait_for_nodes,
)
from g2rpo_ray.config import Config
from g2rpo_ray.learner.group import LearnerGroup
from g2rpo_ray.prompts.encoder import PromptEncoder
from g2rpo_ray.rewards.client import RewardClient
from g2rpo_ray.rewards.server import reward_servers
from g2rpo_ray.rollout.pool import RolloutPool
from g2rpo_ray.weight_sync import WeightSync, make_weight_sync


@dataclass(frozen=True)
class Roles:
    """Every role, started."""

    encoder: ActorHandle
    pool: RolloutPool
    learner: LearnerGroup
    weight_sync: WeightSync


@contextmanager
def launch(config: Config, checkpoint: Path | None, note: Callable[[str], None]) -> Iterator[Roles]:
    """Start all roles, and end them whatever happens inside.

    Args:
        checkpoint: folder that the learner continues from.
        note: told what happens meanwhile.

    Raises:
        ClusterError: the cluster lacks resources, or cannot be reached; see ``cluster.py``.
    """
    demands = [rollout_demand(config), learner_demand(config)]
    with _rollout_roles(config, demands, note) as (encoder, pool, placement):
        note("starting learner ranks")
        learner = LearnerGroup(config, placement, config.rollout.workers, checkpoint)
        note(f"training {learner.coverage}")
        yield Roles(encoder, pool, learner, make_weight_sync(config))


@contextmanager
def launch_rollout(
    config: Config, note: Callable[[str], None]
) -> Iterator[tuple[ActorHandle, RolloutPool]]:
    """Start the roles that draw and score, without a learner; otherwise as ``launch``."""
    with _rollout_roles(config, [rollout_demand(config)], note) as (encoder, pool, _):
        yield encoder, pool


@contextmanager
def _rollout_roles(
    config: Config, demands: list[Demand], note: Callable[[str], None]
) -> Iterator[tuple[ActorHandle, RolloutPool, PlacementGroup]]:
    note("starting Ray")
    with ray_cluster(config.cluster) as private:
        note(f"logs of all roles: {ray._private.worker.global_worker.node.get_logs_dir_path()}")
        wait_for_nodes(config, note)
        others = [*reward_demands(config), *encoder_demand(config)]
        nodes = living_nodes()
        note(overview([*demands, *others], nodes))
        if private and (reasons := shortage([*demands, *others], nodes)):
            # Nothing will join it, so there is nothing to wait for.
            raise ClusterError(" ".join(reasons))
        note("starting reward servers and rollout workers")
        prefix = f"g2rpo-{os.getpid()}"
        timeout_s = config.cluster.start_timeout_s
        with (
            placed(demands, others, timeout_s, note) as placement,
            reward_servers(prefix, config.rewards, timeout_s, private) as handles,
        ):
            client = RewardClient(handles, config.rewards, config.advantage.on_invalid == "stop")
            encoder = (
                ray.remote(PromptEncoder)
                .options(
                    num_cpus=0,
                    num_gpus=config.prompts.encoder_gpus,
                    max_restarts=2,
                    max_task_retries=2,
                )
                .remote(config)
            )
            yield encoder, RolloutPool(config, placement, client), placement
