"""Learner: one DeepSpeed rank on a Ray actor."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import ray
import torch

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.common.device import add_in_one_order, give_back, keep_to_share, role_device
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.logs import log_as, log_context, logged
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.fence import UNFENCED, Fence
from g2rpo_ray.learner.checkpoints.folders import SNAPSHOTS, SNAPSHOTS_KEPT, delete_old_checkpoints
from g2rpo_ray.learner.checkpoints.format import (
    CheckpointError,
    CheckpointInfo,
    commit_checkpoint,
    open_checkpoint,
    prepare_checkpoint,
    write_rank,
)
from g2rpo_ray.learner.checkpoints.parts import StatePart
from g2rpo_ray.learner.engine import LearnerEngine, compile_ahead, join_process_group
from g2rpo_ray.learner.update import UpdateReport, assign, update_on_groups
from g2rpo_ray.models.batches import name_memory
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.lora import coverage
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.weights import PackedWeights, TensorLayout, WeightReceipt, receipt
from g2rpo_ray.sampling.group import RolloutGroup
from g2rpo_ray.weight_sync.broadcast import Meeting, WeightGroup, open_store
from g2rpo_ray.weight_sync.frozen import FrozenParts

logger = logging.getLogger(__name__)

LESS = (
    "learner.gpus_per_rank gives it more of the card; model.gradient_checkpointing=true, a lower "
    "model.lora.rank or learner.steps_per_pass, smaller pictures (sampling.height and width) and "
    "learner.offload_optimizer=true need less"
)
"""What to change where a rank's memory ends."""
LIVES = "lives"
"""Concurrency group of the one call that is under way beside all others."""
NO_SCALES: Mapping[str, float] = MappingProxyType({})


