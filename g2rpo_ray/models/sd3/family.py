"""How Stable Diffusion 3.5 is called: its latents, text, network and VAE."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family, GuidanceKind, ModelFolderError, of_qkv, read_published
from g2rpo_ray.models.latents import LatentShape, unpacked

CLIP_TOKENS = 77
"""Of the CLIP encoders, before those of T5."""


class Sd3(Family):
    """One token is one latent of the VAE, which shrinks pictures by 8; the network itself takes
    2 x 2 of them as one."""

    pipeline = "StableDiffusion3Pipeline"
    parts: ClassVar = {
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "CLIPTokenizer",
        "tokenizer_3": "T5Tokenizer",
    }
    blocks = ("JointTransformerBlock",)
    # As in Flow-GRPO: joint attention of both streams; no second attention, no feed-forward.
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip
    joined: ClassVar = {
        "joint_blocks.{}.x_block.attn.qkv": of_qkv("transformer_blocks.{}.attn.to_*"),
        "joint_blocks.{}.x_block.attn.proj": ("transformer_blocks.{}.attn.to_out.0",),
        "joint_blocks.{}.x_block.attn2.qkv": of_qkv("transformer_blocks.{}.attn2.to_*"),
        "joint_blocks.{}.x_block.attn2.proj": ("transformer_blocks.{}.attn2.to_out.0",),
        "joint_blocks.{}.x_block.mlp.fc1": ("transformer_blocks.{}.ff.net.0.proj",),
        "joint_blocks.{}.x_block.mlp.fc2": ("transformer_blocks.{}.ff.net.2",),
        "joint_blocks.{}.context_block.attn.qkv": of_qkv("transformer_blocks.{}.attn.add_*_proj"),
        "joint_blocks.{}.context_block.attn.proj": ("transformer_blocks.{}.attn.to_add_out",),
        "joint_blocks.{}.context_block.mlp.fc1": ("transformer_blocks.{}.ff_context.net.0.proj",),
        "joint_blocks.{}.context_block.mlp.fc2": ("transformer_blocks.{}.ff_context.net.2",),
    }
    in_sd_scripts = True
    recordable = True
    token_side = 1
    cut_by = "tokenizer_3"
    has_kernels = True
    published: ClassVar = read_published(__file__)

    @property
    def longest_text(self) -> int:
        # Beyond it diffusers' pipeline refuses the call.
        return 512

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "cfg"

    def problem(self, folder: Path) -> str | None:
        network = self.configs["transformer"]
        taken, predicted = network.get("in_channels", 16), network.get("out_channels", 16)
        return self.channels_problem(folder, taken, predicted or taken)

    def latents(self, height: int, width: int, frames: int = 1) -> LatentShape:
        largest = 16 * self.configs["transformer"].get("pos_embed_max_size", 96)
        if max(height, width) > largest:
            raise ModelFolderError(
                f"{width}x{height} pixels: this {self.pipeline} knows places up to {largest} "
                "pixels a side (pos_embed_max_size of transformer/config.json)"
            )
        return super().latents(height, width, frames)

    def schedule(self, steps: int, latents: LatentShape) -> Tensor:
        return self.own_schedule(steps, tokens=self.tokens(latents), even=False)

    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        joint, _, pooled, _ = pipeline.encode_prompt(
            text, None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return Conditioning({"joint": joint[0], "pooled": pooled[0]})

    def blank(
        self, transformer: Any, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> Conditioning:
        sizes, tokens = transformer.config, CLIP_TOKENS + length
        joint = torch.zeros(tokens, sizes.joint_attention_dim, dtype=dtype, device=device)
        pooled = torch.zeros(sizes.pooled_projection_dim, dtype=dtype, device=device)
        return Conditioning({"joint": joint, "pooled": pooled})

    def velocity(
        self,
        transformer: Any,
        x: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        guidance: float,
        latents: LatentShape,
    ) -> Tensor:
        """As of ``Family``: negative and positive in one batch, in the pipeline's order."""
        guided = self.passes(guidance) == 2
        texts = [conditioning.opposite, conditioning] if guided else [conditioning]
        batch, passes = len(x), len(texts)
        velocity: Tensor = transformer(
            hidden_states=unpacked(x, latents, self.token_side)
            .to(texts[0]["joint"].dtype)
            .repeat(passes, 1, 1, 1),
            # Not cast, as in diffusers' pipeline: the network's embedding is in float32.
            timestep=(sigma * 1000).repeat(passes),
            encoder_hidden_states=torch.cat([t["joint"].expand(batch, -1, -1) for t in texts]),
            pooled_projections=torch.cat([t["pooled"].expand(batch, -1) for t in texts]),
            return_dict=False,
        )[0]
        velocity = velocity.float().flatten(2).transpose(1, 2)
        if not guided:
            return velocity
        negative, positive = velocity.chunk(2)
        return self.guided(positive, negative, guidance)

    def is_modulation(self, name: str) -> bool:
        return name.startswith("norm") and name.endswith("linear")
