"""The broadcast transport over gloo, between real learner ranks and rollout workers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle

from g2rpo_ray.cluster.connect import free_address
from g2rpo_ray.config import Config
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.models.weights import TensorLayout, WeightReceipt, receipt, trainable_parameters
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.weight_sync import NcclSync, Peer, WeightSyncError
from g2rpo_ray.weight_sync.broadcast import plan_buckets, shard_bytes
from tests.tiny import Redness, tiny_config

BUCKET_MIB = 1
"""The tiny model takes several."""


class Rank(Learner):
    """A learner rank whose weights a test can change."""

    def add(self, value: float) -> WeightReceipt:
        """Change every weight that this rank holds, and give the whole weights' receipt."""
        for shard in self.engine.weight_shards().values():
            shard.add_(value)
        return receipt(0, self.engine.weights())


class Worker(RolloutWorker):
    """A rollout worker that may be compiled, or hang."""

    hang_s = 0.0

    def compile(self) -> None:
        self.policy.transformer = torch.compile(self.policy.transformer)

    def hang(self, seconds: float) -> None:
        self.hang_s = seconds

    def receive_broadcast(self, version: int) -> WeightReceipt:
        time.sleep(self.hang_s)
        return super().receive_broadcast(version)

    def holds(self) -> WeightReceipt:
        return receipt(0, trainable_parameters(self.policy))


class Ranks:
    """Learner ranks as a transport sees them."""

    def __init__(self, config: Config) -> None:
        count = config.learner.ranks
        actor = ray.remote(Rank).options(num_cpus=0.2)
        self.actors = [actor.remote(config, rank) for rank in range(count)]
        meeting = ray.get(self.actors[0].__ray_call__.remote(free_address))
        self.call("start", *meeting, None)
        self.weight_senders = self.actors if config.learner.zero_stage == 3 else self.actors[:1]

    def call(self, method: str, *arguments: object) -> list[Any]:
        return ray.get([getattr(a, method).remote(*arguments) for a in self.actors], timeout=480)

    def sync(self, transport: NcclSync, workers: list[ActorHandle], version: int) -> WeightReceipt:
        """Change the weights, send them, and check that every worker holds them."""
        whole = self.call("add", 0.25)[0]
        receivers = [Peer(f"rollout worker {number}", w) for number, w in enumerate(workers)]
        report = transport.sync(self, receivers, version)  # type: ignore[arg-type]
        assert (report.version, report.tensors) == (version, whole.tensors)
        assert (report.bytes, report.checksum) == (whole.bytes, whole.checksum)
        assert ray.get([w.holds.remote() for w in workers]) == [whole] * len(workers)
        return whole


def start_worker(config: Config) -> ActorHandle:
    scoring = Redness(sorted(config.rewards))
    return ray.remote(Worker).options(num_cpus=0.2).remote(config, scoring)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("run")
    return folder


@pytest.fixture(scope="module")
def ranks(ray_cluster: None, run_dir: Path) -> Iterator[Ranks]:  # noqa: ARG001
    """Two ranks, each with half of every tensor."""
    ranks = Ranks(tiny_config(run_dir, "learner.ranks=2", "learner.zero_stage=3"))
    yield ranks
    for actor in ranks.actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def workers(ray_cluster: None, run_dir: Path) -> Iterator[list[ActorHandle]]:  # noqa: ARG001
    workers = [start_worker(tiny_config(run_dir)) for _ in range(2)]
    yield workers
    for worker in workers:
        ray.kill(worker)


@pytest.fixture(scope="module")
def adapted(ray_cluster: None, run_dir: Path) -> Iterator[tuple[Config, ActorHandle]]:  # noqa: ARG001
    """A worker that has adapters, and its settings."""
    config = tiny_config(run_dir, "model.lora.rank=4", "learner.ranks=1")
    worker = start_worker(config)
    yield config, worker
    ray.kill(worker)


def test_two_zero3_ranks_reach_two_workers_again_and_again(
    ranks: Ranks, workers: list[ActorHandle]
) -> None:
    transport = NcclSync(BUCKET_MIB, timeout_s=300)
    first = ranks.sync(transport, workers, 1)
    second = ranks.sync(transport, workers, 2)
    assert first.checksum != second.checksum
    assert first.bytes > 2 * BUCKET_MIB * 2**20


