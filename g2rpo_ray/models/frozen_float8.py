"""A frozen network in 8 bits: its blocks' weights are stored as float8 and computed with in full.

Weights are rounded once, to float8 e4m3 with a scale for each output channel, and widened for every
product. Scales are powers of two: widening rounds nothing in bfloat16, so that rollout and learner,
compiled or not, multiply with the same numbers.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite number of float8 e4m3."""


@torch.library.custom_op("g2rpo_ray::float8_linear", mutates_args=())
def float8_linear(x: Tensor, bits: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear`` with widened weights.

    One operation, whose widened weights nobody keeps: of a composition, autograd and compilers
    would save them for the backward pass.

    Args:
        x: ``[..., in]``, in the dtype of computing.
        bits: uint8 ``[out, in]``, the numbers' bits.
        scale: ``[out, 1]``, in the dtype of computing.
        bias: ``[out]``, likewise.

    Returns:
        ``[..., out]``.
    """
    return functional.linear(x, widened(bits, scale), bias)


@float8_linear.register_fake
def _(x: Tensor, bits: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(bits))


@torch.library.custom_op("g2rpo_ray::float8_linear_backward", mutates_args=())
def float8_linear_backward(gradient: Tensor, bits: Tensor, scale: Tensor) -> Tensor:
    """Of ``x``, from that of the product."""
    return gradient @ widened(bits, scale)


@float8_linear_backward.register_fake
def _(gradient: Tensor, bits: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG001
    return gradient.new_empty(*gradient.shape[:-1], bits.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return float8_linear_backward(gradient, *ctx.saved_tensors), None, None, None


float8_linear.register_autograd(_backward, setup_context=_save)


def widened(bits: Tensor, scale: Tensor) -> Tensor:
    """The rounded weights ``[out, in]`` in the dtype of ``scale``."""
    if bits.is_cuda:
        # Needs Triton, which comes with PyTorch only where it is built for cards.
        from g2rpo_ray.models.widening import widen

        return widen(bits, scale)
    return bits.view(FLOAT8).to(scale.dtype).mul_(scale)


class FrozenFloat8Linear(nn.Linear):
    """A linear layer that is never trained; also for whoever looks for such, as peft does.

    Its numbers are buffers of whole numbers, so that nothing that casts a network rounds them.
    """

    bits: Tensor
    """uint8 ``[out, in]``."""
    scale: Tensor
    """``[out, 1]``, powers of two in the dtype of computing."""

    def __init__(self, source: nn.Linear, device: torch.device | str) -> None:
        """
        Args:
            source: wherever it is.
            device: of this one; never holds more than this layer in full.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.bias = source.bias
        # First of all, so that it lies in no gap that the rest leaves.
        bits = torch.empty(source.weight.shape, dtype=torch.uint8, device=device)
        weight = source.weight.detach().to(device)
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest / LARGEST).exponent)
        rounded = (weight.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8)
        self.register_buffer("bits", bits.copy_(rounded.view(torch.uint8)))
        self.register_buffer("scale", scale.to(weight.dtype))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Widened anew."""
        return widened(self.bits, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        product: Tensor = float8_linear(x, self.bits, self.scale, self.bias)
        return product


def round_blocks(
    network: nn.Module, blocks: Collection[str], device: torch.device | str
) -> nn.Module:
    """Put the linear layers of the repeated blocks, given by their classes, on ``device`` in 8
    bits, one after another."""
    for block, name, linear in [*block_linears(network, blocks)]:
        block.set_submodule(name, FrozenFloat8Linear(linear, device))
        # The list still holds the layer, and PyTorch its room on a card, between what stays.
        del linear.weight
        torch.cuda.empty_cache()
    return network


def block_linears(
    network: nn.Module, blocks: Collection[str]
) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of the repeated blocks: block, name in it, layer."""
    for block in network.modules():
        if type(block).__name__ in blocks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    yield block, name, module
