"""Noise as a function of named seeds, so that it depends on no worker, batch or retry.

Draws are made on the CPU: a GPU's generator gives other numbers on other cards.
"""

import hashlib

import torch
from torch import Tensor


def seed_of(*parts: int | str) -> int:
    """63-bit seed from named parts, e.g. ``seed_of(run_seed, iteration, prompt_id, "branch", k)``.

    SHA-256 over the parts: neighbouring parts give unrelated seeds on every platform.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def normal(shape: tuple[int, ...], *parts: int | str) -> Tensor:
    """Standard normal float32 tensor on the CPU, determined by ``parts`` and ``shape`` alone."""
    generator = torch.Generator().manual_seed(seed_of(*parts))
    return torch.randn(shape, generator=generator, dtype=torch.float32)
