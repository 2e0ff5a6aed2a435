"""Who hangs and who waits: workers that take long are asked, and their own work alone is timed."""

from collections.abc import Iterator

from g2rpo_ray.rollout.crew import PING_S, Crew
from g2rpo_ray.rollout.dispatch import Dispatch
from g2rpo_ray.rollout.member import Event
from g2rpo_ray.rollout.phases import STORE
from g2rpo_ray.rollout.waits import Waits

PHASE = "phase"
ASK_AGAIN_S = 1.0


class Watchdog:
    """Looks after the workers of one ``Dispatch``.

    Args:
        limit_s: ``rollout.timeout_s``; so long a task may be on its way to a worker.
    """

    def __init__(self, dispatch: Dispatch, crew: Crew, limit_s: float, waits: Waits) -> None:
        self._dispatch, self._crew, self._limit_s, self._waits = dispatch, crew, limit_s, waits
        self._asked: set[int] = set()
        """Workers that have not said yet what they do."""

    def look(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Asks those whose answer could be there; yields who hangs, and why."""
        for worker in self._dispatch.overdue(now_s):
            if worker in self._asked:
                yield worker, f"does not answer: not even what it does, for {PING_S:g} s"
                continue
            self._asked.add(worker)
            handle = self._crew.members[worker].handle
            self._crew.watch(handle.phase.remote(), worker, PHASE, self._dispatch.task_of(worker))
            self._dispatch.prolong(worker, now_s + PING_S)

    def hear(self, event: Event) -> str | None:
        """A worker says what it does; what is wrong with it, None if nothing is."""
        if event.future.exception() is not None:
            # It died, which its task's answer says, too; else it counts as not answering.
            return None
        worker, phase = event.worker, event.future.result()
        self._asked.discard(worker)
        held_s = self._dispatch.held_s(worker, event.task, event.at_s)
        if held_s is None:
            return None
        allowed_s = self._dispatch.allowed_s(worker)
        if phase.own_s >= allowed_s:
            return (
                f"does not answer: its own work takes {phase.own_s:.0f} s so far, and may take "
                f"{allowed_s:.0f} (rollout.timeout_s, rollout.min_deadline_s)"
            )
        # One that has just answered waits for its next prompt, while the answer is on its way.
        waited_s = min(held_s, phase.waited_s) if phase.waiting_for == STORE else phase.waited_s
        if phase.waiting_for == STORE and waited_s > self._limit_s:
            return f"got no prompt in {waited_s:.0f} s from {STORE} of its node (rollout.timeout_s)"
        if phase.waiting_for is not None:
            self._waits.note(self._crew.members[worker].name, phase.waiting_for, waited_s)
        self._dispatch.prolong(worker, event.at_s + max(ASK_AGAIN_S, allowed_s - phase.own_s))
        return None