def test_workers_may_be_others_than_last_time(ranks: Ranks, workers: list[ActorHandle]) -> None:
    transport = NcclSync(BUCKET_MIB, timeout_s=300)
    ranks.sync(transport, workers[:1], 1)
    ranks.sync(transport, workers, 2)
    ranks.sync(transport, workers[1:], 2)


def test_a_compiled_worker_binds_the_same_names(ranks: Ranks, workers: list[ActorHandle]) -> None:
    ray.get(workers[0].compile.remote())
    ranks.sync(NcclSync(BUCKET_MIB, timeout_s=300), workers, 1)


def test_a_worker_that_hangs_is_named_and_the_next_sync_goes_through(
    ranks: Ranks, workers: list[ActorHandle]
) -> None:
    ray.get([worker.hang.remote(0) for worker in workers])
    # Long enough for four running processes to meet on a busy machine. The hang is longer, and ends
    # within the grace that follows.
    transport = NcclSync(BUCKET_MIB, timeout_s=15)
    ranks.sync(transport, workers, 1)
    ray.get(workers[1].hang.remote(22))
    with pytest.raises(WeightSyncError) as caught:
        ranks.sync(transport, workers, 2)
    assert "missing: rollout worker 1" in str(caught.value)
    assert [peer.handle for peer in caught.value.receivers] == [workers[1]]
    assert "given up" not in str(caught.value)
    ray.get(workers[1].hang.remote(0))
    ranks.sync(transport, workers, 3)


def test_a_worker_that_dies_is_named_and_the_others_go_on(
    ranks: Ranks, workers: list[ActorHandle], run_dir: Path
) -> None:
    # Who waited for the time-out would still wait when pytest gives up.
    transport = NcclSync(BUCKET_MIB, timeout_s=3600)
    doomed = start_worker(tiny_config(run_dir))
    ranks.sync(transport, [*workers, doomed], 1)
    ray.get(workers[0].hang.remote(1))
    ray.kill(doomed)
    with pytest.raises(WeightSyncError, match="rollout worker 2 died") as caught:
        ranks.sync(transport, [*workers, doomed], 2)
    assert "learner rank" not in str(caught.value)
    assert [peer.handle for peer in caught.value.receivers] == [doomed]
    ray.get(workers[0].hang.remote(0))
    ranks.sync(transport, workers, 3)


def test_a_worker_with_other_tensors_is_refused_before_anything_is_sent(
    ranks: Ranks, workers: list[ActorHandle], adapted: tuple[Config, ActorHandle]
) -> None:
    before = ray.get(workers[0].holds.remote())
    with pytest.raises(
        WeightSyncError, match="rollout worker 1 has other tensors than learner rank 0"
    ) as caught:
        ranks.sync(NcclSync(BUCKET_MIB, timeout_s=300), [workers[0], adapted[1]], 1)
    assert ".lora_" in str(caught.value)
    assert ray.get(workers[0].holds.remote()) == before


def test_adapters_of_one_sender(adapted: tuple[Config, ActorHandle]) -> None:
    config, worker = adapted
    ranks = Ranks(config)
    ranks.sync(NcclSync(BUCKET_MIB, timeout_s=300), [worker], 1)
    for actor in ranks.actors:
        ray.kill(actor)


@pytest.mark.parametrize("senders", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [7, 64, 10**6])
def test_buckets_carry_every_byte_once(senders: int, bucket_bytes: int) -> None:
    layout = [
        TensorLayout("a", torch.bfloat16, (5, 7)),
        TensorLayout("b", torch.float32, (1,)),
        TensorLayout("c", torch.bfloat16, (64,)),
    ]
    carried: dict[str, list[int]] = {tensor.name: [] for tensor in layout}
    held = {tensor.name: shard_bytes(tensor, senders) for tensor in layout}
    for bucket in plan_buckets(layout, senders, bucket_bytes):
        assert 0 < bucket.bytes <= bucket_bytes
        for piece in bucket.pieces:
            shard = held[piece.name]
            assert bucket.sender * shard <= piece.start < piece.stop
            assert piece.stop <= (bucket.sender + 1) * shard
            carried[piece.name] += range(piece.start, piece.stop)
    assert {name: sorted(places) for name, places in carried.items()} == {
        tensor.name: list(range(tensor.bytes)) for tensor in layout
    }
