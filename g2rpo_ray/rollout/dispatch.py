"""Dispatch: which worker gets which task, and when its answer is overdue. No Ray and no clock.

An event costs the same with 8 workers and with 512: queues and a heap, nothing is searched.
"""

import heapq
from collections import Counter, deque
from collections.abc import Container, Iterator

from g2rpo_ray.cluster.deadlines import LearnedDeadline


class Dispatch:
    """Tasks handed out one by one: at least once each, and each accepted exactly once.

    A worker has one task at a time. Where prompts take seconds the driver's milliseconds between
    two of them are nothing, and no task waits behind another while a worker is idle.

    Args:
        tasks: they are numbered from 0, and handed out in that order.
        deadline: how long a task may take.
    """

    def __init__(self, tasks: int, deadline: LearnedDeadline) -> None:
        self.tasks, self._deadline = tasks, deadline
        self._waiting = deque(range(tasks))
        self._seasoned: dict[int, bool] = {}
        """By worker: whether it has finished a task of this kind before."""
        self._idle: deque[int] = deque()
        self._running: dict[int, tuple[int, float]] = {}
        """By worker: its task, and when that was handed out."""
        self._alarms: list[tuple[float, int, int]] = []
        """Heap of (deadline, worker, task); an entry whose task has ended is stale."""
        self._attempts: Counter[int] = Counter()
        self._accepted: set[int] = set()

    @property
    def done(self) -> int:
        return len(self._accepted)

    @property
    def is_done(self) -> bool:
        return self.done == self.tasks

    @property
    def busy(self) -> Container[int]:
        """Workers that have a task."""
        return self._running

    def join(self, worker: int, *, seasoned: bool) -> None:
        """A worker that may be given tasks. A new one's first may take as long as the limit says:
        it compiles and fills caches that the others' history knows nothing of."""
        self._seasoned[worker] = seasoned
        self._idle.append(worker)

    def leave(self, worker: int) -> int | None:
        """A worker is gone; its task, if it had one, is next to be handed out."""
        self._seasoned.pop(worker, None)
        task, _ = self._running.pop(worker, (None, 0.0))
        if task is not None:
            self._waiting.appendleft(task)
        return task

    def assign(self, now_s: float) -> Iterator[tuple[int, int]]:
        """(worker, task) pairs to be started now."""
        while self._waiting and self._idle:
            worker = self._idle.popleft()
            if worker not in self._seasoned:
                continue
            task = self._waiting.popleft()
            self._attempts[task] += 1
            self._running[worker] = task, now_s
            deadline = self._deadline
            allowed_s = deadline.deadline_s if self._seasoned[worker] else deadline.limit_s
            heapq.heappush(self._alarms, (now_s + allowed_s, worker, task))
            yield worker, task

    def attempts(self, task: int) -> int:
        """How often the task was handed out."""
        return self._attempts[task]

    def accept(self, worker: int, task: int, now_s: float) -> bool:
        """A good answer; False if it does not count: its task runs elsewhere, or is done."""
        current, started_s = self._running.get(worker, (None, 0.0))
        if current != task:
            return False
        del self._running[worker]
        assert task not in self._accepted
        self._accepted.add(task)
        self._deadline.record(now_s - started_s)
        self._seasoned[worker] = True
        self._idle.append(worker)
        return True

    def overdue(self, now_s: float) -> list[int]:
        """Workers whose answer should have come by now."""
        late = []
        while self._alarms and self._alarms[0][0] <= now_s:
            _, worker, task = heapq.heappop(self._alarms)
            if worker in self._running and self._running[worker][0] == task:
                late.append(worker)
        return late
