"""Who is waited for, in the driver's log: a long wait is no fault of who waits."""

from collections.abc import Callable

WAIT_LINE_S = 30.0
"""Of a wait so long there is a line; the next one after twice as long."""


class Waits:
    """Tells who is waited for: a line for each, after 30 s, 60 s, 120 s, ... of one wait."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._next_s: dict[str, float] = {}

    def note(self, who: str, for_whom: str, seconds: float) -> None:
        """``who`` has waited so long so far."""
        if seconds < WAIT_LINE_S:
            self._next_s.pop(for_whom, None)
        elif seconds >= self._next_s.get(for_whom, WAIT_LINE_S):
            self._next_s[for_whom] = 2 * seconds
            self._tell(f"{who}: waiting for {for_whom}, {seconds:.0f} s so far")
