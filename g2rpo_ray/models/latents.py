"""The size of latents as everything outside a family holds them: ``[tokens, channels]``."""

from dataclasses import dataclass


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
