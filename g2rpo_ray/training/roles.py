"""Starting every role of a run on a Ray cluster, and ending all of them."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

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
    Demand,
    encoder_demand,
    evaluation_demand,
    learner_demand,
    living_nodes,
    overview,
    reward_demands,
    rollout_demand,
    shortage,
)
from g2rpo_ray.cluster.placement import Tell, placed, wait_for_nodes
from g2rpo_ray.cluster.postmortem import error_of, first_line
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.stop import heed
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.format import read_info
from g2rpo_ray.learner.ranks import LearnerGroup
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.plan.networks import evaluation_tflop
from g2rpo_ray.prompts.dataset import EmbeddedPrompts, Prompt, cut_words
from g2rpo_ray.prompts.encoder import EncoderActor
from g2rpo_ray.prompts.kept import KEPT
from g2rpo_ray.rewards.client import RewardClient
from g2rpo_ray.rewards.server import reward_servers, wait_for_servers
from g2rpo_ray.rollout.pool import RolloutPool
from g2rpo_ray.rollout.supply import ENCODER, SupplyError
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.training.cards import check_cards
from g2rpo_ray.training.settings import for_evaluation_workers
from g2rpo_ray.weight_sync import Peer, StoredWeights, WeightSync, WeightSyncError, make_weight_sync
from g2rpo_ray.weight_sync.frozen import frozen_keeper

HELDOUT = "heldout"
"""Of requests, one of which is taken at a time: however many, they take no place from others."""
READ_BY_DRIVER = 64 * 2**20
"""Bytes of embeddings that are read at once where they are needed; more have an actor."""
HEED_S = 1.0
"""So often what waits for an answer hears whether the run is to stop."""


class Encoder:
    """The run's encoder, for asking; the prompts (id, text) come back as references, in order.

    Where all of them were embedded and are small enough, no actor is started to read them.
    """

    def __init__(self, config: Config, start: Callable[[], ActorHandle]) -> None:
        self._start, self._places = start, itertools.count()
        embedded = EmbeddedPrompts(config)
        whole = embedded.train and embedded.heldout and embedded.bytes <= READ_BY_DRIVER
        self._embedded = embedded if whole else None
        if not whole:
            _ = self.actor

    @cached_property
    def actor(self) -> ActorHandle:
        return self._start()

    @property
    def started(self) -> list[ActorHandle]:
        """Its actor, if any."""
        return [self.actor] if "actor" in vars(self) else []

    def cut(self, texts: Sequence[str], length: int) -> str:
        """``cut_words`` of those that it encodes: others were told when they were embedded.

        Raises:
            StopRequested: a signal came meanwhile, as the encoders may still be loaded.
            InputError, RunError: they cannot be loaded.
            SupplyError: they failed otherwise, or their process ended.
        """
        asked = [actor.cut.remote(texts) for actor in self.started]
        while asked and ray.wait(asked, num_returns=len(asked), timeout=HEED_S)[1]:
            heed()
        for answer in asked:
            if isinstance(cause := error_of(answer), InputError | RunError):
                raise cause
            if cause is not None:
                raise SupplyError(
                    f"no prompt can be encoded: {ENCODER} failed with {type(cause).__name__}: "
                    f"{first_line(cause)}"
                ) from cause
        return cut_words([*itertools.chain(*ray.get(asked))], len(texts), length)

    def training(self, prompts: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        """Prompts to train on, before all others and in the order in which they were asked for."""
        return [
            self._read(number, text) or self.actor.encode.remote(number, text, next(self._places))
            for number, text in prompts
        ]

    def heldout(self, prompts: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        """Prompts to judge by, encoded while nobody waits for one to train on."""
        return [self._read(number, text) or self._heldout(number, text) for number, text in prompts]

    def _heldout(self, number: int, text: str) -> ray.ObjectRef:
        encode = self.actor.encode_heldout.options(concurrency_group=HELDOUT)
        return encode.remote(number, text)

    def _read(self, number: int, text: str) -> ray.ObjectRef | None:
        embeds = self._embedded and self._embedded.get(text)
        return ray.put(Prompt(number, text, embeds)) if embeds else None


@dataclass(frozen=True)
class Roles:
    """Every role, started."""

    encoder: Encoder
    pool: RolloutPool
    learner: LearnerGroup
    weight_sync: WeightSync
    rewards: RewardClient
    tflop: float
    """Of one evaluation of the network."""
    evaluation_pool: RolloutPool | None = None
    """Workers that evaluate while the run trains, where ``evaluation.workers`` asks for them."""

    def sync(self) -> WeightReceipt:
        """Bring the learner's weights to every worker of now, and to each that joins later."""
        return self.pool.sync(self._send)

    def _send(self, receivers: Sequence[Peer]) -> WeightReceipt:
        # While a newcomer is sent to, no update may come between weights and version.
        with self.learner.held():
            try:
                return self.weight_sync.sync(self.learner, receivers, self.learner.version)
            except WeightSyncError:
                # A transport talks to the ranks itself: one of them may be the cause.
                if not self.learner.heal():
                    raise
                return self.weight_sync.sync(self.learner, receivers, self.learner.version)

    def weights_of_now(self, timeout_s: float) -> StoredWeights:
        """The learner's weights in the object store.

        Whoever gets them is in no process group, so that training never waits for it.
        """
        with self.learner.held():
            version = self.learner.version
            return StoredWeights(version, *self.learner.export_weight_refs(version), timeout_s)


