"""How Z-Image is called: its latents, text, network and VAE."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family, GuidanceKind, of_qkv, read_published
from g2rpo_ray.models.latents import LatentShape


class ZImage(Family):
    """Latents are the VAE's, one a token here; the network packs 2 x 2 of them itself.

    It fills text up to multiples of 32 tokens with a learned token that takes part, and counts the
    picture's places from there on: another length is another result, so texts keep theirs.
    """

    pipeline = "ZImagePipeline"
    parts: ClassVar = {
        "transformer": "ZImageTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "Qwen3ForCausalLM",
        "tokenizer": "Qwen2Tokenizer",
    }
    blocks = ("ZImageTransformerBlock",)
    text_varies = True
    lora_targets = (
        "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
        "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    )  # fmt: skip
    joined: ClassVar = {
        f"{blocks}.{{}}.{theirs}": tuple(f"{blocks}.{{}}.{layer}" for layer in ours)
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for theirs, ours in {
            "attention.qkv": of_qkv("attention.to_*"),
            "attention.out": ("attention.to_out.0",),
            "feed_forward.w1": ("feed_forward.w1",),
            "feed_forward.w2": ("feed_forward.w2",),
            "feed_forward.w3": ("feed_forward.w3",),
        }.items()
    }
    multiple_of = 16
    unguided = 0.0
    published: ClassVar = read_published(__file__)

    def problem(self, folder: Path) -> str | None:
        taken, latent = self.configs["transformer"].get("in_channels", 16), self._vae_channels
        return self.channels_problem(folder, taken, taken, latent, latent)

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "cfg"

    def latents(self, height: int, width: int, frames: int = 1) -> LatentShape:
        return LatentShape(height // 8, width // 8, self._vae_channels, frames)

    def schedule(self, steps: int, latents: LatentShape) -> Tensor:
        return self.own_schedule(steps, tokens=latents.packed[0] // 4)

    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        embeds, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return Conditioning({"text": embeds[0]})

    def blank(
        self, transformer: Any, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> Conditioning:
        width = transformer.config.cap_feat_dim
        return Conditioning({"text": torch.zeros(length, width, dtype=dtype, device=device)})

    def velocity(
        self,
        transformer: Any,
        x: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        guidance: float,
        latents: LatentShape,
    ) -> Tensor:
        text, passes = conditioning["text"], self.passes(guidance)
        texts = [text] * len(x)
        if passes == 2:
            texts += [conditioning.opposite["text"]] * len(x)
        pictures = x.to(text.dtype).transpose(1, 2)
        pictures = pictures.unflatten(2, (1, latents.height, latents.width))
        answers = transformer(
            list(pictures.repeat(passes, 1, 1, 1, 1)),
            # Not cast, as in the pipeline: the network's embedding is in float32.
            ((1000 - sigma * 1000) / 1000).repeat(passes),
            texts,
            return_dict=False,
        )[0]
        # From noise to picture.
        towards = torch.stack(answers).float().flatten(2).transpose(1, 2)
        if passes == 2:
            positive, negative = towards.chunk(2)
            towards = self._limited(positive + guidance * (positive - negative), positive)
        return -towards

    def _limited(self, guided: Tensor, positive: Tensor) -> Tensor:
        """No longer than ``cfg_normalization`` times the conditional pass of the sample, where the
        folder's ``call.json`` has that argument of the pipeline."""
        factor = self.configs.get("call", {}).get("common", {}).get("cfg_normalization")
        if not factor:
            return guided
        most, length = (v.flatten(1).norm(dim=1)[:, None, None] for v in (positive, guided))
        return guided * (float(factor) * most / length).clamp(max=1)

    def decode(self, vae: Any, x: Tensor, latents: LatentShape) -> Tensor:
        x = x.transpose(1, 2).unflatten(2, (latents.height, latents.width))
        x = (x / vae.config.scaling_factor + vae.config.shift_factor).to(vae.dtype)
        return vae.decode(x.contiguous(memory_format=torch.channels_last), return_dict=False)[0]

    def is_modulation(self, name: str) -> bool:
        return name.startswith("adaLN_modulation")

    @property
    def _vae_channels(self) -> int:
        return self.configs["vae"].get("latent_channels", 4)
