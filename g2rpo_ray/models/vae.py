"""From latents to uint8 pictures."""

from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.models.batches import BatchSize
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.latents import LatentShape


class PictureDecoder:
    """A VAE's decoder, batched."""

    def __init__(
        self,
        family: Family,
        vae: Any,
        shape: LatentShape,
        batch: BatchSize | int,
        *,
        tiled: bool = False,
        fixed_shapes: bool = False,
    ) -> None:
        """
        Args:
            vae: on its device and in its compute dtype.
            batch: most pictures in one pass.
            tiled: decode in tiles that overlap.
            fixed_shapes: fill every pass up to ``batch``, for a compiled decoder.
        """
        self._family, self.vae, self._shape = family, vae, shape
        self._batch = (
            BatchSize(batch, "rollout.decode_batch_size") if isinstance(batch, int) else batch
        )
        self.fixed_shapes = fixed_shapes
        if tiled:
            vae.enable_tiling()

    def decode(self, latents: Tensor) -> Tensor:
        """As ``decode_on_device``, with the pictures on the CPU."""
        return self.decode_on_device(latents).cpu()

    @torch.no_grad()
    def decode_on_device(self, latents: Tensor) -> Tensor:
        """float32 ``[B, tokens, channels]`` -> uint8 ``[B, (frames,) H, W, 3]`` on that device.

        Raises:
            DeviceMemoryError: memory ended, also with half the batch.
        """
        return self._batch.run(len(latents), lambda rows: self._pass(latents[rows]))

    def _pass(self, latents: Tensor) -> Tensor:
        rows = len(latents)
        if self.fixed_shapes:
            missing = self._batch.rows - rows
            latents = torch.cat([latents, latents[:1].expand(missing, -1, -1)])
        picture = self._family.decode(self.vae, latents, self._shape)[:rows].float()
        # The rounding of diffusers' VaeImageProcessor, so that pictures equal the pipeline's.
        picture = (picture / 2 + 0.5).clamp(0, 1) * 255
        return picture.round().to(torch.uint8).movedim(1, -1).contiguous()
