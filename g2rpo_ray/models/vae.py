"""From packed latents to uint8 pictures."""

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from g2rpo_ray.models.batches import BatchSize
from g2rpo_ray.models.flux import LatentShape, unpack_latents


class PictureDecoder:
    """FLUX's VAE decoder, batched."""

    def __init__(
        self,
        vae: AutoencoderKL,
        shape: LatentShape,
        batch: BatchSize | int,
        *,
        tile_above_px: int | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        """
        Args:
            vae: on its device and in its compute dtype.
            shape: of the latents.
            batch: most pictures in one pass.
            tile_above_px: decode in tiles that overlap if the longer side is above this.
            fixed_shapes: fill every pass up to ``batch``, for a compiled decoder.
        """
        self.vae, self.shape = vae, shape
        self._batch = (
            BatchSize(batch, "rollout.decode_batch_size") if isinstance(batch, int) else batch
        )
        self._fixed_shapes = fixed_shapes
        if tile_above_px is not None and max(shape.picture) > tile_above_px:
            vae.enable_tiling()

    def decode(self, latents: Tensor) -> Tensor:
        """As ``decode_on_device``, with the pictures on the CPU."""
        return self.decode_on_device(latents).cpu()

    @torch.no_grad()
    def decode_on_device(self, latents: Tensor) -> Tensor:
        """float32 ``[B, tokens, channels]`` -> uint8 ``[B, H, W, 3]`` where the latents are.

        Raises:
            DeviceMemoryError: memory ended, also with half the batch.
        """
        return self._batch.run(len(latents), lambda rows: self._pass(latents[rows]))

    def _pass(self, latents: Tensor) -> Tensor:
        config, rows = self.vae.config, len(latents)
        if self._fixed_shapes:
            missing = self._batch.rows - rows
            latents = torch.cat([latents, latents[:1].expand(missing, -1, -1)])
        unpacked = unpack_latents(latents, self.shape) / config.scaling_factor + config.shift_factor
        unpacked = unpacked.to(self.vae.dtype).contiguous(memory_format=torch.channels_last)
        picture = self.vae.decode(unpacked, return_dict=False)[0][:rows].float()
        # The rounding of diffusers' VaeImageProcessor, so that pictures equal the pipeline's.
        picture = (picture / 2 + 0.5).clamp(0, 1) * 255
        return picture.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
