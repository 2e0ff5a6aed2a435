"""The trainable weights of a policy by name: reading, filling in, and proving that they arrived."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from g2rpo_ray.errors import InputError
from g2rpo_ray.models.flux import FluxPolicy

CHECKSUM_SLICE = 1 << 26
"""Words summed at a time: an int64 copy of a whole large tensor would not fit beside the model."""


class WeightMismatchError(InputError):
    """Weights do not fit the model they are meant for; names are given."""


@dataclass(frozen=True)
class WeightReceipt:
    """What a role holds, in comparable form."""

    version: int
    tensors: int
    bytes: int
    checksum: str


def trainable_parameters(policy: FluxPolicy) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by their name inside the transformer."""
    return {n: p for n, p in policy.transformer.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_weights(policy: FluxPolicy, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the trainable parameters, in place.

    Raises:
        WeightMismatchError: a name is missing, unknown, or of another shape. Nothing is changed.
    """
    parameters = trainable_parameters(policy)
    if parameters.keys() != weights.keys():
        missing, unknown = parameters.keys() - weights.keys(), weights.keys() - parameters.keys()
        raise WeightMismatchError(
            f"weights do not bind: {len(missing)} trainable tensors are missing "
            f"({', '.join(sorted(missing)[:3])}), {len(unknown)} have no place "
            f"({', '.join(sorted(unknown)[:3])}); both sides must use the same model.lora"
        )
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise WeightMismatchError(
                f"{name}: shape {tuple(weights[name].shape)} does not fit {tuple(parameter.shape)}"
            )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def receipt(version: int, weights: Mapping[str, Tensor]) -> WeightReceipt:
    """Count and checksum of named weights, equal on every device."""
    digest = hashlib.sha256()
    size = 0
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_word_sum(tensor)}\n".encode())
        size += tensor.numel() * tensor.element_size()
    return WeightReceipt(version, len(weights), size, digest.hexdigest()[:16])


def _word_sum(tensor: Tensor) -> int:
    # An integer sum is exact in any order, so CPU and GPU agree; any one changed bit changes it.
    words = tensor.contiguous().flatten().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    slices = words.split(CHECKSUM_SLICE)
    return sum(int(part.sum(dtype=torch.int64)) for part in slices)
