"""Starting every role of a run on a Ray cluster, and ending all of them."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.config import Config
from g2rpo_ray.learner.group import LearnerGroup
from g2rpo_ray.prompts.encoder import PromptEncoder
from g2rpo_ray.rewards.client import RewardClient
from g2rpo_ray.rewards.server import reward_servers
from g2rpo_ray.rollout.pool import RolloutPool
from g2rpo_ray.weight_sync import ObjectStoreSync, WeightSync

# Workers get only these: a whole environment in runtime_env breaks Ray's agent, and leaks tokens.
WORKER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Resources = dict[str, float]


class ClusterError(RuntimeError):
    """The cluster cannot hold the run; the message says what is wanted and what there is."""


@dataclass(frozen=True)
class Roles:
    """Every role, started."""

    encoder: ray.actor.ActorHandle
    pool: RolloutPool
    learner: LearnerGroup
    weight_sync: WeightSync


@contextmanager
def launch(config: Config, checkpoint: Path | None, note: Callable[[str], None]) -> Iterator[Roles]:
    """Start all roles, and end them whatever happens inside.

    Raises:
        ClusterError: the cluster lacks resources, or cannot be reached.
    """
    note("starting Ray")
    with _ray_cluster(config) as private:
        session = ray.get_runtime_context().get_session_name()
        note(f"logs of all roles: {session}/logs in Ray's temporary folder (/tmp/ray)")
        check_resources(config)
        prefix = f"g2rpo-{os.getpid()}"
        note("starting reward servers")
        with (
            reward_servers(
                prefix, config.rewards, config.cluster.start_timeout_s, private
            ) as handles,
            _placement(config) as placement,
        ):
            client = RewardClient(handles, config.rewards, config.advantage.on_invalid == "stop")
            note("starting rollout workers and learner ranks")
            encoder = PromptEncoder.options(num_cpus=0).remote(config)
            pool = RolloutPool(config, placement, client)
            learner = LearnerGroup(config, placement, config.rollout.workers, checkpoint)
            note(f"training {learner.coverage}")
            yield Roles(encoder, pool, learner, ObjectStoreSync(config.learner.timeout_s))


def wanted_bundles(config: Config) -> list[Resources]:
    """Resources of every rollout worker, then of every learner rank."""
    rollout, learner = config.rollout, config.learner
    worker = {"CPU": rollout.cpus_per_worker, "GPU": rollout.gpus_per_worker}
    rank = {"CPU": learner.cpus_per_rank, "GPU": learner.gpus_per_rank}
    bundles = [worker] * rollout.workers + [rank] * learner.ranks
    return [{kind: amount for kind, amount in b.items() if amount > 0} for b in bundles]


def check_resources(config: Config) -> None:
    """Compare what the roles ask for with what the cluster has, before anything waits.

    Raises:
        ClusterError: with one line for each role.
    """
    rollout, learner = config.rollout, config.learner
    asked = {
        f"rollout.workers={rollout.workers}": (
            rollout.workers * rollout.cpus_per_worker,
            rollout.workers * rollout.gpus_per_worker,
        ),
        f"learner.ranks={learner.ranks}": (
            learner.ranks * learner.cpus_per_rank,
            learner.ranks * learner.gpus_per_rank,
        ),
    }
    for name, reward in config.rewards.items():
        asked[f"rewards.{name}.min_replicas={reward.min_replicas}"] = (
            reward.min_replicas * reward.cpus_per_replica,
            reward.min_replicas * reward.gpus_per_replica,
        )
    available = ray.cluster_resources()
    for place, kind in enumerate(("CPU", "GPU")):
        total, has = sum(a[place] for a in asked.values()), available.get(kind, 0.0)
        if total > has + 1e-6:
            parts = ", ".join(f"{name} asks for {a[place]:g}" for name, a in asked.items())
            raise ClusterError(
                f"the run wants {total:g} {kind} and the cluster has {has:g}: {parts}. Use fewer "
                f"workers, a smaller {kind.lower()}s_per_..., or a larger cluster"
            )


@contextmanager
def _ray_cluster(config: Config) -> Iterator[bool]:
    """Connect to Ray, or start it on this machine; yields whether it is ours alone."""
    address = config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        ray.init(
            address=address,
            include_dashboard=config.cluster.dashboard if address == "local" else None,
            runtime_env={"env_vars": WORKER_ENVIRONMENT},
            logging_level=logging.WARNING,
            # Every role's output is in its own log file; what matters comes back as an answer.
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at {address!r} (cluster.address or RAY_ADDRESS): {error}"
        ) from error
    try:
        yield address == "local"
    finally:
        ray.shutdown()


@contextmanager
def _placement(config: Config) -> Iterator[PlacementGroup]:
    bundles = wanted_bundles(config)
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(config.cluster.start_timeout_s):
            raise ClusterError(
                f"no place for {bundles} within {config.cluster.start_timeout_s:g} s "
                f"(cluster.start_timeout_s); free in the cluster: {ray.available_resources()}"
            )
        yield group
    finally:
        # Ends the actors in it, too.
        remove_placement_group(group)
