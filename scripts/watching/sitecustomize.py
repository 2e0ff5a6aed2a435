"""Each half second, the memory of this process on its card, by the role that it has taken.

``bench_card.py`` puts this folder on ``PYTHONPATH``: every process of a run imports it first. NVML
would not say who holds how much where processes have numbers of their own (containers, gVisor).
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
    """A line of the file: Unix time, role, bytes reserved and allocated, and free on the card (-1
    where this process has none, and what it holds is its host memory)."""
    role = getattr(logging.getLogRecordFactory()("", 0, "", 0, "", None, None), "role", None)
    if role is None:
        return None
    # Never imported for this: whoever has no use for it shall not get it.
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if getattr(cuda, "is_initialized", bool)():
        held = cuda.memory_reserved(), cuda.memory_allocated(), cuda.mem_get_info()[0]
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        held = pages, pages, -1
    # In all processes at the same times.
    tick = round(time.time() / PAUSE_S) * PAUSE_S
    return ",".join(map(str, (tick, role, *held)))


def watch(file: Path) -> None:
    while True:
        time.sleep(PAUSE_S - time.time() % PAUSE_S)
        if (line := sample()) is not None:
            with file.open("a") as lines:
                lines.write(line + "\n")


if folder := os.environ.get("G2RPO_MEMORY_SAMPLES"):
    file = Path(folder) / f"{os.getpid()}.csv"
    threading.Thread(target=watch, args=(file,), daemon=True).start()
