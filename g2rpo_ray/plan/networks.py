"""Sizes and floating-point operations of a run's networks, counted on PyTorch's meta device.

The networks are built by the classes that the run uses, without weights and without memory, and
their own forward pass is counted. So there is no formula that could get out of step with them.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, LoraSection, ModelSection
from g2rpo_ray.models.conditioning import PromptEmbeds
from g2rpo_ray.models.flux import VAE_FACTOR, FluxPolicy, LatentShape
from g2rpo_ray.models.loading import ModelFolderError
from g2rpo_ray.models.lora import add_lora, choose_trained

FLUX1_DEV_TRANSFORMER: dict[str, Any] = {
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
"""``transformer/config.json`` as published with FLUX.1-dev."""

FLUX1_DEV_VAE: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
"""``vae/config.json`` as published with FLUX.1-dev."""

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
    """A FLUX transformer with its VAE, at one picture size and text length."""

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
    """Double and single blocks."""
    tokens: int
    """Image and text tokens of one sample."""
    pixels: int
    evaluation: Operations
    """Adapters included."""
    decode: Operations

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
        ModelFolderError: the folder is there and its configuration cannot be used, or
            ``trained_modules`` or ``lora.target_modules`` names nothing in it.
    """
    transformer, vae, source = _architecture(config.model)
    lora, modules, sampling = config.model.lora, config.model.trained_modules, config.sampling
    try:
        return _count_policy(
            source,
            json.dumps(transformer),
            json.dumps(vae),
            lora.model_dump_json() if lora else None,
            tuple(modules) if modules is not None else None,
            (sampling.height, sampling.width),
            config.prompts.max_sequence_length,
        )
    except (TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise ModelFolderError(
            f"{source}: not the configuration of a FLUX model: {error}"
        ) from error


@lru_cache
def _count_policy(
    source: str,
    transformer_json: str,
    vae_json: str,
    lora_json: str | None,
    trained_modules: tuple[str, ...] | None,
    picture: tuple[int, int],
    text_tokens: int,
) -> PolicySize:
    """Build and count; by JSON, so that equal questions are answered once."""
    transformer = transformer_on_meta(json.loads(transformer_json))
    vae = vae_on_meta(json.loads(vae_json))
    parameters = count_parameters(transformer)
    shape = LatentShape.of_picture(*picture, transformer.config.in_channels)
    if lora_json is None:
        choose_trained(transformer, list(trained_modules) if trained_modules else None)
    else:
        with torch.device("meta"):
            add_lora(transformer, LoraSection.model_validate_json(lora_json), seed=0)
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    return PolicySize(
        source=source,
        parameters=parameters,
        trained_parameters=trained,
        frozen_parameters=count_parameters(transformer) - trained,
        vae_parameters=count_parameters(vae),
        width=transformer.inner_dim,
        blocks=transformer.config.num_layers + transformer.config.num_single_layers,
        tokens=shape.packed[0] + text_tokens,
        pixels=picture[0] * picture[1],
        evaluation=evaluation_operations(transformer, shape, text_tokens),
        decode=decode_operations(vae, *picture),
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


def transformer_on_meta(config: dict[str, Any]) -> FluxTransformer2DModel:
    """The transformer of a ``config.json``, without weights."""
    with torch.device("meta"):
        return FluxTransformer2DModel.from_config(config)


def vae_on_meta(config: dict[str, Any]) -> AutoencoderKL:
    """The VAE of a ``config.json``, without weights."""
    with torch.device("meta"):
        return AutoencoderKL.from_config(config)


def evaluation_operations(
    transformer: FluxTransformer2DModel, shape: LatentShape, text_tokens: int
) -> Operations:
    """Of one velocity prediction. Modulation is applied once a sample, not once a token."""
    policy, config = FluxPolicy(transformer, shape, guidance=1.0), transformer.config
    embeds = PromptEmbeds(
        torch.empty(text_tokens, config.joint_attention_dim, device="meta"),
        torch.empty(config.pooled_projection_dim, device="meta"),
    )
    latents = torch.empty(1, *shape.packed, device="meta")
    return count_operations(lambda: policy(latents, torch.empty(1, device="meta"), embeds))


def decode_operations(vae: AutoencoderKL, height: int, width: int) -> Operations:
    """Of one decoded picture."""
    latents = torch.empty(
        1, vae.config.latent_channels, height // VAE_FACTOR, width // VAE_FACTOR, device="meta"
    )
    return count_operations(lambda: vae.decode(latents, return_dict=False))


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


def _architecture(model: ModelSection) -> tuple[dict[str, Any], dict[str, Any], str]:
    folder = resolve_path(model.path)
    if not folder.is_dir():
        source = f"FLUX.1-dev's published architecture ({model.path} is not there yet)"
        return FLUX1_DEV_TRANSFORMER, FLUX1_DEV_VAE, source
    transformer, vae = (
        _read_part(folder / part / "config.json") for part in ("transformer", "vae")
    )
    return transformer, vae, model.path


def _read_part(path: Path) -> dict[str, Any]:
    return read_json_object(path, ModelFolderError)
