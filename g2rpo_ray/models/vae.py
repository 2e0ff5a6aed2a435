"""From packed latents to uint8 pictures."""

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from g2rpo_ray.models.flux import LatentShape, unpack_latents


class PictureDecoder:
    """FLUX's VAE decoder, batched."""

    def __init__(self, vae: AutoencoderKL, shape: LatentShape, batch_size: int) -> None:
        """
        Args:
            vae: on its device and in its compute dtype.
            shape: of the latents.
            batch_size: most pictures in one pass.
        """
        self.vae, self.shape, self.batch_size = vae, shape, batch_size

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """float32 ``[B, tokens, channels]`` -> uint8 ``[B, H, W, 3]`` on the CPU."""
        return torch.cat([self._decode(chunk) for chunk in latents.split(self.batch_size)])

    def _decode(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        unpacked = unpack_latents(latents, self.shape) / config.scaling_factor + config.shift_factor
        picture = self.vae.decode(unpacked.to(self.vae.dtype), return_dict=False)[0].float()
        # The rounding of diffusers' VaeImageProcessor, so that pictures equal the pipeline's.
        picture = (picture / 2 + 0.5).clamp(0, 1) * 255
        return picture.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
