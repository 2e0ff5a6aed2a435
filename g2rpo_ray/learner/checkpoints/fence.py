"""Who may change a run's states: the newest generation of learner ranks, and no older one.

A node that is cut off from Ray may still reach the storage: its rank 0 goes on writing, and would
delete or replace what the ranks in its place read. Whoever starts ranks takes the next generation.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.files import try_lock, writing

GENERATION_FILE = ".generation"
WAIT_S, POLL_S = 30.0, 0.1
"""An older writer that stands still while it holds the lock is waited for so long."""


class FencedError(RunError):
    """Newer ranks, or another driver, have taken the run over: nothing of it was changed."""


@dataclass(frozen=True)
class Fence:
    """Permission to change the states of ``run_dir`` while no newer generation has begun."""

    run_dir: Path | None = None
    """None: nobody else writes there, and nothing is asked."""
    generation: int = 0
    """0 before ``following``."""

    def following(self) -> "Fence":
        """Begin the next generation; when this returns, older ones change nothing any more.

        Raises:
            FencedError: one of another driver has begun since this.
            DiskError: the disk is full or read-only.
        """
        assert self.run_dir is not None
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            with self._locked() as descriptor:
                newest = _read(descriptor)
                if self.generation not in (0, newest):
                    raise self._error(newest)
                os.pwrite(descriptor, f"{newest + 1:08d}".encode(), 0)
                os.fsync(descriptor)
        return replace(self, generation=newest + 1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around what deletes or replaces a state: no newer generation begins meanwhile.

        Raises:
            FencedError: one has begun.
        """
        if self.run_dir is None:
            yield
            return
        with self._locked() as descriptor:
            if (newest := _read(descriptor)) != self.generation:
                raise self._error(newest)
            yield

    def _error(self, newest: int) -> FencedError:
        return FencedError(
            f"{self.run_dir}: the learner's generation {newest} has begun, and this is "
            f"{self.generation}: other ranks or another driver go on with the run, and this one "
            "leaves its states alone"
        )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        assert self.run_dir is not None
        flags = os.O_RDWR | os.O_CREAT
        descriptor = os.open(self.run_dir / GENERATION_FILE, flags, 0o644)
        try:
            end_s = time.monotonic() + WAIT_S
            # Where a file system has no locks, the number alone still tells who is newer.
            while not try_lock(descriptor) and time.monotonic() < end_s:
                time.sleep(POLL_S)
            yield descriptor
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.isdigit() else 0


UNFENCED = Fence()
