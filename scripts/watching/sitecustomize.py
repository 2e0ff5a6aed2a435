"""Each half second, the memory of this process on its card, by the role that it has taken.

``measuring.watched`` puts this folder on ``PYTHONPATH``: every process of a run imports it first.
From outside, NVML would not say who holds what where processes have numbers of their own.
"""

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

PAUSE_S = 0.5


def sample() -> str | None:
    """A line of the file: Unix time, role, bytes reserved, allocated, free on the card, and of this
    process there by NVML, with its context (-1 where NVML does not know it, and both where this
    process has no card: what it holds is its host memory)."""
    role = getattr(logging.getLogRecordFactory()("", 0, "", 0, "", None, None), "role", None)
    if role is None:
        return None
    # Never imported for this: whoever has no use for it shall not get it.
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if getattr(cuda, "is_initialized", bool)():
        held = cuda.memory_reserved(), cuda.memory_allocated(), cuda.mem_get_info()[0], by_nvml()
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        held = pages, pages, -1, -1
    # In all processes at the same times.
    tick = round(time.time() / PAUSE_S) * PAUSE_S
    return ",".join(map(str, (tick, role, *held)))


def by_nvml() -> int:
    # Ray's own copy: no other is sure to be there.
    from ray._private.thirdparty import pynvml

    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    except pynvml.NVMLError:
        return -1
    return next((p.usedGpuMemory or -1 for p in found if p.pid == os.getpid()), -1)


def watch(file: Path) -> None:
    while True:
        time.sleep(PAUSE_S - time.time() % PAUSE_S)
        if (line := sample()) is not None:
            with file.open("a") as lines:
                lines.write(line + "\n")


if folder := os.environ.get("G2RPO_MEMORY_SAMPLES"):
    file = Path(folder) / f"{os.getpid()}.csv"
    threading.Thread(target=watch, args=(file,), daemon=True).start()
