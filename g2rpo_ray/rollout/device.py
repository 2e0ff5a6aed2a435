"""A device that runs behind the program: time as it passed there, and tensors on their way back."""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class DeviceClock:
    """Time by phase as the device spent it; on the CPU, as the wall clock has it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to ``phase``; does not wait for the device."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, start), (phase, end) in pairwise(self._marks):
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            total[phase] = total.get(phase, 0.0) + seconds
        return total

    def _now(self) -> Any:
        """A CUDA event, or seconds of the wall clock."""
        if not self._on_gpu:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))


class HostCopy:
    """A tensor on its way from the device to the host, while the device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        # PyTorch takes pinned memory for what it copies to the host without waiting.
        self._host = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def wait(self) -> Tensor:
        """The tensor on the CPU, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
