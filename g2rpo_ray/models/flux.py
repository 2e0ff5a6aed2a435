"""The FLUX policy: the ONE function that predicts velocities, for rollout and learner alike.

Timestep, guidance, ids and dtype are decided here and nowhere else: the importance ratio before
the first update is 1 only if both sides call the network in the same way.
"""

from dataclasses import dataclass

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import PromptEmbeds
from g2rpo_ray.models.loading import DTYPES, load_part, packed_channels
from g2rpo_ray.models.lora import add_lora, choose_trained

VAE_FACTOR = 8
"""Pixels to latents; FLUX then packs 2 x 2 latents into one token."""


@dataclass(frozen=True)
class LatentShape:
    """Size of a picture in packed latents."""

    height: int
    """Rows of tokens: picture height / 16."""
    width: int
    """Columns of tokens: picture width / 16."""
    channels: int
    """Channels of a token: 64 for FLUX (16 latent channels x 2 x 2)."""

    @classmethod
    def of_picture(cls, height: int, width: int, channels: int) -> "LatentShape":
        return cls(height // (2 * VAE_FACTOR), width // (2 * VAE_FACTOR), channels)

    @property
    def packed(self) -> tuple[int, int]:
        """(tokens, channels) of one sample."""
        return self.height * self.width, self.channels

    @property
    def picture(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.height * 2 * VAE_FACTOR, self.width * 2 * VAE_FACTOR

    def image_ids(self) -> Tensor:
        """float32 ``[tokens, 3]``: (0, row, column) of every token, for the rotary embedding."""
        rows = torch.arange(self.height).repeat_interleave(self.width)
        columns = torch.arange(self.width).repeat(self.height)
        return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).float()


class FluxPolicy(nn.Module):
    """A FLUX transformer seen as ``velocity(latents, sigma, prompt)``."""

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        shape: LatentShape,
        guidance: float,
        truncate_timesteps: bool = False,
    ) -> None:
        """
        Args:
            transformer: the network, on its device and in its compute dtype.
            shape: of the latents.
            guidance: value for the distilled guidance embedding, where the model has one.
            truncate_timesteps: use ``int(sigma * 1000) / 1000`` as published code does.
        """
        super().__init__()
        self.transformer = transformer
        self.shape = shape
        self.guidance = guidance if transformer.config.guidance_embeds else None
        self.truncate_timesteps = truncate_timesteps
        self._ids: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def forward(self, latents: Tensor, sigma: Tensor, embeds: PromptEmbeds) -> Tensor:
        """Velocity of every latent; all of them belong to one prompt.

        Args:
            latents: float32 ``[B, tokens, channels]``.
            sigma: float32 ``[B]``; a batch may mix noise levels.
            embeds: of the prompt; expanded to the batch without a copy.

        Returns:
            float32 ``[B, tokens, channels]``.
        """
        batch, device = len(latents), latents.device
        dtype = embeds.t5.dtype
        if self.truncate_timesteps:
            sigma = (sigma * 1000).trunc() / 1000
        image_ids, text_ids = self._position_ids(device, text_tokens=len(embeds.t5))
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma,
            guidance=None
            if self.guidance is None
            else torch.full((batch,), self.guidance, device=device, dtype=torch.float32),
            pooled_projections=embeds.pooled.expand(batch, -1),
            encoder_hidden_states=embeds.t5.expand(batch, -1, -1),
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return velocity.float()

    def _position_ids(self, device: torch.device, text_tokens: int) -> tuple[Tensor, Tensor]:
        # Not buffers: a cast of the module to bfloat16 must not round positions.
        key = (device, text_tokens)
        if key not in self._ids:
            text_ids = torch.zeros(text_tokens, 3, device=device)
            self._ids[key] = (self.shape.image_ids().to(device), text_ids)
        return self._ids[key]


def load_policy(config: Config, device: torch.device | str = "cpu") -> FluxPolicy:
    """The policy of ``config.model``, with fresh LoRA adapters where it asks for them.

    Adapters start from the run's seed, so every role builds the same ones.

    Raises:
        ModelFolderError: the transformer cannot be loaded, or takes other latents than the VAE's.
    """
    channels = packed_channels(resolve_path(config.model.path))
    # On an H100 (torch 2.11) cuDNN's attention ended learner passes in an illegal memory access;
    # both sides of the ratio use the same kernels, so it is off for both.
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformer = load_part(config.model, "transformer", DTYPES[config.model.dtype], device)
    if config.model.lora is None:
        choose_trained(transformer, config.model.trained_modules)
    else:
        add_lora(transformer, config.model.lora, seed=config.seed)
    if config.model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    sampling = config.sampling
    shape = LatentShape.of_picture(sampling.height, sampling.width, channels)
    return FluxPolicy(transformer, shape, sampling.guidance, config.model.truncate_timesteps)


def unpack_latents(packed: Tensor, shape: LatentShape) -> Tensor:
    """``[B, tokens, channels]`` -> ``[B, channels / 4, 2 * height, 2 * width]`` for the VAE."""
    height, width = shape.picture
    latents: Tensor = FluxPipeline._unpack_latents(packed, height, width, VAE_FACTOR)
    return latents
