"""Trains the small AutoencoderKL whose latents have FLUX's statistics."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from tiny_world.fitting import Fitted, Session, fit
from tiny_world.pictures import PictureSource, to_network, to_pictures
from tiny_world.support import half_precision, save_half
from tiny_world.world import World

SCALING, SHIFT = 0.3611, 0.1159  # FLUX.1's: (latent - SHIFT) * SCALING has about unit variance


@dataclass(frozen=True)
class AutoencoderEffort:
    steps: int
    batch: int
    learning_rate: float = 2e-3


def encode(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] to normalised latents, float32 [B, 16, H/8, W/8]."""
    latents = vae.encode(to_network(pictures)).latent_dist.mode()
    return (latents.float() - SHIFT) * SCALING


def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Normalised latents [B, 16, h, w] to pictures, uint8 [B, 8h, 8w, 3]."""
    return to_pictures(vae.decode(latents / SCALING + SHIFT).sample)


def train_autoencoder(
    world: World, folder: Path, effort: AutoencoderEffort, session: Session
) -> None:
    """Train the `vae` whose configuration lies in the folder, and write it there.

    Two terms beside the reconstruction error: the usual KL, very weak, and one that holds mean and
    spread of every latent channel at what FLUX's shift and scaling undo.
    """
    torch.manual_seed(session.seed)
    device = session.device
    source = PictureSource(device, session.seed, world)
    # FLUX's form: factor 8, 16 latent channels, no quantisation layers.
    vae = AutoencoderKL.from_config(AutoencoderKL.load_config(folder))
    vae = vae.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=effort.learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, effort.learning_rate, total_steps=effort.steps, pct_start=0.05
    )

    def batch_loss(half: bool) -> Tensor:
        values = to_network(source.draw(source.captions(effort.batch)))
        with half_precision(device, half):
            posterior = vae.encode(values).latent_dist
            decoded = vae.decode(posterior.sample()).sample.float()
        mean = (posterior.mean.float() - SHIFT) * SCALING
        log_var = posterior.logvar.float() + 2 * torch.tensor(SCALING).log()
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean()
        spread, centre = torch.std_mean(mean, dim=(0, 2, 3))
        statistics = (centre**2 + (spread - 1) ** 2).mean()
        error = F.mse_loss(decoded, values) + 0.2 * F.l1_loss(decoded, values)
        return error + 3e-5 * kl + 0.01 * statistics

    of = Fitted("vae", vae, optimizer, schedule, batch_loss, generators=[source.generator])
    fit(of, effort.steps, session)
    save_half(vae, folder)
