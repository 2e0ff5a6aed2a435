"""The trainable weights of a policy by name: reading, filling in, and proving that they arrived."""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from g2rpo_ray.common.errors import InputError

if TYPE_CHECKING:
    # Whoever only moves weights starts without the libraries of models.
    from g2rpo_ray.models.policy import Policy

CHECKSUM_SLICE = {"cuda": 1 << 24, "cpu": 1 << 20}
"""Words summed at a time: an int64 copy of a whole large tensor would not fit beside the model, and
the CPU's heap would keep the holes that copies of many sizes leave."""
COMPILED = "_orig_mod."
"""What torch.compile puts into the names of a module that it wraps."""
BLOCK = 1 << 20
"""Words; a factor for every place of a large tensor would not fit on a card beside the model."""
PINNED_BYTES = 1 << 26
"""Copied to a card at a time, through pinned memory: one piece travels while the next is staged."""


class WeightMismatchError(InputError):
    """Weights do not fit the model they are meant for; names are given."""


@dataclass(frozen=True)
class TensorLayout:
    """Name, type and shape of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def description(self) -> str:
        """One line, without a line break."""
        return f"{self.name} {self.dtype} {self.shape}"


@dataclass(frozen=True)
class WeightReceipt:
    """What a role holds, in comparable form."""

    version: int
    tensors: int
    bytes: int
    checksum: str


class PackedWeights(Mapping[str, Tensor]):
    """Named tensors in one piece of memory: one transfer from and to a card, one Ray buffer.

    Where it arrives through the object store, its tensors are views of the store: read-only.
    """

    def __init__(self, layout: Sequence[TensorLayout], data: Tensor) -> None:
        """
        Args:
            layout: of the tensors, one after the other.
            data: uint8.
        """
        self.layout, self.data = list(layout), data
        parts = data.split([tensor.bytes for tensor in layout])
        self._tensors = {
            tensor.name: part.view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(layout, parts, strict=True)
        }

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "PackedWeights":
        """Copies on the CPU, largest items first, so that every tensor stays aligned."""
        layout = sorted(layout_of(weights), key=lambda tensor: -tensor.itemsize)
        flat = [weights[t.name].detach().reshape(-1).view(torch.uint8) for t in layout]
        packed = torch.cat(flat)
        # Pinned memory takes 53 GB/s of an H100; PyTorch keeps it for the next time.
        host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=packed.is_cuda)
        return cls(layout, host.copy_(packed))

    def to(self, device: torch.device) -> "PackedWeights":
        """The same tensors on a device."""
        if device.type != "cuda" or self.data.is_pinned():
            return PackedWeights(self.layout, self.data.to(device))
        # The driver's own copies out of Ray's store, which is not pinned, take 5 to 7 GB/s.
        data = torch.empty_like(self.data, device=device)
        pieces = (part.split(PINNED_BYTES) for part in (self.data, data))
        for here, there in zip(*pieces, strict=True):
            pinned = torch.empty(len(here), dtype=torch.uint8, pin_memory=True)
            there.copy_(pinned.copy_(here), non_blocking=True)
        return PackedWeights(self.layout, data)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (self.layout, self.data.numpy())


def _unpickle(layout: list[TensorLayout], data: np.ndarray) -> PackedWeights:
    with warnings.catch_warnings():
        # A view of Ray's store is not writable, and nobody writes.
        warnings.filterwarnings("ignore", message=".*not writable")
        return PackedWeights(layout, torch.from_numpy(data))


def trainable_parameters(policy: "Policy") -> dict[str, nn.Parameter]:
    """The parameters that training changes, by their name inside the (uncompiled) transformer."""
    return {
        name.replace(COMPILED, ""): parameter
        for name, parameter in policy.transformer.named_parameters()
        if parameter.requires_grad
    }


@torch.no_grad()
def load_weights(policy: "Policy", weights: Mapping[str, Tensor]) -> None:
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
    if isinstance(weights, PackedWeights) and parameters:
        weights = weights.to(next(iter(parameters.values())).device)
    # One call for all: an adapter has hundreds of small tensors.
    torch._foreach_copy_(list(parameters.values()), [weights[name] for name in parameters])


def layout_of(weights: Mapping[str, Tensor]) -> list[TensorLayout]:
    """In the order of names."""
    return [TensorLayout(n, weights[n].dtype, tuple(weights[n].shape)) for n in sorted(weights)]


def receipt(version: int, weights: Mapping[str, Tensor]) -> WeightReceipt:
    """Count and checksum of named weights, equal on every device."""
    sums = word_sums([weights[name] for name in sorted(weights)])
    return receipt_of(version, layout_of(weights), sums)


def receipt_of(version: int, layout: Sequence[TensorLayout], sums: Sequence[int]) -> WeightReceipt:
    """The receipt of tensors whose ``word_sums`` are known, as those of shards added up are."""
    digest = hashlib.sha256()
    for tensor, word_sum in zip(layout, sums, strict=True):
        digest.update(f"{tensor.description} {word_sum % 2**64}\n".encode())
    size = sum(tensor.bytes for tensor in layout)
    return WeightReceipt(version, len(layout), size, digest.hexdigest()[:16])


@torch.no_grad()
def word_sums(tensors: Sequence[Tensor], starts: Sequence[int] | None = None) -> list[int]:
    """Sum of every tensor's 2- or 4-byte words as integers, each weighed by its place.

    Integer sums are exact in any order, so CPU and GPU agree, and those of a tensor's parts add up
    to the whole's, modulo 2^64. The factors are odd, so any one changed bit changes the sum, and
    look random: so do words that changed places, and changes that cancel each other out.

    Args:
        starts: of parts of tensors, the place of the first word of each in the whole.
    """
    words = [_words(tensor.detach()) for tensor in tensors]
    if not words:
        return []
    device = words[0].device
    sums = torch.empty(len(words), dtype=torch.int64, device=device)
    # An adapter has hundreds of tensors of few shapes, and a kernel for each takes its time.
    alike: dict[tuple[torch.dtype, int, int], list[int]] = {}
    for number, part in enumerate(words):
        start = starts[number] if starts else 0
        alike.setdefault((part.dtype, len(part), start), []).append(number)
    for (_, length, start), numbers in alike.items():
        together = max(1, CHECKSUM_SLICE[device.type] // max(length, 1))
        for first in range(0, len(numbers), together):
            some = numbers[first : first + together]
            # A view where it is one, which may be as large as a model.
            parts = [words[number] for number in some]
            sums[some] = _weighed(parts[0][None] if len(some) == 1 else torch.stack(parts), start)
    return sums.tolist()


def _words(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def _weighed(words: Tensor, start: int) -> Tensor:
    """int64 ``[n]`` of ``[n, words]`` whose first has a place: each word times the factor of its
    place inside its block, summed, times the block's factor."""
    device, length = words.device, words.shape[1]
    of_place, of_block = (_factors(dtype, device) for dtype in (torch.int32, torch.int64))
    lead = min(-start % BLOCK, length)
    whole = (length - lead) // BLOCK * BLOCK
    run = max(CHECKSUM_SLICE[device.type] // BLOCK, 1) * BLOCK
    sizes = [lead, *[run] * (whole // run), whole % run, length - lead - whole]
    total = torch.zeros(len(words), dtype=torch.int64, device=device)
    for part in words.split([size for size in sizes if size], dim=1):
        block, place = divmod(start, BLOCK)
        blocks = part.reshape(len(part), -1, min(part.shape[1], BLOCK))
        factors = of_place[place : place + blocks.shape[2]]
        sums = (blocks * factors).sum(dim=2, dtype=torch.int64)
        total += (sums * of_block[block : block + blocks.shape[1]]).sum(dim=1)
        start += part.shape[1]
    return total


@cache
def _factors(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``BLOCK`` odd integers, the same on every machine."""
    raw = np.random.Philox(key=dtype.itemsize).random_raw(BLOCK) | np.uint64(1)
    return torch.from_numpy(raw.view(np.int64)).to(dtype).to(device)
