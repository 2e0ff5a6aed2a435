"""How Z-Image is called: its latents, text, network and VAE."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family, GuidanceKind, asked_tokens, of_qkv, read_published
from g2rpo_ray.models.latents import LatentShape, unpacked

FILLED_TO = 32
"""Tokens: a text has a multiple of it."""


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
    token_side = 1
    unguided = 0.0
    published: ClassVar = read_published(__file__)

    def problem(self, folder: Path) -> str | None:
        taken = self.configs["transformer"].get("in_channels", 16)
        return self.channels_problem(folder, taken, taken)

    @property
    def longest_text(self) -> int:
        # The network has a table of places: a text's, filled up, begin at 1, the picture's behind.
        places: int = self.configs["transformer"].get("axes_lens", [1024])[0]
        return (places - 2) // FILLED_TO * FILLED_TO

    @property
    def guidance_kind(self) -> GuidanceKind:
        return "cfg"

    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        embeds, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return Conditioning({"text": embeds[0]})

    def text_tokens(self, pipeline: Any, text: str) -> int:
        return asked_tokens(pipeline, text, enable_thinking=True)

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
        pictures = unpacked(x.to(text.dtype), latents, self.token_side)[:, :, None]
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

    def is_modulation(self, name: str) -> bool:
        return name.startswith("adaLN_modulation")
