"""What a network is conditioned on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conditioning:
    """What one prompt tells the network; the model's family gives the names and reads them."""

    tensors: Mapping[str, Tensor]
    """``[tokens, dim]``, or ``[dim]`` for the whole text, in the model's dtype."""
    negative: "Conditioning | None" = None
    """Of the negative prompt, where classifier-free guidance takes two passes."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def opposite(self) -> "Conditioning":
        """``negative``, for a pass that cannot do without."""
        if self.negative is None:
            raise ValueError("guidance takes two passes, and this conditioning has no negative one")
        return self.negative

    @property
    def all_tensors(self) -> list[Tensor]:
        """Those of the negative one too."""
        return [*self.tensors.values(), *(self.negative.all_tensors if self.negative else [])]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def to(self, device: torch.device) -> "Conditioning":
        return Conditioning(
            {name: tensor.to(device) for name, tensor in self.tensors.items()},
            self.negative and self.negative.to(device),
        )
