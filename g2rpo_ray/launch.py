"""Starting every role of a run on a Ray cluster, and ending all of them."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.config import Config
from g2rpo_ray.errors import InputError
from g2rpo_ray.learner.group import LearnerGroup
from g2rpo_ray.prompts.encoder import PromptEncoder
from g2rpo_ray.rewards.client import RewardClient
from g2rpo_ray.rewards.server import reward_servers
from g2rpo_ray.rollout.pool import RolloutPool
from g2rpo_ray.weight_sync import WeightSync, make_weight_sync

# Workers get only these: a whole environment in runtime_env breaks Ray's agent, and leaks tokens.
WORKER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Resources = dict[str, float]


class ClusterError(InputError):
    """The cluster cannot hold the run; the message says what is wanted and what there is."""


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
        ClusterError: the cluster lacks resources, or cannot be reached.
    """
    bundles = worker_bundles(config) + rank_bundles(config)
    with _rollout_roles(config, bundles, note) as (encoder, pool, placement):
        note("starting learner ranks")
        learner = LearnerGroup(config, placement, config.rollout.workers, checkpoint)
        note(f"training {learner.coverage}")
        yield Roles(encoder, pool, learner, make_weight_sync(config))


@contextmanager
def launch_rollout(
    config: Config, note: Callable[[str], None]
) -> Iterator[tuple[ActorHandle, RolloutPool]]:
    """Start the roles that draw and score, without a learner; otherwise as ``launch``."""
    with _rollout_roles(config, worker_bundles(config), note) as (encoder, pool, _):
        yield encoder, pool


@contextmanager
def _rollout_roles(
    config: Config, bundles: list[Resources], note: Callable[[str], None]
) -> Iterator[tuple[ActorHandle, RolloutPool, PlacementGroup]]:
    note("starting Ray")
    with _ray_cluster(config) as private:
        session = ray.get_runtime_context().get_session_name()
        note(f"logs of all roles: {session}/logs in Ray's temporary folder (/tmp/ray)")
        check_resources(config, bundles)
        note("starting reward servers and rollout workers")
        prefix = f"g2rpo-{os.getpid()}"
        timeout_s = config.cluster.start_timeout_s
        with (
            _placement(bundles, timeout_s) as placement,
            reward_servers(prefix, config.rewards, timeout_s, private) as handles,
        ):
            client = RewardClient(handles, config.rewards, config.advantage.on_invalid == "stop")
            encoder = (
                ray.remote(PromptEncoder)
                .options(num_cpus=0, max_restarts=2, max_task_retries=2)
                .remote(config)
            )
            yield encoder, RolloutPool(config, placement, client), placement


def worker_bundles(config: Config) -> list[Resources]:
    """Resources of every rollout worker."""
    rollout = config.rollout
    return [_bundle(rollout.cpus_per_worker, rollout.gpus_per_worker)] * rollout.workers


def rank_bundles(config: Config) -> list[Resources]:
    """Resources of every learner rank."""
    learner = config.learner
    return [_bundle(learner.cpus_per_rank, learner.gpus_per_rank)] * learner.ranks


def _bundle(cpus: float, gpus: float) -> Resources:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def check_resources(config: Config, bundles: list[Resources]) -> None:
    """Compare what the roles ask for with what the cluster has, before anything waits.

    Raises:
        ClusterError: with what each role asks for.
    """
    rollout, learner = config.rollout, config.learner
    settings = [
        ("rollout.workers", rollout.workers, rollout.cpus_per_worker, rollout.gpus_per_worker),
        ("learner.ranks", learner.ranks, learner.cpus_per_rank, learner.gpus_per_rank),
    ]
    if len(bundles) == rollout.workers:
        settings.pop()
    settings += [
        (f"rewards.{name}.min_replicas", r.min_replicas, r.cpus_per_replica, r.gpus_per_replica)
        for name, r in config.rewards.items()
    ]
    has = ray.cluster_resources()
    for kind in ("CPU", "GPU"):
        wanted = {
            f"{setting}={count}": count * (cpus if kind == "CPU" else gpus)
            for setting, count, cpus, gpus in settings
        }
        total = sum(wanted.values())
        if total > has.get(kind, 0.0) + 1e-6:
            parts = ", ".join(f"{setting} asks for {n:g}" for setting, n in wanted.items())
            raise ClusterError(
                f"the run wants {total:g} {kind} and the cluster has {has.get(kind, 0.0):g}: "
                f"{parts}. Use fewer, ask for less with {kind.lower()}s_per_..., or take a larger "
                "cluster"
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
def _placement(bundles: list[Resources], timeout_s: float) -> Iterator[PlacementGroup]:
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(timeout_s):
            raise ClusterError(
                f"no place for {bundles} within {timeout_s:g} s (cluster.start_timeout_s); free "
                f"in the cluster: {ray.available_resources()}"
            )
        yield group
    finally:
        # Ends the actors in it, too.
        remove_placement_group(group)
