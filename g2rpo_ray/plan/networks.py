"""Sizes, operations and memory of a run's networks, counted on PyTorch's meta device.

The networks are built by the classes that the run uses, without weights and without memory, and
their own forward pass is counted. So there is no formula that could get out of step with them.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.families import FAMILIES, check_settings, latents_of, open_family
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.fp8 import twin_bytes
from g2rpo_ray.models.frozen_float8 import block_linears
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.loading import DTYPES, on_meta
from g2rpo_ray.models.lora import add_lora, choose_trained
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.plan.counting import Operations, count_bytes, count_operations

Counted = TypeVar("Counted")


@dataclass(frozen=True)
class PolicySize:
    """A transformer with its VAE, at one picture size and text length."""

    source: str
    """Where the architecture was read, in words."""
    parameters: int
    """Of the transformer without adapters."""
    trained_parameters: int
    trained_tensors: int
    frozen_parameters: int
    """Held and not trained: the base of a LoRA run, or what ``trained_modules`` leaves out."""
    buffer_bytes: int
    """Of the transformer's tables, such as places."""
    rounded_parameters: int
    """Of those, how many are kept in 8 bits."""
    rounded_channels: int
    """Output channels of these weights, which have a scale each."""
    float8_bytes: int
    """Of the copy that ``rollout.fp8`` multiplies with."""
    widest_parameters: int
    """Of the largest of these weights."""
    vae_parameters: int
    passes: int
    """Of the network, in one evaluation."""
    learner_passes: int
    """Of the network, for one latent in the learner: fewer with ``learner.unguided``."""
    evaluation: Operations
    """All passes, adapters included."""
    decode: Operations

    @property
    def learner_tflop(self) -> float:
        """Of one latent's forward pass in the learner, adapters included."""
        return self.evaluation.tflop * self.learner_passes / self.passes

    def frozen_bytes(self, width: int) -> int:
        """Of the frozen weights, where a number of the run's dtype takes ``width`` bytes."""
        whole = self.frozen_parameters - self.rounded_parameters + self.rounded_channels
        return whole * width + self.rounded_parameters

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
    return _once(_count_policy, config)


def learner_bytes(config: Config) -> int:
    """Most that a forward and backward pass over one latent holds, beyond weights and gradients.

    Raises:
        ModelFolderError: as of ``policy_size``.
    """
    return _once(_count_learner, config)


def _once(count: Callable[[Family, str, Config], Counted], config: Config) -> Counted:
    """Counting the largest models takes seconds: equal questions are answered once."""
    family, source = planned_family(config.model.path)
    latents_of(config, family)
    check_settings(config, family)
    asked = config.model_dump_json(include=READ)
    key = count, type(family), source, json.dumps(family.configs), asked
    try:
        if key not in _COUNTED:
            _COUNTED[key] = count(family, source, config)
        found: Counted = _COUNTED[key]
    except (TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise ModelFolderError(
            f"{source}: not the configuration of a model of {family.pipeline}: {error}"
        ) from error
    return found


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


READ: dict[str, set[str]] = {
    "model": {"dtype", "frozen_dtype", "lora", "trained_modules", "gradient_checkpointing"},
    "sampling": {"height", "width", "guidance"},
    "prompts": {"max_sequence_length"},
    "learner": {"unguided"},
}
"""Settings that a count depends on, beside the network's own."""
_COUNTED: dict[tuple[Any, ...], Any] = {}


def _meta_policy(family: Family, config: Config, guidance: float) -> Policy:
    """The run's, adapters included, on the meta device in its dtype."""
    transformer = on_meta(family, "transformer")
    if config.model.lora is None:
        choose_trained(transformer, config.model.trained_modules)
    else:
        with torch.device("meta"):
            add_lora(transformer, config.model.lora, family, seed=0)
    # Its own ``to`` warns of what is the loader's to do.
    torch.nn.Module.to(transformer, DTYPES[config.model.dtype])
    return Policy(family, transformer, latents_of(config, family), guidance)


def _count_policy(family: Family, source: str, config: Config) -> PolicySize:
    guidance, dtype = config.sampling.guidance, DTYPES[config.model.dtype]
    policy, vae = _meta_policy(family, config, guidance), on_meta(family, "vae")
    torch.nn.Module.to(vae, dtype)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    adapters = trained if config.model.lora else 0
    rounded: list[torch.Tensor] = []
    if config.model.frozen_dtype is not None:
        linears = block_linears(on_meta(family, "transformer"), family.blocks)
        rounded = [linear.weight for *_, linear in linears]
    return PolicySize(
        source=source,
        parameters=count_parameters(policy) - adapters,
        trained_parameters=trained,
        trained_tensors=sum(p.requires_grad for p in policy.parameters()),
        frozen_parameters=count_parameters(policy) - trained,
        buffer_bytes=sum(b.nbytes for b in policy.buffers()),
        rounded_parameters=sum(weight.numel() for weight in rounded),
        rounded_channels=sum(len(weight) for weight in rounded),
        float8_bytes=twin_bytes(policy),
        widest_parameters=max((weight.numel() for weight in rounded), default=0),
        vae_parameters=count_parameters(vae),
        passes=family.passes(guidance),
        learner_passes=1 if config.learner.unguided else family.passes(guidance),
        evaluation=evaluation_operations(policy, config.prompts.max_sequence_length, dtype),
        decode=decode_operations(family, vae, policy.shape),
    )


def _count_learner(family: Family, _: str, config: Config) -> int:
    guidance = family.unguided if config.learner.unguided else config.sampling.guidance
    policy = _meta_policy(family, config, guidance)
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget)

    def run() -> None:
        length, dtype = config.prompts.max_sequence_length, DTYPES[config.model.dtype]
        torch.autograd.backward(_velocity(policy, length, dtype).square().mean())

    return count_bytes(run)


def _forget(parameter: torch.Tensor) -> None:
    """Gradients are counted by themselves."""
    parameter.grad = None


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


def evaluation_operations(
    policy: Policy, text_tokens: int, dtype: torch.dtype = torch.float32
) -> Operations:
    """Of one velocity prediction. Modulation is applied once a sample, not once a token."""
    return count_operations(lambda: _velocity(policy, text_tokens, dtype))


def _velocity(policy: Policy, text_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    embeds = policy.blank(text_tokens, dtype, "meta")
    latents = torch.empty(1, *policy.shape.packed, device="meta")
    velocity: torch.Tensor = policy(latents, torch.empty(1, device="meta"), embeds)
    return velocity


def decode_operations(family: Family, vae: Any, latents: LatentShape) -> Operations:
    """Of one decoded picture."""
    x = torch.empty(1, *latents.packed, device="meta")
    return count_operations(lambda: family.decode(vae, x, latents))


def count_parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
