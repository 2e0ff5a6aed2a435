"""Sizes and floating-point operations of a run's networks, counted on PyTorch's meta device.

The networks are built by the classes that the run uses, without weights and without memory, and
their own forward pass is counted. So there is no formula that could get out of step with them.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.families import FAMILIES, check_guidance, latents_of, open_family
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.loading import on_meta
from g2rpo_ray.models.lora import add_lora, choose_trained
from g2rpo_ray.models.policy import Policy

TERA = 1e12


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one sample; a multiply-add counts as two."""

    matrix: float
    """Products with weights, convolutions included."""
    attention: float
    """The two products inside attention, which grow with the square of the tokens."""

    @property
    def tflop(self) -> float:
        return (self.matrix + self.attention) / TERA


@dataclass(frozen=True)
class PolicySize:
    """A transformer with its VAE, at one picture size and text length."""

    source: str
    """Where the architecture was read, in words."""
    parameters: int
    """Of the transformer without adapters."""
    trained_parameters: int
    frozen_parameters: int
    """Held and not trained: the base of a LoRA run, or what ``trained_modules`` leaves out."""
    vae_parameters: int
    width: int
    """Channels of the transformer's hidden states."""
    blocks: int
    """Blocks of the transformer."""
    tokens: int
    """Image and text tokens of one sample."""
    passes: int
    """Of the network, in one evaluation."""
    learner_passes: int
    """Of the network, for one latent in the learner: fewer with ``learner.unguided``."""
    pixels: int
    evaluation: Operations
    """All passes, adapters included."""
    decode: Operations

    @property
    def learner_tflop(self) -> float:
        """Of one latent's forward pass in the learner, adapters included."""
        return self.evaluation.tflop * self.learner_passes / self.passes

    @property
    def held_parameters(self) -> int:
        """Of the transformer, adapters included."""
        return self.trained_parameters + self.frozen_parameters


@dataclass(frozen=True)
class ScorerSize:
    """An open_clip model."""

    parameters: int
    image: Operations


def policy_size(config: Config) -> PolicySize:
    """Of ``config.model`` at ``config.sampling``'s picture size.

    Raises:
        ModelFolderError: the folder is there and its configuration cannot be used, it has no
            pictures of such a size or takes no such guidance, or ``trained_modules`` or
            ``lora.target_modules`` names nothing in it.
    """
    family, source = planned_family(config.model.path)
    latents_of(config, family)
    check_guidance(config, family)
    # Counting the largest models takes seconds: equal questions are answered once.
    asked = config.model_dump_json(include={"model", "sampling", "prompts", "learner"})
    key = type(family), source, json.dumps(family.configs), asked
    try:
        if key not in _COUNTED:
            _COUNTED[key] = _count_policy(family, source, config)
        return _COUNTED[key]
    except (TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise ModelFolderError(
            f"{source}: not the configuration of a model of {family.pipeline}: {error}"
        ) from error


def evaluation_tflop(_role: object, config: Config) -> float:
    """Of one evaluation; runs on an actor, through ``__ray_call__``, that has the libraries."""
    return policy_size(config).evaluation.tflop


def planned_family(path: str) -> tuple[Family, str]:
    """The family of ``model.path`` and, in words, where its architecture was read.

    While the folder is not there, that of the published model of its name, or of the first one.
    """
    folder = resolve_path(path)
    if folder.is_dir():
        return open_family(folder), path
    known = {name: family for family in FAMILIES for name in family.published}
    name = folder.name if folder.name in known else next(iter(known))
    family = known[name](known[name].published[name].configs)
    return family, f"{name}'s published architecture ({path} is not there yet)"


_COUNTED: dict[tuple[type[Family], str, str, str], PolicySize] = {}


def _count_policy(family: Family, source: str, config: Config) -> PolicySize:
    sampling, text_tokens = config.sampling, config.prompts.max_sequence_length
    transformer, vae = on_meta(family, "transformer"), on_meta(family, "vae")
    parameters = count_parameters(transformer)
    if config.model.lora is None:
        choose_trained(transformer, config.model.trained_modules)
    else:
        with torch.device("meta"):
            add_lora(transformer, config.model.lora, family, seed=0)
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    latents = latents_of(config, family)
    policy = Policy(family, transformer, latents, sampling.guidance)
    return PolicySize(
        source=source,
        parameters=parameters,
        trained_parameters=trained,
        frozen_parameters=count_parameters(transformer) - trained,
        vae_parameters=count_parameters(vae),
        width=family.width(transformer),
        blocks=len(policy.blocks()),
        tokens=family.tokens(latents, text_tokens),
        passes=family.passes(sampling.guidance),
        learner_passes=1 if config.learner.unguided else family.passes(sampling.guidance),
        pixels=sampling.height * sampling.width,
        evaluation=evaluation_operations(policy, text_tokens),
        decode=decode_operations(family, vae, latents),
    )


@lru_cache
def scorer_size(architecture: str) -> ScorerSize:
    """Of an open_clip model by name or ``local-dir:FOLDER``.

    Raises:
        ScorerError: open_clip knows no such name, or the folder holds no model.
    """
    import open_clip

    from g2rpo_ray.rewards.scorers.open_clip_model import resolve_architecture

    name = resolve_architecture(architecture)
    # open_clip warns that the model has no weights; here that is the point.
    logging.disable(logging.WARNING)
    try:
        with torch.device("meta"):
            model = open_clip.create_model(name, load_weights=False, device="meta")
    finally:
        logging.disable(logging.NOTSET)
    side = model.visual.image_size
    height, width = side if isinstance(side, tuple) else (side, side)
    pictures = torch.empty(1, 3, height, width, device="meta")
    return ScorerSize(
        count_parameters(model), count_operations(lambda: model.encode_image(pictures))
    )


def evaluation_operations(policy: Policy, text_tokens: int) -> Operations:
    """Of one velocity prediction. Modulation is applied once a sample, not once a token."""
    embeds = policy.blank(text_tokens, torch.float32, "meta")
    latents = torch.empty(1, *policy.shape.packed, device="meta")
    sigma = torch.empty(1, device="meta")
    return count_operations(lambda: policy(latents, sigma, embeds))


def decode_operations(family: Family, vae: Any, latents: LatentShape) -> Operations:
    """Of one decoded picture."""
    x = torch.empty(1, *latents.packed, device="meta")
    return count_operations(lambda: family.decode(vae, x, latents))


def count_operations(run: Callable[[], object]) -> Operations:
    """Of whatever ``run`` computes on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    total = counter.get_total_flops()
    # On the meta device attention is two batched products; a Linear layer never is one.
    attention = counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)
    return Operations(matrix=total - attention, attention=attention)


def count_parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
