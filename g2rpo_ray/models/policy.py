"""The policy: the ONE function that predicts velocities, for rollout and learner alike.

Timestep, guidance, ids and dtype are decided here and in the model's family, and nowhere else: the
importance ratio before the first update is 1 only if both sides call the network in the same way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo_ray.common.device import compute_the_same_bits
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import latents_of, open_family
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.loading import DTYPES, load_part
from g2rpo_ray.models.lora import add_lora, choose_trained

Load = Callable[..., Any]
"""``load_part``, or what gives the same network from elsewhere."""


class Policy(nn.Module):
    """A transformer seen as ``velocity(latents, sigma, prompt)``."""

    def __init__(
        self,
        family: Family,
        transformer: Any,
        shape: LatentShape,
        guidance: float,
        truncate_timesteps: bool = False,
    ) -> None:
        """
        Args:
            transformer: the network, on its device and in its compute dtype.
            truncate_timesteps: use ``int(sigma * 1000) / 1000`` as published code does.
        """
        super().__init__()
        self.family = family
        self.transformer = transformer
        self.shape = shape
        self.guidance = guidance
        self.truncate_timesteps = truncate_timesteps

    def forward(self, latents: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        """Velocity of every latent; all of them belong to one prompt.

        Args:
            latents: float32 ``[B, tokens, channels]``.
            sigma: float32 ``[B]``; a batch may mix noise levels.
            embeds: of the prompt; expanded to the batch without a copy.

        Returns:
            float32 ``[B, tokens, channels]``.
        """
        if self.truncate_timesteps:
            sigma = (sigma * 1000).trunc() / 1000
        return self.family.velocity(
            self.transformer, latents, sigma, embeds, self.guidance, self.shape
        )

    def blank(self, length: int, dtype: torch.dtype, device: torch.device | str) -> Conditioning:
        """Zeros in the shapes of a prompt's conditioning, see ``Family.blank``; with those of a
        negative prompt where an evaluation takes both."""
        blank = self.family.blank(self.transformer, length, dtype, device)
        two = self.family.passes(self.guidance) == 2
        return replace(blank, negative=blank) if two else blank

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The transformer's repeated blocks, by their names in the policy."""
        wanted = self.family.blocks
        return [(name, m) for name, m in self.named_modules() if type(m).__name__ in wanted]


def load_policy(
    config: Config,
    device: torch.device | str = "cpu",
    *,
    guided: bool = True,
    load: Load = load_part,
) -> Policy:
    """The policy of ``config.model``, with fresh LoRA adapters where it asks for them.

    Adapters start from the run's seed, so every role builds the same ones.

    Args:
        guided: by ``sampling.guidance``; else the conditional pass alone.
        load: gives the transformer, whose weights are only read where adapters are trained.

    Raises:
        ModelFolderError: the transformer cannot be loaded, or takes other latents than the VAE's.
    """
    family = open_family(resolve_path(config.model.path))
    shape = latents_of(config, family)
    # On an H100 (torch 2.11) cuDNN's attention ended learner passes in an illegal memory access;
    # both sides of the ratio use the same kernels, so it is off for both.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if config.model.deterministic:
        compute_the_same_bits()
    transformer = load(config.model, "transformer", DTYPES[config.model.dtype], device)
    if config.model.lora is None:
        choose_trained(transformer, config.model.trained_modules)
    else:
        add_lora(transformer, config.model.lora, family, seed=config.seed)
    if config.model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    guidance = config.sampling.guidance if guided else family.unguided
    return Policy(family, transformer, shape, guidance, config.model.truncate_timesteps)