@contextmanager
def launch(config: Config, checkpoint: Path | None, tell: Tell) -> Iterator[Roles]:
    """Start all roles, and end them whatever happens inside.

    Args:
        checkpoint: folder that the learner continues from.
        tell: told what happens meanwhile.

    Raises:
        ClusterError: the cluster lacks resources, cannot be reached, or has too small cards; see
            ``cluster/`` and ``check_cards``.
    """
    kept = [learner_demand(config), *encoder_demand(config)]
    workers = [rollout_demand(config), *evaluation_demand(config)]
    version = read_info(checkpoint).weight_version if checkpoint else 0
    with ExitStack() as stack:
        private = stack.enter_context(_cluster(config, kept, workers, tell))
        check_cards(config, tell)
        # Inside the cluster and around its room, which takes the ranks along when it goes.
        beside = stack.enter_context(ThreadPoolExecutor(1, "learner"))
        room = stack.enter_context(_room(config, kept, workers, tell))
        assert room is not None
        tell("starting learner ranks, reward servers and rollout workers")
        # It ends before its room and after those whom it sends to, also where it has not started.
        learner = LearnerGroup(config, room, checkpoint, tell, version)
        starting = beside.submit(stack.enter_context(closing(learner)).start)
        kind = _DrawingRoles(run_name(config), private, [run_folder(config) / KEPT])
        with (
            kind.started(config, room, kept, workers, tell) as (rewards, encoder, pool),
            _evaluation_pool(config, rewards, tell) as evaluation_pool,
        ):
            for actor in encoder.started:
                # What fails there fails again for the first prompt, and is told then.
                actor.prepare.remote()
            kind.wait(config)
            while not wait([starting], HEED_S).done:
                heed()
            starting.result()
            learner.watch()
            tell(f"training {learner.coverage}")
            counting = beside.submit(learner.compute, "counting operations", evaluation_tflop)
            pool.wait_until_ready()
            if evaluation_pool is not None:
                evaluation_pool.wait_until_ready()
            sync = make_weight_sync(config)
            while not wait([counting], HEED_S).done:
                heed()
            tflop = counting.result()
            yield Roles(encoder, pool, learner, sync, rewards, tflop, evaluation_pool)


@contextmanager
def launch_rollout(
    config: Config, embeddings: Sequence[Path], tell: Tell
) -> Iterator[tuple[Encoder, RolloutPool]]:
    """Start the roles that draw and score, without a learner; otherwise as ``launch``, and
    ``embeddings`` as of ``PromptEncoder``."""
    kept, workers = encoder_demand(config), [rollout_demand(config)]
    with (
        _cluster(config, kept, workers, tell) as private,
        _room(config, kept, workers, tell) as room,
    ):
        tell("starting reward servers and rollout workers")
        kind = _DrawingRoles(f"g2rpo-{os.getpid()}", private, embeddings)
        with kind.started(config, room, kept, workers, tell) as (_, encoder, pool):
            kind.wait(config)
            pool.wait_until_ready()
            yield encoder, pool


