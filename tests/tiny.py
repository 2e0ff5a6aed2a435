"""The quickstart made small: settings, prompts, scores and groups for tests of every room."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, ModelSection, load_config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import negative_prompt
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import Prompt
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.sampling.group import RolloutGroup

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

CAPTIONS = [
    "a red circle left of a green triangle",
    "a blue square above a yellow circle",
    "a purple cross right of a red square",
    "a green triangle below a blue cross",
]

SMALL = [
    "sampling.steps=4",
    "sampling.members=4",
    "sampling.prompts_per_iteration=2",
    "g2rpo.sde_steps=[0, 1]",
    "learner.ranks=2",
    "learner.steps_per_pass=1",
    "evaluation.prompts=2",
    "evaluation.steps=3",
    "evaluation.pictures_shown=1",
    "tracking.tensorboard=false",
    "cluster.dashboard=false",
    "cluster.start_timeout_s=360",
]

ALONE = {"beside": None, "cpus_per_replica": 0.1}
"""Settings of one of the quickstart's rewards without the others."""


def tiny_config(run_dir: Path, *overrides: str) -> Config:
    """The quickstart's settings, small enough that an iteration takes a second."""
    return load_config(QUICKSTART, [f"run_dir={run_dir}", *SMALL, *overrides])


def copy_flux(target: Path) -> Path:
    """A copy of the tiny FLUX that a test may damage."""
    return Path(shutil.copytree(resolve_path("tiny_world:flux"), target))


def shallow_flux(target: Path) -> Path:
    """A copy of the tiny FLUX with one block of each kind instead of two."""
    if not target.exists():
        file = copy_flux(target) / "transformer" / "diffusion_pytorch_model.safetensors"
        second = ("transformer_blocks.1.", "single_transformer_blocks.1.")
        kept = {k: tensor for k, tensor in load_file(file).items() if not k.startswith(second)}
        save_file(kept, file, {"format": "pt"})
        config = file.with_name("config.json")
        values = json.loads(config.read_text()) | {"num_layers": 1, "num_single_layers": 1}
        config.write_text(json.dumps(values))
    return target


def reshard(folder: Path, stem: str) -> None:
    """Put the tensors of a folder's one file into two, with an index."""
    whole = folder / f"{stem}.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = [f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {tensor: names[place % 2] for place, tensor in enumerate(sorted(tensors))}
    for name in names:
        held = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
        save_file(held, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def encode(config: Config, captions: list[str] = CAPTIONS) -> list[Prompt]:
    """Prompts with their embeddings; ids are places in the list."""
    files = resolve_path(config.model.path).rglob("*.*")
    unread = {"lora", "trained_modules", "frozen_dtype", "share_frozen", "gradient_checkpointing"}
    embeds = _embeddings(
        config.model.model_dump_json(exclude=unread),
        config.prompts.max_sequence_length,
        negative_prompt(config),
        tuple(captions),
        max(file.stat().st_mtime_ns for file in files),
    )
    return [Prompt(number, *both) for number, both in enumerate(zip(captions, embeds, strict=True))]


@lru_cache
def _embeddings(
    model: str,
    length: int,
    negative: str | None,
    captions: tuple[str, ...],
    changed_ns: int,  # noqa: ARG001  a folder that was changed meanwhile is read again
) -> list[Conditioning]:
    """Loading text encoders is a quarter of what a test of a tiny network takes."""
    encoder = TextEncoder(ModelSection.model_validate_json(model), length, negative=negative)
    return [encoder.encode(text) for text in captions]


@dataclass(frozen=True)
class KnownScores:
    """Scores that are there already."""

    scores: dict[str, Tensor]
    failures: list[str] = field(default_factory=list)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    waiting_for: str = ""

    def result(self) -> dict[str, Tensor]:
        return self.scores


@dataclass(frozen=True)
class Redness:
    """A reward without Ray: how much red a picture has more than green and blue."""

    names: list[str]

    def submit(
        self,
        prompt_id: int,  # noqa: ARG002
        prompt: str,  # noqa: ARG002
        pictures: Tensor,
        names: list[str],
    ) -> KnownScores:
        red, green, blue = (pictures.float() / 255).mean(dim=(1, 2)).unbind(dim=-1)
        return KnownScores({name: red - (green + blue) / 2 for name in names})


def draw_groups(config: Config, prompts: list[Prompt]) -> list[RolloutGroup]:
    """One real rollout group of each prompt, as iteration 0 of a run has them."""
    worker = RolloutWorker(config, Redness(sorted(config.rewards)))
    return [worker.rollout(prompt, prompt.prompt_id, iteration=0)[1] for prompt in prompts]


def equal_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Same names and bits."""
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )
