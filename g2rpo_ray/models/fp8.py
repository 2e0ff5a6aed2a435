"""A policy's twin with 8-bit matrix products, for completions: they only estimate a reward.

Weights are rounded once to float8 e4m3 with a scale for each output channel, activations in every
product with a scale for each token. What precedes a product (norm and modulation, GELU) and the
rounding are one kernel where the blocks are compiled. Modulations, which run once a sample, stay.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.models.frozen_float8 import FLOAT8, LARGEST
from g2rpo_ray.models.policy import Policy

FIRST_CAPABILITY = (8, 9)
"""Compute capability from which on cards multiply float8 numbers."""


class Float8Error(InputError):
    """The card has no such products of float8 numbers; the message names the setting."""


def check_float8(device: torch.device, asked: str) -> None:
    """Raises Float8Error for a card that cannot multiply float8 numbers; ``asked`` says who wants
    such products, see ``RolloutSection.asked``."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FIRST_CAPABILITY:
        found_text, needed = (".".join(map(str, c)) for c in (found, FIRST_CAPABILITY))
        raise Float8Error(
            f"{asked}: this card has compute capability {found_text}, and products of float8 "
            f"numbers need {needed} (L40S, H100 and newer); leave it out, or choose other cards by "
            "rollout.label_selector"
        )


class Float8Linear(nn.Module):
    """A linear layer whose product is computed from float8 numbers."""

    weight: Tensor
    """float8 ``[out, in]``."""
    scale: Tensor
    """float32 ``[1, out]``."""

    def __init__(self, source: nn.Module) -> None:
        """Of a linear layer, or of one with a LoRA adapter, which is merged into the product."""
        super().__init__()
        base = _base_layer(source)
        self.bias: Tensor | None = base.bias
        self.register_buffer("weight", torch.empty_like(base.weight, dtype=FLOAT8))
        self.register_buffer("scale", torch.empty(1, len(base.weight), device=base.weight.device))
        # In a tuple, so that the exact layer is no part of this one.
        self._source: tuple[Any] = (source,)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the source's weights of now."""
        (source,) = self._source
        weight = _base_layer(source).weight.float()
        for adapter in getattr(source, "active_adapters", []):
            weight = weight + source.get_delta_weight(adapter).float()
        rounded, scale = to_float8(weight)
        self.weight.copy_(rounded)
        self.scale.copy_(scale.T)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]`` in the dtype of ``x``."""
        rounded, scale = to_float8(x.flatten(0, -2))
        if x.is_cuda:
            y = torch._scaled_mm(
                rounded,
                self.weight.T,
                scale_a=scale,
                scale_b=self.scale,
                bias=self.bias,
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
        else:
            # The same rounded numbers; the CPU has no product of them.
            y = (rounded.float() @ self.weight.float().T * (scale * self.scale)).to(x.dtype)
            y = y if self.bias is None else y + self.bias
        return y.unflatten(0, x.shape[:-1])


class Float8Twin:
    """A second policy that shares everything with the exact one but its blocks' products."""

    def __init__(self, policy: Policy) -> None:
        """Of a policy on its device that is not compiled yet."""
        shared = {id(t): t for t in (*policy.parameters(), *policy.buffers())}
        self.policy: Policy = copy.deepcopy(policy, shared)
        self._layers: list[Float8Linear] = []
        for block_name, name, source in _rounded(policy):
            layer = Float8Linear(source)
            self.policy.get_submodule(block_name).set_submodule(name, layer)
            self._layers.append(layer)

    def refresh(self) -> None:
        """Take over the exact policy's weights, after they changed."""
        for layer in self._layers:
            layer.refresh()


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows ``[B, C]``: float8 ``[B, C]`` and float32 scales ``[B, 1]`` to multiply with."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def twin_bytes(policy: Policy) -> int:
    """What a twin holds beside what it shares: a byte a weight, a float32 an output channel."""
    weights = [_base_layer(source).weight for *_, source in _rounded(policy)]
    return sum(weight.numel() + 4 * len(weight) for weight in weights)


def _rounded(policy: Policy) -> Iterator[tuple[str, str, nn.Module]]:
    """The products that a twin has for itself: block, name in it, layer."""
    for block_name, block in policy.blocks():
        for name, source in _products(block):
            if not policy.family.is_modulation(name):
                yield block_name, name, source


def _products(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linear layers, an adapter's own parts left out."""
    linear: list[tuple[str, nn.Module]] = []
    for name, module in block.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in linear)
        if not inside and (isinstance(module, nn.Linear) or hasattr(module, "base_layer")):
            linear.append((name, module))
    return linear


def _base_layer(source: nn.Module) -> Any:
    return getattr(source, "base_layer", source)
