"""FLUX.2 as published."""

from dataclasses import replace

from g2rpo_ray.models.family import Published

_TERMS = "FLUX's non-commercial licence"


def _licence(name: str) -> dict[str, str]:
    return {
        "license": "other",
        "license_name": "flux-non-commercial-license",
        "license_link": f"https://huggingface.co/black-forest-labs/{name}/blob/main/LICENSE.md",
    }


FLUX2_DEV = Published(
    repo="black-forest-labs/FLUX.2-dev",
    revision="26afe3a78bb242c0a8bb181dcc8937bb16e5c66c",
    terms=_TERMS,
    licence=_licence("FLUX.2-dev"),
    configs={
        "transformer": {
            "attention_head_dim": 128,
            "axes_dims_rope": [32, 32, 32, 32],
            "guidance_embeds": True,
            "in_channels": 128,
            "joint_attention_dim": 15360,
            "mlp_ratio": 3.0,
            "num_attention_heads": 48,
            "num_layers": 8,
            "num_single_layers": 48,
            "rope_theta": 2000,
        },
        "vae": {
            "batch_norm_eps": 1e-4,
            "block_out_channels": [128, 256, 512, 512],
            "latent_channels": 32,
            "layers_per_block": 2,
            "norm_num_groups": 32,
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
_4B = {"joint_attention_dim": 7680, "num_attention_heads": 24}
_4B |= {"num_layers": 5, "num_single_layers": 20}
_9B = {"joint_attention_dim": 12288, "num_attention_heads": 32}
_9B |= {"num_layers": 8, "num_single_layers": 24}


def _klein(name: str, revision: str, sizes: dict[str, int]) -> Published:
    """Apache 2.0 in the smaller size, gated in the larger one; "base" is not distilled."""
    network = FLUX2_DEV.configs["transformer"] | sizes | {"guidance_embeds": False}
    index = {"is_distilled": "base" not in name}
    return replace(
        FLUX2_DEV,
        repo=f"black-forest-labs/{name}",
        revision=revision,
        terms=_TERMS if sizes is _9B else "",
        licence=_licence(name) if sizes is _9B else {"license": "apache-2.0"},
        configs=FLUX2_DEV.configs | {"model_index": index, "transformer": network},
    )


FLUX2_KLEIN = {
    name: _klein(name, revision, sizes)
    for name, revision, sizes in (
        ("FLUX.2-klein-base-4B", "a3b4f4849157f664bdbc776fd7453c2783562f4d", _4B),
        ("FLUX.2-klein-4B", "e7b7dc27f91deacad38e78976d1f2b499d76a294", _4B),
        ("FLUX.2-klein-base-9B", "17c3b160520b7dd44665dbf0b9ed9dd30c15cd06", _9B),
        ("FLUX.2-klein-9B", "92196c8e11f7b6cf2b7493e037d8c5345c559216", _9B),
    )
}
