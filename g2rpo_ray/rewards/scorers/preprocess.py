"""Pictures to what a CLIP tower takes, in batches on the device, equal to the usual PIL path.

PIL resizes 8-bit pictures along rows, rounds, then along columns, and rounds again; so is it done
here, in float32. HPSv2 converts to float first and never rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor


def to_device(pictures: Tensor, device: torch.device) -> Tensor:
    """uint8 ``[B, H, W, 3]`` on the CPU -> float32 ``[B, 3, H, W]``, 0 to 255, on the device."""
    if device.type == "cuda":
        # Bytes, not floats, cross the bus; pinned, so that the copy runs beside the last batch.
        pictures = pictures.pin_memory().to(device, non_blocking=True)
    return pictures.permute(0, 3, 1, 2).float()


@dataclass(frozen=True)
class ClipPreprocess:
    """Resize as PIL does, crop or pad, scale to [0, 1], normalise."""

    size: tuple[int, int]
    """Height and width that the tower takes."""
    mean: Sequence[float]
    std: Sequence[float]
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest"
    """Which side is fitted before the centre is cut out, or both (``squash``)."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    fill: int = 0
    """Grey level around a picture that was fitted by its longest side."""

    @classmethod
    def of_open_clip(cls, preprocess: Mapping[str, Any]) -> Self:
        """From a model's ``visual.preprocess_cfg``."""
        size = preprocess["size"]
        return cls(
            size=(size, size) if isinstance(size, int) else (size[0], size[1]),
            mean=preprocess["mean"],
            std=preprocess["std"],
            resize_mode=preprocess["resize_mode"],
            # open_clip takes "random", a choice for training, as bicubic.
            interpolation="bilinear" if preprocess["interpolation"] == "bilinear" else "bicubic",
            fill=preprocess["fill_color"],
        )

    def __call__(self, images: Tensor) -> Tensor:
        """float32 ``[B, 3, H, W]`` of 0 to 255 -> float32 ``[B, 3, *size]``."""
        from open_clip.transform import center_crop_or_pad

        resized = self._resized_size(images.shape[-2], images.shape[-1])
        if resized != list(images.shape[-2:]):
            images = self._resize_as_bytes(images, [images.shape[-2], resized[1]])
            images = self._resize_as_bytes(images, resized)
        images = center_crop_or_pad(images, list(self.size), fill=self.fill)
        return _normalised(images / 255, self.mean, self.std)

    def _resize_as_bytes(self, images: Tensor, size: list[int]) -> Tensor:
        from torchvision.transforms.functional import InterpolationMode, resize

        resized = resize(images, size, InterpolationMode(self.interpolation), antialias=True)
        # Half a level goes up, as in PIL; bicubic weights overshoot, which 8-bit pictures cannot.
        return resized.add_(0.5).floor_().clamp_(0, 255)

    def _resized_size(self, height: int, width: int) -> list[int]:
        # torchvision cuts the longer side's length off, open_clip's own resizing rounds it.
        if self.resize_mode == "squash":
            return list(self.size)
        if self.resize_mode == "shortest" and self.size[0] == self.size[1]:
            short, long = sorted((height, width))
            fitted = int(self.size[0] * long / short)
            return [self.size[0], fitted] if height <= width else [fitted, self.size[0]]
        ratios = height / self.size[0], width / self.size[1]
        ratio = max(ratios) if self.resize_mode == "longest" else min(ratios)
        return [round(height / ratio), round(width / ratio)]


@dataclass(frozen=True)
class HpsPreprocess:
    """HPSv2's order: to [0, 1], longest side to the tower's size, zeros around, normalise."""

    size: int
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, images: Tensor) -> Tensor:
        """float32 ``[B, 3, H, W]`` of 0 to 255 -> float32 ``[B, 3, size, size]``."""
        from open_clip.transform import center_crop_or_pad
        from torchvision.transforms import functional

        images = images / 255
        height, width = images.shape[-2:]
        scale = self.size / max(height, width)
        resized = [round(height * scale), round(width * scale)]
        if resized != [height, width]:
            bicubic = functional.InterpolationMode.BICUBIC
            images = functional.resize(images, resized, bicubic, antialias=True)
        images = center_crop_or_pad(images, [self.size, self.size])
        return _normalised(images, self.mean, self.std)


def _normalised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """As torchvision's ``normalize``, which copies both to a card each time and waits for it."""
    device = images.device
    return (images - _by_channel(tuple(mean), device)) / _by_channel(tuple(std), device)


@cache
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)
