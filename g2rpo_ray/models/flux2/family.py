"""How FLUX.2 is called: its latents, text, networks and VAE."""

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family, GuidanceKind, asked_tokens, of_qkv, read_published
from g2rpo_ray.models.latents import LatentShape, unpacked

PUBLISHED = read_published(__file__)


class Flux2(Family):
    """FLUX.2 [dev], which has guidance embedded: one token is 2 x 2 latents of the VAE, which
    shrinks pictures by 8."""

    pipeline = "Flux2Pipeline"
    parts: ClassVar = {
        "transformer": "Flux2Transformer2DModel",
        "vae": "AutoencoderKLFlux2",
        "text_encoder": "Mistral3ForConditionalGeneration",
        "tokenizer": "PixtralProcessor",
    }
    blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    lora_targets = (
        # Double blocks: both streams' attention and feed-forward.
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out",
        # Single blocks: attention and feed-forward are one product before, and one behind.
        "attn.to_qkv_mlp_proj", "single_transformer_blocks.*.to_out",
    )  # fmt: skip
    joined: ClassVar = {
        "double_blocks.{}.img_attn.qkv": of_qkv("transformer_blocks.{}.attn.to_*"),
        "double_blocks.{}.txt_attn.qkv": of_qkv("transformer_blocks.{}.attn.add_*_proj"),
        "double_blocks.{}.img_attn.proj": ("transformer_blocks.{}.attn.to_out.0",),
        "double_blocks.{}.txt_attn.proj": ("transformer_blocks.{}.attn.to_add_out",),
        "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.linear_in",),
        "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.linear_out",),
        "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.linear_in",),
        "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.linear_out",),
        "single_blocks.{}.linear1": ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",),
        "single_blocks.{}.linear2": ("single_transformer_blocks.{}.attn.to_out",),
    }
    published: ClassVar = {"FLUX.2-dev": PUBLISHED["FLUX.2-dev"]}

    def problem(self, folder: Path) -> str | None:
        network = self.configs["transformer"]
        taken = network.get("in_channels", 128)
        predicted = network.get("out_channels") or taken
        return self.channels_problem(folder, taken, predicted)

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "embedded"

    def schedule(self, steps: int, latents: LatentShape) -> Tensor:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return self.own_schedule(steps, mu=compute_empirical_mu(latents.packed[0], steps))

    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        # The released models' layers are the pipeline's default; tiny ones name theirs.
        called = self.configs.get("call", {}).get("common", {})
        layers = {k: v for k, v in called.items() if k == "text_encoder_out_layers"}
        embeds, _ = pipeline.encode_prompt(text, max_sequence_length=length, **layers)
        return Conditioning({"text": embeds[0]})

    def text_tokens(self, pipeline: Any, text: str) -> int:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input(prompts=[text], system_message=pipeline.system_message)
        inputs = pipeline.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return int(inputs["input_ids"].shape[-1])

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
        batch, device, text = len(x), x.device, conditioning["text"]
        passes, texts = self.passes(guidance), text[None]
        if passes == 2:
            texts = torch.stack([text, conditioning.opposite["text"]])
        velocity: Tensor = transformer(
            hidden_states=x.to(text.dtype).repeat(passes, 1, 1),
            # Rounded where the pipeline rounds it.
            timestep=((sigma * 1000).to(text.dtype) / 1000).repeat(passes),
            guidance=torch.full((batch,), guidance, device=device)
            if transformer.config.guidance_embeds
            else None,
            encoder_hidden_states=texts[:, None].expand(-1, batch, -1, -1).flatten(0, 1),
            txt_ids=_text_ids(len(text), device),
            img_ids=_image_ids(latents, device),
            return_dict=False,
        )[0].float()
        if passes == 1:
            return velocity
        positive, negative = velocity.chunk(2)
        return self.guided(positive, negative, guidance)

    def decode(self, vae: Any, x: Tensor, latents: LatentShape) -> Tensor:
        deviation = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        x = unpacked(x * deviation + vae.bn.running_mean, latents, self.token_side).to(vae.dtype)
        return vae.decode(x.contiguous(memory_format=torch.channels_last), return_dict=False)[0]

    @property
    def vae_channels(self) -> int:
        return self.configs["vae"].get("latent_channels", 32)


class Flux2Klein(Flux2):
    """FLUX.2 [klein], with classifier-free guidance against an empty prompt, where it is not
    distilled to few steps."""

    pipeline = "Flux2KleinPipeline"
    parts: ClassVar = Flux2.parts | {
        "text_encoder": "Qwen3ForCausalLM",
        "tokenizer": "Qwen2Tokenizer",
    }
    published: ClassVar = {name: PUBLISHED[name] for name in PUBLISHED if "klein" in name}

    def pipeline_arguments(
        self,
        guidance: float,
        negative_prompt: str = "",  # noqa: ARG002  (always the empty one)
    ) -> dict[str, Any]:
        return {"guidance_scale": guidance}

    def text_tokens(self, pipeline: Any, text: str) -> int:
        return asked_tokens(pipeline, text, enable_thinking=False)

    def guidance_problem(self, guidance: float, negative_prompt: str) -> str | None:
        if negative_prompt:
            return (
                f"sampling.negative_prompt is {negative_prompt!r:.80}, and a {self.pipeline} is "
                "guided away from the empty prompt alone; leave it out"
            )
        return super().guidance_problem(guidance, negative_prompt)

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "none" if self.configs["model_index"].get("is_distilled", False) else "cfg"


@lru_cache
def _text_ids(tokens: int, device: torch.device) -> Tensor:
    """``[tokens, 4]``: (0, 0, 0, place) of every token, for the rotary embedding."""
    places = torch.arange(tokens)[:, None]
    return torch.cat([torch.zeros(tokens, 3, dtype=torch.int64), places], dim=1).to(device)


@lru_cache
def _image_ids(latents: LatentShape, device: torch.device) -> Tensor:
    """``[tokens, 4]``: (0, row, column, 0)."""
    one, rows, columns = torch.arange(1), torch.arange(latents.height), torch.arange(latents.width)
    return torch.cartesian_prod(one, rows, columns, one).to(device)
