"""Parts that tiny folders of several families share."""

from diffusers import AutoencoderKL


def tiny_vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """16 channels of latents, pictures 8 times larger; random weights."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
