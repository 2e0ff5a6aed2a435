"""A clean stop: Ctrl-C, SIGTERM and SIGUSR1 end a run at the next safe point, with a checkpoint."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

SAME_S = 0.5
"""A signal again within this time is the same stop: ``timeout`` and others send it to a process and
to the group that the process is in."""
_ENTERED: list["StopSignal"] = []
"""Those of the commands under way, the innermost last: signals are the whole process's."""


def heed() -> None:
    """Raise StopRequested if a signal has come; called about each second by what waits in the main
    thread while a command starts, far from who stops it. Commands without StopSignal hear none."""
    if _ENTERED:
        _ENTERED[-1].check()


class StopRequested(Exception):  # noqa: N818  (not an error)
    """Raised at a safe point after a signal; carries the signal's number and when it came."""

    def __init__(self, signal_number: int, received_s: float = 0.0) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number
        self.received_s = received_s
        """On the monotonic clock."""


class StopSignal:
    """While entered, the first signal is remembered, and told with what is done ``meanwhile``; a
    second one interrupts at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, meanwhile: str) -> None:
        self.meanwhile = meanwhile
        self._received: StopRequested | None = None
        self._held = False

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in self.SIGNALS}
        self._arm()
        _ENTERED.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _ENTERED.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise StopRequested if a signal has come; call it where stopping loses nothing."""
        # Ray sets its own handler of SIGTERM when it starts, where Python cannot see it.
        self._arm()
        if self._received is not None and not self._held:
            raise self._received

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing stops: between an update and its bookkeeping a stop would lose it."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _arm(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if (first := self._received) is not None:
            if number == first.signal_number and now_s - first.received_s < SAME_S:
                return
            raise KeyboardInterrupt
        self._received = StopRequested(number, now_s)
        print(f"\nstopping: {self.meanwhile}; once more stops at once", flush=True)
