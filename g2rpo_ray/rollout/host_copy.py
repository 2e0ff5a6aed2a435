"""Tensors on their way from a device that runs behind the program."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way from the device to the host, while the device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The tensor on the CPU, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
