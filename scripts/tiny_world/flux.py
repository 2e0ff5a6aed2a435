"""Trains the small FLUX with its text encoders, and stops while it still has much to learn."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from g2rpo_ray.maths.schedule import static_shift_schedule
from tiny_world.autoencoder import decode, encode
from tiny_world.fitting import Fitted, Session, fit
from tiny_world.pictures import PictureSource
from tiny_world.support import half_precision, save_half
from tiny_world.world import World

TIME_SHIFT = 3.0
GUIDANCE = 3.5
WEAK = 0.6
MEASURED, MEASURED_STEPS = 128, 16
"""Held-out captions, a picture each, and the steps that it is drawn in."""
TRAINED = ("transformer", "text_encoder", "text_encoder_2")


@dataclass(frozen=True)
class FluxEffort:
    steps: int  # few on purpose: reinforcement learning needs room to rise
    batch: int
    bank: int  # encoded pictures a caption
    weak_steps: int = 0  # when the weak model is kept; at most `steps`
    target: float = 1.0  # the oracle at which training ends, measured every so many steps
    measured_every: int = 0  # the weak model is then the last below WEAK of the target
    learning_rate: float = 1.5e-3
    ema: float = 0.99
    compiled: bool = False


class TinyFlux(nn.Module):
    """The transformer and both text encoders of a folder's sizes, called with token ids."""

    def __init__(self, flux: Path) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(CLIPTextConfig.from_pretrained(flux / "text_encoder"))
        self.text_encoder_2 = T5EncoderModel(T5Config.from_pretrained(flux / "text_encoder_2"))
        sizes = FluxTransformer2DModel.load_config(flux / "transformer")
        self.transformer = FluxTransformer2DModel.from_config(sizes)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """T5 states [B, L, D] and CLIP's pooled state [B, D]."""
        of_clip = self.text_encoder.config.max_position_embeddings
        t5, clip = tokens.split((tokens.shape[1] - of_clip, of_clip), dim=1)
        states = self.text_encoder_2(t5).last_hidden_state
        return states, self.text_encoder(clip).pooler_output

    def velocity(
        self, packed: Tensor, sigma: Tensor, guidance: Tensor, states: Tensor, pooled: Tensor
    ) -> Tensor:
        """noise - x0 as the model sees it at latents [B, n x n, 64]; sigma and guidance are [B]."""
        # (0, row, column) of each of the n x n patches.
        axis = torch.arange(float(math.isqrt(packed.shape[1])))
        image_ids = torch.cartesian_prod(torch.zeros(1), axis, axis)
        return self.transformer(
            hidden_states=packed,
            timestep=sigma,
            guidance=guidance,
            encoder_hidden_states=states,
            pooled_projections=pooled,
            txt_ids=torch.zeros(states.shape[1], 3, device=packed.device),
            img_ids=image_ids.to(packed.device),
            return_dict=False,
        )[0]


def pack(latents: Tensor) -> Tensor:
    """[B, 16, h, w] to FLUX's 2 x 2 patches, [B, h/2 x w/2, 64]."""
    return F.unfold(latents, 2, stride=2).mT


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    side = 2 * math.isqrt(packed.shape[1])
    return F.fold(packed.mT, (side, side), 2, stride=2)


def caption_tokens(flux: Path, captions: list[str], device: torch.device) -> Tensor:
    """Token ids of T5 and of CLIP side by side, int64 [B, 10 + 12]; more in a larger world."""
    tokenizers = [
        T5Tokenizer.from_pretrained(flux / "tokenizer_2"),
        CLIPTokenizer.from_pretrained(flux / "tokenizer"),
    ]
    ids = [tokenizer(captions, padding="max_length")["input_ids"] for tokenizer in tokenizers]
    return torch.cat([torch.tensor(each) for each in ids], dim=1).to(device)


@torch.no_grad()
def generate(model: TinyFlux, vae: AutoencoderKL, tokens: Tensor, steps: int, seed: int) -> Tensor:
    """Euler pictures of the captions, uint8 [B, H, W, 3] on the CPU, noise from the seed."""
    device, side = tokens.device, vae.config.sample_size // 8
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(tokens), 16, side, side, generator=generator)
    pictures = []
    for rows in torch.arange(len(noise)).split(512):
        states, pooled = model.embed(tokens[rows.to(device)])
        latents = pack(noise[rows]).to(device)
        guidance = torch.full((len(rows),), GUIDANCE, device=device)
        sigmas = static_shift_schedule(steps, TIME_SHIFT).tolist()
        for sigma, following in itertools.pairwise(sigmas):
            at = torch.full((len(rows),), sigma, device=device)
            velocity = model.velocity(latents, at, guidance, states, pooled)
            latents = latents + (following - sigma) * velocity
        pictures.append(decode(vae, unpack(latents)).cpu())
    return torch.cat(pictures)


