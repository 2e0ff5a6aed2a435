"""Features of a CLIP model and their cosine, shared by every scorer that is built on one."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import normalize

from g2rpo_ray.rewards.scorers.preprocess import to_device

CACHED_PROMPTS = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ClipFeatures:
    """Normalised image and text features."""

    def __init__(
        self,
        encode_image: Callable[[Tensor], Tensor],
        encode_text: Callable[[str], Tensor],
        preprocess: Callable[[Tensor], Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            encode_image: ``[B, 3, h, w]`` of ``dtype`` on ``device`` -> ``[B, D]``.
            encode_text: a text -> ``[D]``.
            preprocess: float32 ``[B, 3, H, W]``, 0 to 255 -> float32 ``[B, 3, h, w]``.
        """
        self._encode_image, self._preprocess = encode_image, preprocess
        self._device, self._dtype = device, dtype
        self._text = lru_cache(CACHED_PROMPTS)(
            lambda prompt: normalize(encode_text(prompt).float(), dim=-1)
        )

    @torch.inference_mode()
    def image(self, pictures: Tensor) -> Tensor:
        """uint8 ``[B, H, W, 3]`` on the CPU -> float32 ``[B, D]`` on the device."""
        return self._encoded(self._preprocess(to_device(pictures, self._device)))

    @torch.inference_mode()
    def crops(self, crops: Sequence[Tensor]) -> Tensor:
        """B of uint8 ``[H, W, 3]``, each of its own size, as ``image``."""
        images = [self._preprocess(to_device(crop[None], self._device)) for crop in crops]
        return self._encoded(torch.cat(images))

    @torch.inference_mode()
    def text(self, prompts: Sequence[str]) -> Tensor:
        """B texts -> float32 ``[B, D]`` on the device; each is encoded once."""
        return torch.stack([self._text(prompt) for prompt in prompts])

    @torch.inference_mode()
    def similarity(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosine of each picture and its text: float32 ``[B]`` on the CPU."""
        return (self.image(pictures) * self.text(prompts)).sum(dim=-1).cpu()

    def _encoded(self, images: Tensor) -> Tensor:
        return normalize(self._encode_image(images.to(self._dtype)).float(), dim=-1)