def run_name(config: Config) -> str:
    """Of a run's reward servers: a driver that is started again finds those of one that was killed,
    and replaces them."""
    return f"g2rpo-{hashlib.sha256(str(run_folder(config)).encode()).hexdigest()[:10]}"


@contextmanager
def _cluster(
    config: Config, kept: Sequence[Demand], workers: Sequence[Demand], tell: Tell
) -> Iterator[bool]:
    """Join a cluster with room for all; whether it is private.

    Args:
        kept: what has its room until the end.
        workers: placed one by one later: each can be replaced, and more can join.
    """
    tell("starting Ray")
    with ray_cluster(config.cluster) as private:
        tell(f"logs of all roles: {ray._private.worker.global_worker.node.get_logs_dir_path()}")
        wait_for_nodes(config, tell)
        everything, nodes = [*kept, *workers, *reward_demands(config)], living_nodes()
        tell(overview(everything, nodes))
        if private and (reasons := shortage(everything, nodes)):
            # Nothing will join it, so there is nothing to wait for.
            raise ClusterError(" ".join(reasons))
        yield private


@contextmanager
def _room(
    config: Config, kept: Sequence[Demand], workers: Sequence[Demand], tell: Tell
) -> Iterator[PlacementGroup | None]:
    """Where ``kept`` lie; roles that start inside share frozen weights, if the run is to."""
    others = [*workers, *reward_demands(config)]
    with frozen_keeper(config), placed(kept, others, config.cluster.start_timeout_s, tell) as room:
        yield room


@dataclass(frozen=True)
class _DrawingRoles:
    """Who draws and scores."""

    servers: str
    """Name of the reward servers."""
    private_cluster: bool
    embeddings: Sequence[Path]
    """See ``PromptEncoder``."""

    @contextmanager
    def started(
        self,
        config: Config,
        room: PlacementGroup | None,
        kept: Sequence[Demand],
        workers: Sequence[Demand],
        tell: Tell,
    ) -> Iterator[tuple[RewardClient, Encoder, RolloutPool]]:
        """All of them, starting at the same time; ``wait``, and the pool, say when they have."""
        timeout_s, rewards = config.cluster.start_timeout_s, config.rewards
        others = [*kept, *reward_demands(config)]
        on_cards = any(reward.gpus_per_replica for reward in rewards.values())
        with _encoder(config, room, self.embeddings) as encoder, ExitStack() as stack:
            # Small shares of cards first would leave no card with room for a large one.
            with placed(workers, others, timeout_s, tell):
                until: Literal["room", "none"] = "room" if on_cards else "none"
                started = reward_servers(
                    self.servers, rewards, timeout_s, self.private_cluster, until,
                    config.model.deterministic,
                )  # fmt: skip
                handles = stack.enter_context(started)
            client = RewardClient(handles, rewards, config.advantage.on_invalid == "stop")
            with closing(RolloutPool(config, client, tell)) as pool:
                yield client, encoder, pool

    def wait(self, config: Config) -> None:
        timeout_s = config.cluster.start_timeout_s
        wait_for_servers(self.servers, config.rewards, timeout_s, config.model.deterministic)


@contextmanager
def _encoder(
    config: Config, room: PlacementGroup | None, embeddings: Sequence[Path]
) -> Iterator[Encoder]:
    """In the last bundle of ``room`` where it has a share of a card; else beside the driver.

    Embeddings lie on the encoder's node: it shall not go while the driver stays.
    """
    gpus = config.prompts.encoder_gpus
    here = ray.get_runtime_context().get_node_id()
    place: object = NodeAffinitySchedulingStrategy(here, soft=False)
    if gpus and room is not None:
        last = room.bundle_count - 1
        place = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=last)
    kind = ray.remote(concurrency_groups={HELDOUT: 1})(EncoderActor).options(
        num_cpus=0, num_gpus=gpus, max_restarts=5, max_task_retries=5, scheduling_strategy=place
    )
    encoder = Encoder(config, lambda: kind.remote(config, embeddings))
    try:
        yield encoder
    finally:
        for actor in encoder.started:
            ray.kill(actor)


def _evaluation_pool(
    config: Config, rewards: RewardClient, tell: Tell
) -> AbstractContextManager[RolloutPool | None]:
    if not config.evaluation.workers:
        return nullcontext()
    settings = for_evaluation_workers(config)
    return closing(RolloutPool(settings, rewards, tell, role="evaluation worker"))