@torch.no_grad()
def finish(
    model: TinyFlux, vae: AutoencoderKL, tokens: Tensor, pictures: Tensor, sigma: Tensor
) -> Tensor:
    """Noise pictures up to a time of their own and let the model finish them in three steps.

    A good model at a small time gives the picture back in the model's own hand; a bad one at a
    large time spoils it as models do.

    Args:
        pictures: uint8 [B, H, W, 3] on the device.
        sigma: float32 [B] in (0, 1) on the device.
    """
    states, pooled = model.embed(tokens)
    x0 = pack(encode(vae, pictures))
    latents = torch.lerp(x0, torch.randn_like(x0), sigma[:, None, None])
    guidance = torch.full_like(sigma, GUIDANCE)
    for step in range(3):
        velocity = model.velocity(latents, sigma * (1 - step / 3), guidance, states, pooled)
        latents = latents - (sigma / 3)[:, None, None] * velocity
    return decode(vae, unpack(latents))


@torch.no_grad()
def _latent_bank(vae: AutoencoderKL, source: PictureSource, per_caption: int) -> Tensor:
    """Packed latents of drawn pictures, float16 [per_caption, C, tokens, 64] on the device."""
    parts = torch.arange(len(source.world.codes)).split(960)
    return torch.stack(
        [
            torch.cat([pack(encode(vae, source.draw(part))).half() for part in parts])
            for _ in range(per_caption)
        ]
    )


def train_flux(world: World, folder: Path, effort: FluxEffort, session: Session) -> TinyFlux:
    """Train on all captions and write the parts of the FLUX folder beside its `vae`.

    Times are uniform before the shift, so they fall as densely as a shift-3 schedule walks them.
    The guidance input is random and means nothing: a sampler may set any value from 1 to 6.

    Returns:
        An earlier, worse model in half precision's numbers, whose pictures lose against drawn ones.
    """
    weak = TinyFlux(folder)
    torch.manual_seed(session.seed)
    device = session.device
    vae = AutoencoderKL.from_pretrained(folder / "vae").to(device).eval()
    source = PictureSource(device, session.seed, world)
    bank = _latent_bank(vae, source, effort.bank)
    tokens = caption_tokens(folder, world.captions, device)
    model = TinyFlux(folder).to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(effort.ema))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=effort.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, 1.0, total_iters=100)

    def batch_loss(half: bool) -> Tensor:
        captions = torch.randint(len(tokens), (effort.batch,), device=device)
        x0 = bank[torch.randint(effort.bank, (effort.batch,), device=device), captions].float()
        noise = torch.randn_like(x0)
        # Stratified: the batch covers the time evenly, which steadies the loss.
        uniform = (torch.arange(effort.batch, device=device) + torch.rand_like(x0[:, 0, 0])) / (
            effort.batch
        )
        sigma = TIME_SHIFT * uniform / (1 + (TIME_SHIFT - 1) * uniform)
        guidance = 1 + 5 * torch.rand_like(sigma)
        noisy = torch.lerp(x0, noise, sigma[:, None, None])
        with half_precision(device, half):
            states, pooled = model.embed(tokens[captions])
            velocity = model.velocity(noisy, sigma, guidance, states, pooled)
        return F.mse_loss(velocity.float(), noise - x0)

    asked = world.heldout[:MEASURED]
    asked_tokens = caption_tokens(folder, asked, device)

    def after_step(step: int) -> bool:
        average.update_parameters(model)
        if step + 1 == effort.weak_steps:
            weak.load_state_dict(average.module.state_dict())
        if not effort.measured_every or (step + 1) % effort.measured_every:
            return False
        now = cast(TinyFlux, average.module)
        pictures = generate(now, vae, asked_tokens, MEASURED_STEPS, seed=776)
        oracle = float(world.check(pictures.numpy(), asked).mean())
        print(f"flux after step {step}: oracle {oracle:.3f}", flush=True)
        if oracle < WEAK * effort.target:
            weak.load_state_dict(average.module.state_dict())
        return oracle >= effort.target

    of = Fitted(
        "flux", model, optimizer, warm_up, batch_loss, after_step,
        kept={"average": average, "weak": weak},
        compiled=model.transformer if effort.compiled else None,
    )  # fmt: skip
    fit(of, effort.steps, session)
    for part in TRAINED:
        save_half(getattr(average.module, part), folder / part)
    return weak.half().float().to(device).eval()


def load_flux(folder: Path, device: torch.device) -> tuple[TinyFlux, AutoencoderKL]:
    """The model and the VAE as a user would get them from the written folder, in float32."""
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    model = TinyFlux(folder)
    for part in TRAINED:
        setattr(model, part, getattr(pipeline, part))
    return model.to(device).eval(), pipeline.vae.to(device).eval()
