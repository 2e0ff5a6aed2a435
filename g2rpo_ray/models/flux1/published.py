"""FLUX.1 as published."""

from dataclasses import replace

from g2rpo_ray.models.family import Published

FLUX1_DEV = Published(
    repo="black-forest-labs/FLUX.1-dev",
    revision="3de623fc3c33e44ffbe2bad470d0f45bccf2eb21",
    terms="FLUX.1 [dev]'s non-commercial licence",
    licence={
        "license": "other",
        "license_name": "flux-1-dev-non-commercial-license",
        "license_link": "https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md",
    },
    configs={
        "transformer": {
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": True,
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "num_attention_heads": 24,
            "num_layers": 19,
            "num_single_layers": 38,
            "patch_size": 1,
            "pooled_projection_dim": 768,
        },
        "vae": {
            "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "in_channels": 3,
            "latent_channels": 16,
            "layers_per_block": 2,
            "norm_num_groups": 32,
            "out_channels": 3,
            "scaling_factor": 0.3611,
            "shift_factor": 0.1159,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "use_post_quant_conv": False,
            "use_quant_conv": False,
        },
        "scheduler": {
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 4096,
            "max_shift": 1.15,
            "shift": 3.0,
            "use_dynamic_shifting": True,
        },
    },
)
FLUX1_KREA_DEV = replace(
    FLUX1_DEV,
    repo="black-forest-labs/FLUX.1-Krea-dev",
    revision=None,
    licence=dict(FLUX1_DEV.licence)
    | {
        "license_link": "https://huggingface.co/black-forest-labs/FLUX.1-Krea-dev/blob/main/LICENSE.md"
    },
)
FLUX1_SCHNELL = Published(
    repo="black-forest-labs/FLUX.1-schnell",
    revision="741f7c3ce8b383c54771c7003378a50191e9efe9",
    terms="the conditions on the repository's page",
    licence={"license": "apache-2.0"},
    configs=FLUX1_DEV.configs
    | {
        "transformer": FLUX1_DEV.configs["transformer"] | {"guidance_embeds": False},
        "scheduler": FLUX1_DEV.configs["scheduler"] | {"shift": 1.0, "use_dynamic_shifting": False},
    },
)
