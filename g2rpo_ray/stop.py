"""A clean stop: Ctrl-C and SIGTERM end a run at the next safe point, with a checkpoint."""

import signal
from types import FrameType
from typing import Self


class StopRequested(Exception):  # noqa: N818  (not an error)
    """Raised at a safe point after a signal; carries the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class StopSignal:
    """While entered, the first signal is remembered; a second one interrupts at once.

    Args:
        meanwhile: what happens before the stop, in words.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, meanwhile: str = "a checkpoint is written first") -> None:
        self._meanwhile = meanwhile
        self._received: int | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in self.SIGNALS}
        for number in self.SIGNALS:
            signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise StopRequested if a signal has come; call it where stopping loses nothing."""
        if self._received is not None:
            raise StopRequested(self._received)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = number
        print(f"\nstopping: {self._meanwhile}; once more stops at once", flush=True)
