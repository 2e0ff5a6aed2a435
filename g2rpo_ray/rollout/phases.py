"""What a worker does now: its own work, or waiting for somebody else. Told to who asks meanwhile.

Only a worker's own work shows whether it hangs: how long others take is their affair.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

REPORTS = "reports"
"""Concurrency group of the calls that a worker answers while it has a task."""
STORE = "the object store"


@dataclass(frozen=True)
class Phase:
    """Where a worker stands with its task."""

    own_s: float
    """Time of its own work on it."""
    waited_s: float
    """Time in which it waited for others, the present wait included."""
    waiting_for: str | None
    """Who keeps it from working; None while it works. ``STORE``: its task has not come yet."""


class OwnTime:
    """Splits a task's time. One thread works; any other may ask."""

    def __init__(self) -> None:
        # One object, replaced as a whole: who reads it has parts that belong together.
        self._state: tuple[float, float, float, Callable[[], str] | None] = _idle()

    def now(self) -> Phase:
        """Own work and waiting of the task of now."""
        own_s, waited_s, since_s, whom = self._state
        passed_s = time.monotonic() - since_s
        if whom is None:
            return Phase(own_s + passed_s, waited_s, None)
        return Phase(own_s, waited_s + passed_s, whom())

    @contextmanager
    def task(self) -> Iterator[None]:
        """A task; one inside another belongs to it."""
        if self.now().waiting_for != STORE:
            yield
            return
        self._state = 0.0, 0.0, time.monotonic(), None
        try:
            yield
        finally:
            self._state = _idle()

    @contextmanager
    def waiting(self, whom: Callable[[], str]) -> Iterator[None]:
        """The worker can do nothing until somebody else has answered.

        Args:
            whom: says who that is now.
        """
        self._enter(whom)
        try:
            yield
        finally:
            self._enter(None)

    def _enter(self, whom: Callable[[], str] | None) -> None:
        phase = self.now()
        self._state = phase.own_s, phase.waited_s, time.monotonic(), whom


def _idle() -> tuple[float, float, float, Callable[[], str]]:
    return 0.0, 0.0, time.monotonic(), lambda: STORE
