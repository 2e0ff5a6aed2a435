"""How Qwen-Image is called: its latents, text, network and VAE."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family, GuidanceKind, read_published
from g2rpo_ray.models.latents import LatentShape, unpacked


class QwenImage(Family):
    """One token is 2 x 2 latents of the VAE, which shrinks pictures by 8.

    Each text has its own length, and a pass of guidance is a call of its own, as in the pipeline: a
    mask costs attention its fast kernels, and padding the products of up to a fifth of the tokens.
    """

    pipeline = "QwenImagePipeline"
    parts: ClassVar = {
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
    }
    blocks = ("QwenImageTransformerBlock",)
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip
    # diffusers has the authors' names.
    joined: ClassVar = {
        f"transformer_blocks.{{}}.{layer}": (f"transformer_blocks.{{}}.{layer}",)
        for layer in (*lora_targets, "img_mod.1", "txt_mod.1")
    }
    text_varies = True
    recordable = True
    has_kernels = True
    published: ClassVar = read_published(__file__)

    def pipeline_arguments(self, guidance: float, negative_prompt: str = "") -> dict[str, Any]:
        arguments = super().pipeline_arguments(guidance, negative_prompt)
        return {"true_cfg_scale": arguments.pop("guidance_scale")} | arguments

    def problem(self, folder: Path) -> str | None:
        network = self.configs["transformer"]
        taken, patch = network.get("in_channels", 64), network.get("patch_size", 2)
        predicted = (network.get("out_channels", 16) or taken) * patch**2
        return self.channels_problem(folder, taken, predicted)

    @property
    def longest_text(self) -> int:
        # Beyond it diffusers' pipeline refuses the call.
        return 1024

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "cfg"

    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        embeds, _ = pipeline.encode_prompt(text, max_sequence_length=length)
        return Conditioning({"text": embeds[0]})

    def text_tokens(self, pipeline: Any, text: str) -> int:
        whole = pipeline.tokenizer(pipeline.prompt_template_encode.format(text)).input_ids
        return len(whole) - pipeline.prompt_template_encode_start_idx

    def blank(
        self, transformer: Any, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> Conditioning:
        width = transformer.config.joint_attention_dim
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
        positive = self._predicted(transformer, x, sigma, conditioning, latents)
        if self.passes(guidance) == 1:
            return positive
        negative = self._predicted(transformer, x, sigma, conditioning.opposite, latents)
        guided = self.guided(positive, negative, guidance)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    @staticmethod
    def _predicted(
        transformer: Any, x: Tensor, sigma: Tensor, side: Conditioning, latents: LatentShape
    ) -> Tensor:
        text = side["text"]
        # In embeddings of before texts had their own lengths.
        if (mask := side.tensors.get("mask")) is not None:
            text = text[mask != 0]
        velocity: Tensor = transformer(
            hidden_states=x.to(text.dtype),
            # Rounded where the pipeline rounds it.
            timestep=(sigma * 1000).to(text.dtype) / 1000,
            encoder_hidden_states=text.expand(len(x), -1, -1),
            img_shapes=[[(1, latents.height, latents.width)]] * len(x),
            return_dict=False,
        )[0]
        return velocity.float()

    def decode(self, vae: Any, x: Tensor, latents: LatentShape) -> Tensor:
        mean, deviation = (
            torch.tensor(values, device=x.device)[:, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        x = (unpacked(x, latents, self.token_side) * deviation + mean).to(vae.dtype)
        return vae.decode(x[:, :, None], return_dict=False)[0][:, :, 0]

    def is_modulation(self, name: str) -> bool:
        return name in ("img_mod.1", "txt_mod.1")

    @property
    def vae_channels(self) -> int:
        return self.configs["vae"].get("z_dim", 16)
