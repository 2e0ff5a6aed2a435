"""Linear layers with LoRA adapters in a rollout's compiled code, where both products are one sum.

peft's order writes the layer's product and the adapter's, and adds them: three more tensors go
through the card's memory for a product that hardly computes. Here the adapter's product is what the
layer's own is added to, in its sum in float32, and several layers of the same input read it once
for all adapters. There are no gradients.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo_ray.models.lora import ADAPTER


def sum_in_products(transformer: nn.Module) -> None:
    """Prepare a transformer that is not trained for ``compile_blocks``; the weights' names stay.

    Outside compiled code it stays as peft has it; so do layers that keep their weights in 8 bits.
    """
    from peft.tuners.lora import Linear as Adapted

    for module in transformer.modules():
        if isinstance(module, Adapted) and type(module.base_layer) is nn.Linear:
            module.forward, module.is_summed = MethodType(_forward, module), True


def products(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """What ``layers`` make of the same ``x``, ``[..., out]`` each."""
    summed = all(getattr(layer, "is_summed", False) for layer in layers)
    if not summed or not torch.compiler.is_compiling():
        return [layer(x) for layer in layers]
    return adapted_products(
        x,
        [layer.base_layer.weight for layer in layers],
        [layer.base_layer.bias for layer in layers],
        [layer.lora_A[ADAPTER].weight for layer in layers],
        [layer.lora_B[ADAPTER].weight for layer in layers],
        [layer.scaling[ADAPTER] for layer in layers],
    )


def _forward(self: Any, x: Tensor) -> Tensor:
    """In the place of peft's, of one layer."""
    if torch.compiler.is_compiling():
        return products([self], x)[0]
    answer: Tensor = type(self).forward(self, x)
    return answer


@torch.library.custom_op("g2rpo_ray::adapted_products", mutates_args=())
def adapted_products(
    x: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    downs: list[Tensor],
    ups: list[Tensor],
    scales: list[float],
) -> list[Tensor]:
    """``x W^T + b + scale (x A^T) B^T`` of several layers (LoRA, arXiv 2106.09685, equation 3).

    The adapter's part is rounded before it is added, the sum once.

    Args:
        x: ``[..., in]``, of the layers' dtype.
        weights: W, ``[out, in]`` each.
        biases: b, ``[out]`` each, or none.
        downs: A, ``[rank, in]`` each.
        ups: B, ``[out, rank]`` each.
        scales: of the adapters, alpha / rank.

    Returns:
        ``[..., out]`` of each layer.
    """
    rows = x.reshape(-1, x.shape[-1])
    narrow = rows @ (downs[0] if len(downs) == 1 else torch.cat(downs)).T
    parts = narrow.split([len(down) for down in downs], dim=1)
    found = []
    for part, weight, bias, up, scale in zip(parts, weights, biases, ups, scales, strict=True):
        if bias is None:
            y = rows.new_empty(len(rows), len(up)).addmm_(part, up.T, beta=0, alpha=scale)
        else:
            y = torch.addmm(bias, part, up.T, alpha=scale)
        found.append(y.addmm_(rows, weight.T).unflatten(0, x.shape[:-1]))
    return found


@adapted_products.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],  # noqa: ARG001
    downs: list[Tensor],  # noqa: ARG001
    ups: list[Tensor],  # noqa: ARG001
    scales: list[float],  # noqa: ARG001
) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(weight)) for weight in weights]
