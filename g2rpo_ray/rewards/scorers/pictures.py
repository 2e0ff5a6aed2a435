"""Pictures of any mode as what scorers take."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.rewards.scorer import ScorerError


def as_pictures(images: Sequence[Image.Image]) -> Tensor:
    """PIL pictures of one size -> uint8 ``[B, H, W, 3]``.

    Grey-scale becomes three equal channels; an alpha channel is dropped, as PIL's conversion does.

    Raises:
        ScorerError: no pictures, or of different sizes.
    """
    sizes = sorted({image.size for image in images})
    if len(sizes) != 1:
        found = ", ".join(f"{width}x{height}" for width, height in sizes) or "none"
        raise ScorerError(f"pictures of one size are expected, found {found}; score them apart")
    arrays = [np.array(image.convert("RGB")) for image in images]
    return torch.from_numpy(np.stack(arrays))
