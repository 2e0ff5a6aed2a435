"""Drawing what an evaluation lacks, with the roles that also train."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import ray
from torch import Tensor

from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.records import Records
from g2rpo_ray.evaluation.rows import Row
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.weights import receipt, trainable_parameters
from g2rpo_ray.rollout.answers import HeldoutDraw, HeldoutPictures
from g2rpo_ray.rollout.pool import RolloutPool
from g2rpo_ray.run.weights import weights_in
from g2rpo_ray.training.roles import Encoder
from g2rpo_ray.weight_sync import StoredWeights

PROMPTS_PER_WORKER = 8
"""Prompts drawn between two writes to the folder: what a kill can lose."""

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
"""Called with (done, total) in prompts; may raise to give up."""


@dataclass
class Drawing:
    """Draws every row's missing prompts, changing weights as seldom as it can."""

    config: Config
    encoder: Encoder
    pool: RolloutPool
    records: Records
    on_progress: OnProgress
    tell: Callable[[str], None] = print
    """Told of scores that are missing."""
    encoded: dict[int, ray.ObjectRef] = field(default_factory=dict)
    """Prompts by id, encoded once."""

    def run(self, rows: Sequence[Row], prompts: Sequence[tuple[int, str]]) -> None:
        """Draw all ``prompts`` (id, text) for all rows."""
        self._rows, self._prompts = rows, prompts
        self._pictures = self.config.evaluation.pictures_per_prompt
        self._held: Path | None = None
        self._version = 0
        self._report()
        for weights in dict.fromkeys(row.weights for row in rows):
            mine = [row for row in rows if row.weights == weights]
            for row in mine:
                if row.hybrid is None:
                    self._draw(row)
            self._draw_hybrids([row for row in mine if row.hybrid is not None])

    def _draw(self, row: Row) -> None:
        draw = HeldoutDraw(row.steps, self._pictures)
        for prompts in self._chunks(self._missing(row)):
            self._load(row.weights.checkpoint)
            self._keep(row, self.pool.evaluate(self._encode(prompts), self._report, draw))

    def _draw_hybrids(self, rows: Sequence[Row]) -> None:
        # All first parts, then all second parts: weights change twice, not with every prompt.
        latents: dict[str, list[ray.ObjectRef]] = {}
        for row in rows:
            if missing := self._missing(row):
                self._load(row.weights.checkpoint)
                draw = HeldoutDraw(row.steps, self._pictures, last=row.hybrid_switch)
                latents[row.name] = self.pool.walk(self._encode(missing), self._report, draw)
        for row in rows:
            if row.name in latents:
                self._load(None)
                draw = HeldoutDraw(row.steps, self._pictures, first=row.hybrid_switch)
                started = list(zip(self._missing(row), latents[row.name], strict=True))
                for chunk in self._chunks(started):
                    prompts, starts = zip(*chunk, strict=True)
                    encoded = self._encode(prompts)
                    self._keep(row, self.pool.evaluate(encoded, self._report, draw, starts))

    def _keep(self, row: Row, results: Sequence[HeldoutPictures]) -> None:
        self.records.add(row.name, results)
        for failure in (failure for result in results for failure in result.failures):
            self.tell(f"{row.name} lacks a score, the same command tries it again: {failure}")
        self._report()

    def _missing(self, row: Row) -> list[tuple[int, str]]:
        return [p for p in self._prompts if not self.records.has(row.name, p[0])]

    def _chunks(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        # All workers may be away at the moment, and come back.
        size = PROMPTS_PER_WORKER * max(1, len(self.pool.workers))
        for first in range(0, len(items), size):
            yield items[first : first + size]

    def _encode(self, prompts: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        new = [prompt for prompt in prompts if prompt[0] not in self.encoded]
        numbers = (number for number, _ in new)
        self.encoded |= zip(numbers, self.encoder.heldout(new), strict=True)
        return [self.encoded[number] for number, _ in prompts]

    def _load(self, checkpoint: Path | None) -> None:
        """Bring weights to every worker, verified; None is the base model, as at the start."""
        if checkpoint == self._held:
            return
        config = self.config
        tensors = weights_in(config, checkpoint) if checkpoint else base_weights(config)
        self._version += 1
        references = ray.put(receipt(self._version, tensors)), ray.put(tensors)
        timeout_s = config.weight_sync.timeout_s
        self.pool.sync(StoredWeights(self._version, *references, timeout_s).send)
        self._held = checkpoint

    def _report(self, *_: int) -> None:
        # What the pool says of its own part, done and total, is left out.
        total = len(self._rows) * len(self._prompts)
        missing = sum(len(self._missing(row)) for row in self._rows)
        self.on_progress(total - missing, total)


def base_weights(config: Config) -> dict[str, Tensor]:
    """The trainable weights as the model folder has them (fresh adapters change nothing)."""
    parameters = trainable_parameters(load_policy(config))
    return {name: parameter.detach() for name, parameter in parameters.items()}
