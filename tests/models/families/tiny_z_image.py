"""A tiny Z-Image of random weights."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from tests.models.families import tiny_qwen
from tests.models.families.parts import tiny_vae


def build(folder: Path) -> None:
    tokenizer = tiny_qwen.tokenizer()
    encoder = tiny_qwen.qwen3(len(tokenizer))
    transformer = ZImageTransformer2DModel(
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=encoder.config.hidden_size,
        axes_dims=[4, 6, 6],
        axes_lens=[640, 64, 64],
    )
    ZImagePipeline(
        # The class's embedding of the time has 1024 channels inside: a megabyte in float32.
        transformer=transformer.to(torch.bfloat16),
        vae=tiny_vae(scaling_factor=0.3611, shift_factor=0.1159),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        text_encoder=encoder,
        tokenizer=tokenizer,
    ).save_pretrained(folder)
