"""Stable Diffusion 3.5 as published."""

from typing import Any

from g2rpo_ray.models.family import Published

_TRANSFORMER: dict[str, Any] = {
    "attention_head_dim": 64,
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
_VAE: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}


def _published(size: str, revision: str, transformer: dict[str, Any]) -> Published:
    repo = f"stabilityai/stable-diffusion-3.5-{size}"
    return Published(
        repo=repo,
        revision=revision,
        terms="the Stability AI Community License",
        licence={
            "license": "other",
            "license_name": "stabilityai-ai-community",
            "license_link": f"https://huggingface.co/{repo}/blob/main/LICENSE.md",
        },
        configs={
            "transformer": _TRANSFORMER | transformer,
            "vae": _VAE,
            "scheduler": {"num_train_timesteps": 1000, "shift": 3.0},
        },
    )


SD3_5_MEDIUM = _published(
    "medium",
    "b940f670f0eda2d07fbb75229e779da1ad11eb80",
    {
        "caption_projection_dim": 1536,
        "dual_attention_layers": list(range(13)),
        "num_attention_heads": 24,
        "num_layers": 24,
        "pos_embed_max_size": 384,
    },
)
SD3_5_LARGE = _published(
    "large",
    "ceddf0a7fdf2064ea28e2213e3b84e4afa170a0f",
    {
        "caption_projection_dim": 2432,
        "num_attention_heads": 38,
        "num_layers": 38,
        "pos_embed_max_size": 192,
    },
)
