"""Starting every role of a run on a Ray cluster, and ending all of them."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from g2rpo_ray.cluster.connect import ray_cluster
from g2rpo_ray.cluster.demand import (
    ClusterError,
    encoder_demand,
    evaluation_demand,
    learner_demand,
    living_nodes,
    overview,
    reward_demands,
    rollout_demand,
    shortage,
)
from g2rpo_ray.cluster.placement import placed, wait_for_nodes
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.files import read_info
from g2rpo_ray.learner.ranks import LearnerGroup
from g2rpo_ray.prompts.encoder import PromptEncoder
from g2rpo_ray.rewards.client import RewardClient
from g2rpo_ray.rewards.server import reward_servers
from g2rpo_ray.rollout.crew import SyncWorkers
from g2rpo_ray.rollout.pool import RolloutPool
from g2rpo_ray.training.settings import for_evaluation_workers
from g2rpo_ray.weight_sync import (
    ObjectStoreSync,
    Peer,
    SyncReport,
    WeightSync,
    WeightSyncError,
    make_weight_sync,
)


@dataclass(frozen=True)
class Roles:
    """Every role, started."""

    encoder: ActorHandle
    pool: RolloutPool
    learner: LearnerGroup
    weight_sync: WeightSync
    rewards: RewardClient
    evaluation_pool: RolloutPool | None = None
    """Workers that evaluate while the run trains, where ``evaluation.workers`` asks for them."""

    def sync(self) -> SyncReport:
        """Bring the learner's weights to every worker of now, and to each that joins later."""
        report: SyncReport = self.pool.sync(self._send)
        return report

    def _send(self, receivers: Sequence[Peer]) -> SyncReport:
        # The lock: while a newcomer is sent to, no update may come between weights and version.
        with self.learner.lock:
            try:
                return self.weight_sync.sync(self.learner, receivers, self.learner.version)
            except WeightSyncError:
                # A transport talks to the ranks itself: one of them may be the cause.
                if not self.learner.heal():
                    raise
                return self.weight_sync.sync(self.learner, receivers, self.learner.version)

    def weights_of_now(self, timeout_s: float) -> SyncWorkers:
        """The learner's weights, put into the object store; what is returned sends them, verified.

        Whoever gets them is in no process group, so that training never waits for it.
        """
        transport = ObjectStoreSync(timeout_s)
        with self.learner.lock:
            version = self.learner.version
            expected, weights = self.learner.export_weight_refs(version)
        return lambda receivers: transport.send(expected, weights, receivers, version)


@contextmanager
def launch(config: Config, checkpoint: Path | None, note: Callable[[str], None]) -> Iterator[Roles]:
    """Start all roles, and end them whatever happens inside.

    Args:
        checkpoint: folder that the learner continues from.
        note: told what happens meanwhile.

    Raises:
        ClusterError: the cluster lacks resources, or cannot be reached; see ``cluster.py``.
    """
    with (
        _rollout_roles(config, run_name(config), note, training=True) as (
            encoder,
            pool,
            placement,
            client,
        ),
        _evaluation_pool(config, client, note) as evaluation_pool,
    ):
        assert placement is not None
        note("starting learner ranks")
        version = read_info(checkpoint).weight_version if checkpoint else 0
        learner = LearnerGroup(config, placement, checkpoint, note, version)
        note(f"training {learner.coverage}")
        pool.wait_until_ready()
        if evaluation_pool is not None:
            evaluation_pool.wait_until_ready()
        yield Roles(encoder, pool, learner, make_weight_sync(config), client, evaluation_pool)


@contextmanager
def launch_rollout(
    config: Config, note: Callable[[str], None]
) -> Iterator[tuple[ActorHandle, RolloutPool]]:
    """Start the roles that draw and score, without a learner; otherwise as ``launch``."""
    with _rollout_roles(config, f"g2rpo-{os.getpid()}", note) as (encoder, pool, *_):
        pool.wait_until_ready()
        yield encoder, pool


def run_name(config: Config) -> str:
    """Of a run's reward servers: a driver that is started again finds those of one that was killed,
    and replaces them."""
    folder = Path(config.run_dir).expanduser().absolute()
    return f"g2rpo-{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"


@contextmanager
def _rollout_roles(
    config: Config, name: str, note: Callable[[str], None], training: bool = False
) -> Iterator[tuple[ActorHandle, RolloutPool, PlacementGroup | None, RewardClient]]:
    note("starting Ray")
    with ray_cluster(config.cluster) as private:
        note(f"logs of all roles: {ray._private.worker.global_worker.node.get_logs_dir_path()}")
        wait_for_nodes(config, note)
        # Workers are placed one by one: each can be replaced, and more can join.
        workers, rewards = [rollout_demand(config)], reward_demands(config)
        kept = encoder_demand(config)
        if training:
            kept.insert(0, learner_demand(config))
            workers += evaluation_demand(config)
        nodes = living_nodes()
        note(overview([*kept, *workers, *rewards], nodes))
        if private and (reasons := shortage([*workers, *rewards, *kept], nodes)):
            # Nothing will join it, so there is nothing to wait for.
            raise ClusterError(" ".join(reasons))
        note("starting reward servers and rollout workers")
        timeout_s = config.cluster.start_timeout_s
        with ExitStack() as stack:
            placement = stack.enter_context(placed(kept, [*workers, *rewards], timeout_s, note))
            # Small shares of cards first would leave no card with room for a large one.
            with placed(workers, [*kept, *rewards], timeout_s, note):
                servers = reward_servers(name, config.rewards, timeout_s, private)
                handles = stack.enter_context(servers)
            client = RewardClient(handles, config.rewards, config.advantage.on_invalid == "stop")
            encoder = _start_encoder(config, placement)
            pool = RolloutPool(config, client, note)
            try:
                yield encoder, pool, placement, client
            finally:
                pool.close()
                ray.kill(encoder)


def _start_encoder(config: Config, placement: PlacementGroup | None) -> ActorHandle:
    """In the last bundle of ``placement`` where it has a share of a card; else beside the driver.

    Embeddings lie on the encoder's node: it shall not go while the driver stays.
    """
    gpus = config.prompts.encoder_gpus
    place: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy
    if gpus and placement is not None:
        last = placement.bundle_count - 1
        place = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=last)
    else:
        here = ray.get_runtime_context().get_node_id()
        place = NodeAffinitySchedulingStrategy(here, soft=False)
    return (
        ray.remote(PromptEncoder)
        .options(
            num_cpus=0,
            num_gpus=gpus,
            max_restarts=5,
            max_task_retries=5,
            scheduling_strategy=place,
        )
        .remote(config)
    )


@contextmanager
def _evaluation_pool(
    config: Config, client: RewardClient, note: Callable[[str], None]
) -> Iterator[RolloutPool | None]:
    if not config.evaluation.workers:
        yield None
        return
    pool = RolloutPool(for_evaluation_workers(config), client, note, role="evaluation worker")
    try:
        yield pool
    finally:
        pool.close()
