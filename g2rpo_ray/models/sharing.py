"""A network's memory mapped by other processes of the machine; only the handle's kind differs.

What is lent is the network itself, pickled without the numbers of its tensors: who opens it gets
the same modules, their parameters views of the lender's memory. Nobody may write into them.
"""

import io
import math
import os
import pickle
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

ALIGNMENT = 64
"""Bytes, as PyTorch's own memory on the CPU: products of some kernels round by it."""


class SharingError(Exception):
    """This process cannot open the memory of another one; the message is the system's reason."""


class Memory(Protocol):
    """Where tensors lie, in a form that can be sent to another process."""

    def open(self) -> list[Tensor]: ...


class HostMemory:
    """A file in memory without a name, opened through the process that holds it.

    It needs no room in ``/dev/shm`` and leaves nothing there, however its holder ends. Who opens it
    maps it privately: a page that is written to by mistake becomes a copy of the writer's.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """Moves the tensors into it."""
        self._layout, self._bytes = [], 0
        for tensor in tensors:
            self._layout.append((self._bytes, tensor.nbytes, tensor.dtype, tensor.shape))
            self._bytes += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
        # Never closed: it ends with this process.
        file = os.memfd_create("frozen")
        os.truncate(file, self._bytes)
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        for tensor, place in zip(tensors, self._views(shared=True), strict=True):
            tensor.data = place.copy_(tensor)

    def open(self) -> list[Tensor]:
        return self._views(shared=False)

    def _views(self, shared: bool) -> list[Tensor]:
        whole = torch.from_file(self._path, shared, self._bytes, dtype=torch.uint8)
        return [
            whole[start : start + size].view(dtype).view(shape)
            for start, size, dtype, shape in self._layout
        ]


class CardMemory:
    """The tensors where they are on a card, by CUDA IPC.

    Each one is for one process: PyTorch counts who has opened what.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._handles = [reduce_tensor(tensor.detach()) for tensor in tensors]

    def open(self) -> list[Tensor]:
        return [rebuild(*arguments) for rebuild, arguments in self._handles]


@dataclass(frozen=True)
class Lent:
    """A network, or anything with tensors, that other processes of the machine can open."""

    structure: bytes
    memory: Memory

    def open(self) -> Any:
        """The network, on the device of its lender, which must not end before.

        Raises:
            SharingError: the system does not let this process map it.
        """
        try:
            return _Opener(io.BytesIO(self.structure), self.memory.open()).load()
        # PyTorch's own error for whatever the system or CUDA refuses.
        except (RuntimeError, OSError) as error:
            raise SharingError(" ".join(str(error).split())) from error


def lend(network: Any, device: torch.device) -> Lent:
    """Make the memory of a network's tensors on ``device`` available to other processes.

    It must be kept as it is for as long as others use it. On the CPU its tensors are moved, once.
    """
    buffer = io.BytesIO()
    lender = _Lender(buffer, device)
    lender.dump(network)
    kind = CardMemory if device.type == "cuda" else HostMemory
    return Lent(buffer.getvalue(), kind(lender.tensors))


class _Lender(pickle.Pickler):
    """Leaves out the numbers of contiguous tensors on a device."""

    def __init__(self, buffer: io.BytesIO, device: torch.device) -> None:
        super().__init__(buffer)
        self._device, self._numbers = device, dict[int, int]()
        self.tensors: list[Tensor] = []

    def persistent_id(self, item: Any) -> tuple[int, bool] | None:
        if not (isinstance(item, Tensor) and item.device.type == self._device.type):
            return None
        if item.numel() == 0 or not item.is_contiguous():
            return None
        if id(item) not in self._numbers:
            self._numbers[id(item)] = len(self.tensors)
            self.tensors.append(item)
        return self._numbers[id(item)], isinstance(item, nn.Parameter)


class _Opener(pickle.Unpickler):
    """Puts the tensors of another process's memory in their places."""

    def __init__(self, buffer: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: tuple[int, bool]) -> Tensor:
        number, is_parameter = pid
        if not is_parameter:
            return self._tensors[number]
        if number not in self._parameters:
            tensor = self._tensors[number]
            self._parameters[number] = nn.Parameter(tensor, requires_grad=False)
        return self._parameters[number]
