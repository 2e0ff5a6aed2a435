"""The size of latents as everything outside a family holds them: ``[tokens, channels]``."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LatentShape:
    """Size of one picture's latents."""

    height: int
    """Rows of tokens."""
    width: int
    """Columns of tokens."""
    channels: int
    """Channels of a token."""
    frames: int = 1
    """Latent frames of a video."""

    @property
    def packed(self) -> tuple[int, int]:
        """(tokens, channels) of one sample."""
        return self.frames * self.height * self.width, self.channels


def unpacked(x: Tensor, latents: LatentShape, side: int) -> Tensor:
    """``[B, tokens, side * side * C]``, a token for each ``side`` x ``side`` latents, to the VAE's
    ``[B, C, side * h, side * w]``."""
    tokens = x.unflatten(1, (latents.height, latents.width)).unflatten(3, (-1, side, side))
    return tokens.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
