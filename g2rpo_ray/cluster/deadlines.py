"""How long something may take, learned from how long it took before."""

from collections import deque
from statistics import median

FACTOR = 5.0
HISTORY = 31


class LearnedDeadline:
    """``FACTOR`` times the median of the last ``HISTORY`` durations, kept between two bounds.

    Args:
        limit_s: upper bound, and the answer while nothing is known.
        floor_s: lower bound: short tasks vary by more than a factor.
    """

    def __init__(self, limit_s: float, floor_s: float) -> None:
        self.limit_s = limit_s
        self._floor_s = min(floor_s, limit_s)
        self._seconds: deque[float] = deque(maxlen=HISTORY)
        self.deadline_s = limit_s
        """Seconds after which a task counts as hanging."""

    def record(self, seconds: float) -> None:
        """Learn from one that ended well."""
        self._seconds.append(seconds)
        wanted_s = FACTOR * median(self._seconds)
        self.deadline_s = max(self._floor_s, min(wanted_s, self.limit_s))