class Learner:
    """One rank: its share of the groups, its shard of the optimizer."""

    def __init__(self, config: Config, rank: int) -> None:
        log_as("learner", rank)
        self.config, self.rank = config, rank
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[float] | None = None
        self._weight_group: WeightGroup | None = None

    def start(
        self, address: str, port: int, checkpoint: Path | None, fence: Fence = UNFENCED
    ) -> str:
        """Join the group, load the model (or the checkpoint), and say what is trained.

        Args:
            fence: of these ranks' generation.
        """
        settings, self._fence = self.config.learner, fence
        # Of the thread that calls this: the one that computes, which Ray's groups set apart.
        torch.set_num_threads(settings.threads)
        with logged("start"):
            self.device = role_device(settings.gpus_per_rank, "learner.gpus_per_rank")
            keep_to_share(settings.gpus_per_rank)
            join_process_group(
                self.rank, settings.ranks, address, port, settings.timeout_s, self.device
            )
            frozen = FrozenParts(self.device)
            with name_memory("a learner rank's weights and optimizer state", LESS):
                policy = self._load(frozen, checkpoint)
            give_back(settings.gpus_per_rank)
        return "; ".join(filter(None, [coverage(policy.transformer), frozen.description]))

    def _load(self, frozen: FrozenParts, checkpoint: Path | None) -> Policy:
        settings = self.config.learner
        guided = not settings.unguided
        policy = load_policy(self.config, self.device, guided=guided, load=frozen)
        if self.config.model.deterministic:
            add_in_one_order()
        if settings.compile:
            compile_blocks(policy, self.config.rollout.compile_cache)
            # ZeRO-3 hooks itself into every module, and so has other code.
            if settings.zero_stage < 3:
                rows = make_algorithm(self.config).learner_rows()
                compile_ahead(policy, rows, self.config.prompts.max_sequence_length)
        old_policy = self.config.draws_average
        if checkpoint is None:
            self.engine = LearnerEngine(policy, settings, old_policy=old_policy)
        else:
            info, state = open_checkpoint(checkpoint)
            self.engine = LearnerEngine(
                policy, settings, state, info.updates, old_policy=old_policy
            )
        return policy

    def update(
        self, groups: list[ray.ObjectRef], scales: Mapping[str, float] = NO_SCALES
    ) -> UpdateReport:
        """One iteration's update on this rank's share of ``groups``, given in id order.

        Args:
            scales: what the weights of rewards are multiplied by; 1 of those not named.
        """
        shares = assign(len(groups), self.rank, self.config.learner.ranks)
        with logged("fetching groups"):
            mine: list[RolloutGroup] = ray.get([groups[index] for index, _ in shares])
        context = log_context(iteration=mine[0].iteration)
        with context, logged("update"), name_memory("a learner rank's update", LESS):
            report = update_on_groups(
                self.engine,
                mine,
                [weight for _, weight in shares],
                config=self.config.reweighted(scales),
                prompts=len(groups),
                ranks=self.config.learner.ranks,
                device=self.device,
            )
            prompt_ids = [group.prompt.prompt_id for group in mine]
            logger.info("updated the weights", extra={"prompt_ids": prompt_ids})
        give_back(self.config.learner.gpus_per_rank)
        return report

    def export_weights(self, version: int) -> tuple[WeightReceipt | None, PackedWeights | None]:
        """Receipt and trainable weights from rank 0; the others only take part."""
        with logged("gather"):
            weights = self.engine.weights()
            if self.rank > 0:
                return None, None
            return receipt(version, weights), PackedWeights.of(weights)

    def open_weight_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the store where the members of a new weight group meet; address and port."""
        address = ray.util.get_node_ip_address()
        self._weight_store = open_store(address, timeout_s)
        return address, self._weight_store.port

    def join_weight_group(self, meeting: Meeting, rank: int) -> list[TensorLayout]:
        """Become a sender of a group; answers with all tensors that it will send."""
        self.leave_weight_group()
        layout = self.engine.weight_layout()
        store = self._weight_store if rank == 0 else None
        self._weight_group = WeightGroup(meeting, rank, layout, self.device, store)
        return layout

    def leave_weight_group(self) -> None:
        """Before another group is formed; also of one that failed."""
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None

    def send_weights(self, version: int) -> list[int]:
        """Broadcast this rank's part of the weights; answers with its tensors' word sums."""
        assert self._weight_group is not None, "join_weight_group comes first"
        with logged("gather and send"):
            self._weight_group.transfer(version, self.engine.weight_shards())
        return self.engine.weight_shard_sums()

    def begin_save(self, folder: Path, info: CheckpointInfo, keep_also: Sequence[int] = ()) -> None:
        """Copy this rank's part of the state to host memory, to be written in the background.

        Args:
            keep_also: iterations whose checkpoints outlive ``checkpoint.keep_last``.

        Raises:
            DiskError, CheckpointError: this one cannot be begun, or the one before not be written.
        """
        self.finish_save()
        with logged("copying the state"):
            parts = self.engine.state_parts()
        failure: list[Exception | None] = [None]
        if self.rank == 0:
            try:
                # Every rank has as much of the state, but for what does not divide evenly.
                ranks, mine = self.config.learner.ranks, sum(part.data.nbytes for part in parts)
                prepare_checkpoint(folder, ranks * mine, self._fence)
            except (CheckpointError, RunError) as error:
                failure = [error]
        # The others write only where rank 0 has cleared the place, or fail as it did.
        torch.distributed.broadcast_object_list(failure, 0, device=self.device)
        if failure[0] is not None:
            raise failure[0]
        self._writing = self._writer.submit(self._write, folder, info, parts, keep_also)

    def finish_save(self, wait: bool = True) -> float | None:
        """Seconds that this rank wrote the last checkpoint; none while it still does.

        Args:
            wait: until the checkpoint is whole.

        Raises:
            DiskError, CheckpointError: it could not be written; those before are kept. Every later
                call and every later checkpoint fails with it.
        """
        if self._writing is None:
            return 0.0
        return self._writing.result() if wait or self._writing.done() else None

    def _write(
        self, folder: Path, info: CheckpointInfo, parts: list[StatePart], keep_also: Sequence[int]
    ) -> float:
        started_s = time.monotonic()
        with logged(f"writing {folder.name}"):
            try:
                write_rank(folder, self.rank, parts, self._fence)
            finally:
                # The shard's copy goes, also where the error would keep this frame.
                parts.clear()
            if self.rank == 0:
                settings, run_dir = self.config.learner, folder.parent.parent
                commit_checkpoint(folder, info, settings.ranks, settings.timeout_s, self._fence)
                # By the two last names: a run may itself be called "snapshots".
                is_snapshot = run_dir.parts[-2:] == (Path(self.config.run_dir).name, SNAPSHOTS)
                keep_last = SNAPSHOTS_KEPT if is_snapshot else self.config.checkpoint.keep_last
                with self._fence.held():
                    delete_old_checkpoints(run_dir, keep_last, folder, keep_also)
        return time.monotonic() - started_s

    def lives(self) -> None:
        """Never answers (in ``LIVES``): who waits for it learns of this process's end."""
        threading.Event().wait()

    def checksum(self) -> str:
        """Of the trainable weights, the same on every rank."""
        with logged("checksum"):
            return receipt(0, self.engine.weights()).checksum
