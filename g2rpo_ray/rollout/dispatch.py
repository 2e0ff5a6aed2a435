"""Dispatch: which worker gets which task, and when to look after it. No Ray and no clock.

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
        tasks: they are numbered from 0, and handed out in the order in which they are offered.
        deadline: how long a worker's own work on a task may take.
    """

    def __init__(self, tasks: int, deadline: LearnedDeadline) -> None:
        self.tasks, self._deadline = tasks, deadline
        self._waiting: deque[int] = deque()
        self._offered = 0
        self._seasoned: dict[int, bool] = {}
        """By worker: whether it has finished a task of this kind before."""
        self._idle: deque[int] = deque()
        self._running: dict[int, tuple[int, float]] = {}
        """By worker: its task, and when that was handed out."""
        self._alarms: list[tuple[float, int, int]] = []
        """Heap of (when to look after it, worker, task); where its task has ended it is stale."""
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

    def offer(self, task: int) -> None:
        """The task can be done: what it needs is there."""
        self._waiting.append(task)
        self._offered += 1

    @property
    def lacking(self) -> int:
        """Tasks that were not offered yet."""
        return self.tasks - self._offered

    @property
    def starved(self) -> int:
        """Workers that could do a task which was not offered yet."""
        idle = len(self._seasoned) - len(self._running)
        return min(idle, self.lacking) if not self._waiting else 0

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
            self.prolong(worker, now_s + self.allowed_s(worker))
            yield worker, task

    def allowed_s(self, worker: int) -> float:
        """How long a worker may work on its task."""
        deadline = self._deadline
        return deadline.deadline_s if self._seasoned[worker] else deadline.limit_s

    def task_of(self, worker: int) -> int:
        """The task that a worker has."""
        return self._running[worker][0]

    def held_s(self, worker: int, task: int, now_s: float) -> float | None:
        """How long ago the worker was given the task; None where it has it no more."""
        current, started_s = self._running.get(worker, (None, 0.0))
        return now_s - started_s if current == task else None

    def prolong(self, worker: int, until_s: float) -> None:
        """Look after a worker that has a task, but not before then."""
        task, _ = self._running[worker]
        heapq.heappush(self._alarms, (until_s, worker, task))

    def attempts(self, task: int) -> int:
        """How often the task was handed out."""
        return self._attempts[task]

    def accept(self, worker: int, task: int, own_s: float) -> bool:
        """A good answer; False if it does not count: its task runs elsewhere, or is done.

        Args:
            own_s: what the worker's own work took.
        """
        if self._running.get(worker, (None,))[0] != task:
            return False
        del self._running[worker]
        assert task not in self._accepted
        self._accepted.add(task)
        self._deadline.record(own_s)
        self._seasoned[worker] = True
        self._idle.append(worker)
        return True

    def overdue(self, now_s: float) -> list[int]:
        """Workers to look after by now, since they have not answered."""
        late = []
        while self._alarms and self._alarms[0][0] <= now_s:
            _, worker, task = heapq.heappop(self._alarms)
            if worker in self._running and self._running[worker][0] == task:
                late.append(worker)
        return late
