"""The report of a run that goes on: written again and again, at little cost."""

import time
from collections.abc import Callable
from pathlib import Path

from g2rpo_ray.tracking.report.page import write_report

LARGEST_SHARE = 0.02
"""Of the time, for writing: the longer it takes, the rarer it is done."""
LEAST_PAUSE_S = 5.0


class LiveReport:
    """Keeps ``report.html`` near to how the run stands; tells once where it is, and once each
    reason why it cannot be written."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self._run_dir, self._tell = run_dir, tell
        self._next_s = 0.0
        self._is_live = False
        self._told: set[str] = set()

    def renew(self) -> None:
        """Write it, unless the last time was a short while ago; the run goes on without it, too."""
        started_s = time.monotonic()
        if started_s < self._next_s:
            return
        self._is_live = self._try(live=True) or self._is_live
        ended_s = time.monotonic()
        self._next_s = ended_s + max(LEAST_PAUSE_S, (ended_s - started_s) / LARGEST_SHARE)

    def write_last(self) -> Path:
        """Write it as it stays, and return its path."""
        self._is_live = False
        return write_report(self._run_dir)

    def close(self) -> None:
        """A run that was broken off leaves no page that still waits for it."""
        if self._is_live:
            self._is_live = False
            self._try(live=False)

    def _try(self, live: bool) -> bool:
        try:
            path = write_report(self._run_dir, live)
        except Exception as error:  # noqa: BLE001  (a picture of the run must not end it)
            self._tell_once(f"warning: the report is not renewed: {type(error).__name__}: {error}")
            return False
        self._tell_once(f"report, renewed while the run goes on: {path}")
        return True

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
