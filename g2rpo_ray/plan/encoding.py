"""What encoding prompts takes: those of an iteration, and the held-out ones once a run."""

import math
from dataclasses import dataclass

from g2rpo_ray.common.formatting import format_seconds
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, ModelSection
from g2rpo_ray.models.families import FAMILIES, open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import is_network, part_weights
from g2rpo_ray.plan.costs import CPU, CostTable
from g2rpo_ray.prompts.dataset import embeddings_of

NOT_MULTIPLIED = ("embed", "shared", "lm_head", "visual", "vision", "projector")
"""In names of a text encoder's tensors: tables that are looked up, and what only pictures pass."""


@dataclass(frozen=True)
class Encoding:
    """Prompts to encode, and for how long."""

    training: int
    """Prompts an iteration; 0 where they were embedded before."""
    heldout: int
    """Prompts, once a run; likewise."""
    prompt_s: float
    device: str
    """Where, in words."""

    @property
    def training_s(self) -> float:
        """Of an iteration."""
        return self.training * self.prompt_s

    @property
    def heldout_s(self) -> float:
        """Of a run."""
        return self.heldout * self.prompt_s

    def __str__(self) -> str:
        if not self.training + self.heldout:
            return "none: all prompts were embedded before"
        return (
            f"{self.training} prompts an iteration ({format_seconds(self.training_s)}) and "
            f"{self.heldout} held-out ones once a run ({format_seconds(self.heldout_s)}), "
            f"{format_seconds(self.prompt_s)} each on {self.device}"
        )

    def warning(self, iteration_s: float) -> str | None:
        """Where it takes longer than an iteration, and what to do."""
        slow = []
        if self.training_s > iteration_s:
            slow.append(f"every iteration waits {format_seconds(self.training_s)} for its prompts")
        if self.heldout_s > iteration_s:
            slow.append(f"the first evaluation waits {format_seconds(self.heldout_s)} for its own")
        if not slow:
            return None
        return (
            f"encoding takes longer than an iteration ({format_seconds(iteration_s)}): "
            f"{', and '.join(slow)}. Embed both files before the run (g2rpo embed "
            "--gpus-per-worker 1), or set prompts.encoder_gpus or prompts.encoder_threads"
        )


def plan_encoding(config: Config, table: CostTable, card: str) -> Encoding | None:
    """None where the sizes of the text encoders are not known.

    Two operations a parameter and token, at the speed of a large matrix product: attention is left
    out, and texts count as filled up to ``prompts.max_sequence_length``.
    """
    prompts, parameters = config.prompts, text_parameters(config.model)
    if parameters is None:
        return None
    threads, on_card = config.encoder_threads, prompts.encoder_gpus > 0
    flop = 2.0 * parameters * prompts.max_sequence_length
    seconds = table.of(card if on_card else CPU).rate("matrix").time_s(flop)
    return Encoding(
        0 if embeddings_of(config, prompts.train) else config.sampling.prompts_per_iteration,
        0 if embeddings_of(config, prompts.heldout) else config.evaluation.prompts,
        seconds if on_card else seconds / threads,
        card if on_card else f"{threads} thread(s) of the CPU (prompts.encoder_threads)",
    )


def text_parameters(model: ModelSection) -> int | None:
    """Of the text encoders, without ``NOT_MULTIPLIED``; of the published model of the folder's name
    while there is no such folder, or None."""
    folder = resolve_path(model.path)
    if not folder.is_dir():
        published = (family.published.get(folder.name) for family in FAMILIES)
        return next((found.text_parameters for found in published if found), None)
    try:
        parts = [part for part in open_family(folder).encoder_parts if is_network(part)]
        places = {name: it for part in parts for name, it in part_weights(model, part).items()}
    except ModelFolderError:
        # Planned from its configuration alone, before the weights are there.
        return None
    return sum(
        math.prod(place.shape)
        for name, place in places.items()
        if not any(word in name for word in NOT_MULTIPLIED)
    )
