"""Qwen-Image as published."""

from dataclasses import replace

from g2rpo_ray.models.family import Published

QWEN_IMAGE = Published(
    repo="Qwen/Qwen-Image",
    revision="75e0b4be04f60ec59a75f475837eced720f823b6",
    terms="",
    licence={"license": "apache-2.0"},
    configs={
        "transformer": {
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": False,
            "in_channels": 64,
            "joint_attention_dim": 3584,
            "num_attention_heads": 24,
            "num_layers": 60,
            "out_channels": 16,
            "patch_size": 2,
        },
        # Means and deviations of the latents are the class's own.
        "vae": {
            "base_dim": 96,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
            "z_dim": 16,
        },
        "scheduler": {
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 8192,
            "max_shift": 0.9,
            "shift": 1.0,
            "shift_terminal": 0.02,
            "use_dynamic_shifting": True,
        },
    },
)
QWEN_IMAGE_2512 = replace(
    QWEN_IMAGE,
    repo="Qwen/Qwen-Image-2512",
    revision="25468b98e3276ca6700de15c6628e51b7de54a26",
)
