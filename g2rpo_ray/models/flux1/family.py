"""How FLUX.1 is called: its latents, text, network and VAE."""

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family, GuidanceKind, of_qkv, read_published
from g2rpo_ray.models.latents import LatentShape


class Flux1(Family):
    """One token is 2 x 2 latents of the VAE, which shrinks pictures by 8."""

    pipeline = "FluxPipeline"
    parts: ClassVar = {
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "T5Tokenizer",
    }
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    lora_targets = (
        # Double blocks: both streams' attention and feed-forward.
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
        # Single blocks: attention as above, and the joint feed-forward.
        "proj_mlp", "single_transformer_blocks.*.proj_out",
    )  # fmt: skip
    joined: ClassVar = {
        "double_blocks.{}.img_attn.qkv": of_qkv("transformer_blocks.{}.attn.to_*"),
        "double_blocks.{}.txt_attn.qkv": of_qkv("transformer_blocks.{}.attn.add_*_proj"),
        "double_blocks.{}.img_attn.proj": ("transformer_blocks.{}.attn.to_out.0",),
        "double_blocks.{}.txt_attn.proj": ("transformer_blocks.{}.attn.to_add_out",),
        "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.net.0.proj",),
        "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.net.2",),
        "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.net.0.proj",),
        "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.net.2",),
        "double_blocks.{}.img_mod.lin": ("transformer_blocks.{}.norm1.linear",),
        "double_blocks.{}.txt_mod.lin": ("transformer_blocks.{}.norm1_context.linear",),
        "single_blocks.{}.linear1": (
            *of_qkv("single_transformer_blocks.{}.attn.to_*"),
            "single_transformer_blocks.{}.proj_mlp",
        ),
        "single_blocks.{}.linear2": ("single_transformer_blocks.{}.proj_out",),
        "single_blocks.{}.modulation.lin": ("single_transformer_blocks.{}.norm.linear",),
    }
    in_sd_scripts = True
    cut_by = "tokenizer_2"
    recordable = True
    has_kernels = True
    published: ClassVar = read_published(__file__)

    def problem(self, folder: Path) -> str | None:
        network = self.configs["transformer"]
        taken = network.get("in_channels", 64)
        predicted = taken if network.get("out_channels") is None else network["out_channels"]
        return self.channels_problem(folder, taken, predicted)

    @property
    def longest_text(self) -> int:
        # Beyond it diffusers' pipeline refuses the call.
        return 512

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "embedded" if self.configs["transformer"].get("guidance_embeds") else "none"

    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        t5, pooled, _ = pipeline.encode_prompt(text, None, max_sequence_length=length)
        return Conditioning({"t5": t5[0], "pooled": pooled[0]})

    def blank(
        self, transformer: Any, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> Conditioning:
        sizes = transformer.config
        t5 = torch.zeros(length, sizes.joint_attention_dim, dtype=dtype, device=device)
        pooled = torch.zeros(sizes.pooled_projection_dim, dtype=dtype, device=device)
        return Conditioning({"t5": t5, "pooled": pooled})

    def velocity(
        self,
        transformer: Any,
        x: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        guidance: float,
        latents: LatentShape,
    ) -> Tensor:
        """As of ``Family``; only a model with a guidance embedding reads ``guidance``."""
        batch, device, t5 = len(x), x.device, conditioning["t5"]
        velocity: Tensor = transformer(
            hidden_states=x.to(t5.dtype),
            timestep=sigma,
            guidance=torch.full((batch,), guidance, device=device, dtype=torch.float32)
            if transformer.config.guidance_embeds
            else None,
            pooled_projections=conditioning["pooled"].expand(batch, -1),
            encoder_hidden_states=t5.expand(batch, -1, -1),
            txt_ids=_text_ids(t5.shape[-2], device),
            img_ids=_image_ids(latents, device),
            return_dict=False,
        )[0]
        return velocity.to(x.dtype)

    def is_modulation(self, name: str) -> bool:
        return name.startswith("norm") and name.endswith("linear")


# Ids are cached, and are no buffers: a cast of the module to bfloat16 must not round positions.
@lru_cache
def _text_ids(tokens: int, device: torch.device) -> Tensor:
    return torch.zeros(tokens, 3, device=device)


@lru_cache
def _image_ids(latents: LatentShape, device: torch.device) -> Tensor:
    """float32 ``[tokens, 3]``: (0, row, column) of every token, for the rotary embedding."""
    rows = torch.arange(latents.height).repeat_interleave(latents.width)
    columns = torch.arange(latents.width).repeat(latents.height)
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).float().to(device)
