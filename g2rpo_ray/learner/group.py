"""LearnerGroup: the ranks seen as one learner by the driver."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from g2rpo_ray.config import Config
from g2rpo_ray.errors import InputError, RunError
from g2rpo_ray.learner.checkpoint import CheckpointInfo
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.update import StepRecord, UpdateReport
from g2rpo_ray.learner.worker import Learner


@dataclass(frozen=True)
class LearnerUpdate:
    """One iteration's update over all ranks."""

    records: list[StepRecord]
    """Every (group, SDE step) once, in the order of group and position."""
    grad_norms: list[float]
    learning_rate: float


class LearnerGroup:
    """Starts the ranks and calls them together."""

    def __init__(
        self, config: Config, placement: PlacementGroup, first_bundle: int, checkpoint: Path | None
    ) -> None:
        """
        Args:
            placement: rank r runs in bundle ``first_bundle + r``.
            checkpoint: folder to continue from.
        """
        settings = config.learner
        self._timeout_s = settings.timeout_s
        self.ranks: list[ActorHandle] = [
            ray.remote(Learner)
            .options(
                num_cpus=settings.cpus_per_rank,
                num_gpus=settings.gpus_per_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement, placement_group_bundle_index=first_bundle + rank
                ),
            )
            .remote(config, rank)
            for rank in range(settings.ranks)
        ]
        address, port = self._call([self.ranks[0].free_address.remote()], "address")[0]
        started = [rank.start.remote(address, port, checkpoint) for rank in self.ranks]
        self.coverage: str = self._call(started, "start")[0]
        self.weight_senders = self.ranks if settings.zero_stage == 3 else self.ranks[:1]
        """Ranks that hold a part of the weights which no other rank can send."""

    def update(self, groups: Sequence[ray.ObjectRef]) -> LearnerUpdate:
        """Train on one iteration's groups, given in id order."""
        reports: list[UpdateReport] = self._call(
            [rank.update.remote(list(groups)) for rank in self.ranks], "update"
        )
        records = [record for report in reports for record in report.records]
        records.sort(key=lambda record: (record.group_id, record.position))
        return LearnerUpdate(records, reports[0].grad_norms, reports[0].learning_rate)

    def export_weight_refs(self, version: int) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to (receipt, weights) of rank 0, put into the object store once."""
        calls = [rank.export_weights.options(num_returns=2).remote(version) for rank in self.ranks]
        return calls[0][0], calls[0][1]

    def save(self, folder: Path, info: CheckpointInfo) -> None:
        """Write a checkpoint; returns when it is whole on the disk."""
        self._call([rank.save.remote(folder, info) for rank in self.ranks], "checkpoint")

    def checksum(self) -> str:
        """Of the trainable weights as they are now."""
        return self._call([rank.checksum.remote() for rank in self.ranks], "checksum")[0]

    def _call(self, refs: list[ray.ObjectRef], phase: str) -> list[Any]:
        try:
            return ray.get(refs, timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise LearnerError(
                f"learner: '{phase}' did not end within {self._timeout_s:g} s "
                "(learner.timeout_s); a rank may hang in a collective, see the ranks' logs"
            ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError | RunError):
                raise error.cause from error
            raise LearnerError(
                f"learner: '{phase}' failed with {type(error.cause).__name__}: {error.cause} (the "
                "traceback is in the rank's log)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise LearnerError(f"learner: a rank died during '{phase}': {error}") from error
