"""Time as it passed on a device that runs behind the program."""

import time
from itertools import pairwise

import torch


class DeviceClock:
    """Time by phase as the device spent it; on the CPU, as the wall clock has it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", self._now())]

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to ``phase``; does not wait for the device."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, start), (phase, end) in pairwise(self._marks):
            total[phase] = total.get(phase, 0.0) + _between_s(start, end)
        return total

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_s(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1000
