"""A tiny Qwen-Image of random weights."""

from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.models.families import tiny_qwen

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
"""Of the pipeline's template, of which it drops 34 tokens: one for each word, as the real one."""


def build(folder: Path) -> None:
    tokenizer = tiny_qwen.tokenizer([SYSTEM, "system"])
    text = tiny_qwen.sizes(len(tokenizer))
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1,
        "fullatt_block_indexes": [0],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 4,
        "window_size": 16,
    }
    QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text["hidden_size"],
            axes_dims_rope=(4, 6, 6),
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2, 4],
            num_res_blocks=1,
            latents_mean=[0.5, -0.5, 0.1, 0.0],
            latents_std=[1.5, 0.8, 1.0, 2.0],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
        ),
        tokenizer=tokenizer,
    ).save_pretrained(folder)
