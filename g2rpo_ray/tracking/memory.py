"""Peak memory of a run: every process of it on this machine, shared pages counted once."""

import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Self

import psutil

logger = logging.getLogger(__name__)

GIB = 2**30
LARGEST_SHARE = 0.02
"""Sampling may take at most this part of one core."""


class PeakMemory:
    """Context manager that samples the proportional set size (PSS) in a background thread.

    PSS divides a page among the processes that share it, so the sum over processes is what the
    run really takes. Counted are this process, the processes of its Ray session on this machine
    (found by the session's name in their command line, so a cluster that was started elsewhere
    counts too), and all descendants of both. What rises and falls between two samples is missed.

    Args:
        interval_s: pause between two samples. It grows where a sample takes long (25 to 40 ms of
            CPU per GiB were measured, for 14 processes), so that sampling never takes more than
            2 % of a core.
    """

    def __init__(self, interval_s: float = 2.0) -> None:
        self.peak_rss_gib = 0.0
        """Largest sample so far (PSS; the name is the one summary.json uses)."""
        self.pss_gib = 0.0
        """Last sample: ``memory/pss_gib``."""
        self._interval_s = interval_s
        self._unreadable: set[int] = set()
        self._session = ""
        self._closed = threading.Event()
        self._sampling = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self.sample()

    def sample(self) -> float:
        """Measure now; GiB."""
        with self._sampling:
            self.pss_gib = sum(self._pss(process) for process in self._processes()) / GIB
            self.peak_rss_gib = max(self.peak_rss_gib, self.pss_gib)
        return self.pss_gib

    def _watch(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause):
            start = time.thread_time()
            self.sample()
            pause = max(self._interval_s, (time.thread_time() - start) / LARGEST_SHARE)

    def _processes(self) -> Iterator[psutil.Process]:
        """This process, its Ray session, and the descendants of both, each once."""
        session = self._ray_session()
        processes: dict[int, psutil.Process] = {}
        children = defaultdict(list)
        waiting = [os.getpid()]
        for process in psutil.process_iter(["ppid", "cmdline"]):
            processes[process.pid] = process
            children[process.info["ppid"]].append(process.pid)
            # Workers rename themselves, but they descend from the raylet, which does not.
            if session and any(session in word for word in process.info["cmdline"] or ()):
                waiting.append(process.pid)
        seen = set()
        while waiting:
            pid = waiting.pop()
            if pid in processes and pid not in seen:
                seen.add(pid)
                waiting += children[pid]
                yield processes[pid]

    def _ray_session(self) -> str:
        """Name of the Ray session this process belongs to; empty before Ray is initialised."""
        # Whoever has not imported ray has no session, and the import would take a second.
        if not self._session and "ray" in sys.modules:
            import ray

            if ray.is_initialized():
                self._session = ray.get_runtime_context().get_session_name()
        return self._session

    def _pss(self, process: psutil.Process) -> int:
        """Bytes; 0 for a process that has gone, or that may not be read, which is logged once."""
        try:
            return process.memory_full_info().pss
        except psutil.NoSuchProcess:
            return 0
        except psutil.AccessDenied:
            if process.pid not in self._unreadable:
                self._unreadable.add(process.pid)
                logger.warning(
                    "peak memory lacks process %d: this user may not read its memory", process.pid
                )
            return 0
