"""Trained weights rounded to a smaller dtype, and how much of what was trained is left in them.

A bfloat16 has 8 significant bits: what moves a weight by less than 1/512 of it is rounded away.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from g2rpo_ray.maths.noise import seed_of

Rounding = Literal["nearest", "stochastic", "none"]
"""To the nearest, up or down by chance so that the mean is right, or not at all (float32)."""
LARGEST_LOSS = 0.1
"""Share of the trained update that may be lost without a warning."""


@dataclass
class Arrived:
    """Of a trained update, what is in the weights as they are written; tensors add up."""

    weights: int = 0
    """Numbers that the update touches."""
    changed: int = 0
    """Of these, the ones that are another number than before."""
    meant: float = 0.0
    """Squared length of the update."""
    found: float = 0.0
    """Squared length of what the weights moved by."""
    along: float = 0.0
    """Product of the two."""

    def add(self, before: Tensor, meant: Tensor, after: Tensor) -> None:
        """Count a tensor: before the update, as it was meant (float32), and as it is written."""
        update, moved = (tensor.float() - before.float() for tensor in (meant, after))
        self.weights += update.numel()
        self.changed += int(moved.count_nonzero())
        self.meant += float(update.square().sum())
        self.found += float(moved.square().sum())
        self.along += float((update * moved).sum())

    @property
    def cosine(self) -> float:
        """Between the update and what arrived; 0 where nothing did."""
        return self.along / (self.meant * self.found) ** 0.5 if self.meant and self.found else 0.0

    @property
    def share(self) -> float:
        """Of the update, along itself; rounding by chance keeps it, and adds noise across it."""
        return self.along / self.meant if self.meant else 1.0

    @property
    def is_lost(self) -> bool:
        return self.share < 1 - LARGEST_LOSS

    def __str__(self) -> str:
        changed = self.changed / max(1, self.weights)
        return (
            f"{self.share:.1%} of the trained update arrived, cosine {self.cosine:.3f}: "
            f"{changed:.1%} of {self.weights:,} weights changed"
        )


def rounded(meant: Tensor, dtype: torch.dtype, rounding: Rounding, *seeds: int | str) -> Tensor:
    """float32 numbers in ``dtype``; where chance rounds, equal seeds give equal numbers."""
    if dtype != torch.bfloat16 or rounding != "stochastic":
        return meant.to(dtype)
    generator = torch.Generator().manual_seed(seed_of("rounding", *seeds))
    # A bfloat16 is the upper half of a float32's bits: the lower half is the chance to round up.
    chance = torch.randint(1 << 16, meant.shape, generator=generator, dtype=torch.int32)
    bits = meant.contiguous().view(torch.int32) + chance & -(1 << 16)
    return bits.view(torch.float32).to(dtype)
