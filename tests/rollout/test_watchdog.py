"""What a worker says of itself, and what the watchdog makes of it; no Ray."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import MagicMock

from g2rpo_ray.cluster.deadlines import LearnedDeadline
from g2rpo_ray.rollout.dispatch import Dispatch
from g2rpo_ray.rollout.member import Event
from g2rpo_ray.rollout.phases import STORE, Phase
from g2rpo_ray.rollout.waits import Waits
from g2rpo_ray.rollout.watchdog import PHASE, Watchdog

LIMIT_S = 100.0


def verdict(phase: Phase, at_s: float) -> tuple[str | None, list[str]]:
    """Of a worker that got its task at 0 s and says this; and what was told of it."""
    dispatch = Dispatch(1, LearnedDeadline(LIMIT_S, 1.0))
    dispatch.join(0, seasoned=True)
    dispatch.offer(0)
    assert list(dispatch.assign(0.0)) == [(0, 0)]
    told: list[str] = []
    crew = MagicMock(members={0: SimpleNamespace(name="worker 0", handle=MagicMock())})
    watchdog = Watchdog(dispatch, crew, LIMIT_S, Waits(told.append))
    future: Future = Future()
    future.set_result(phase)
    return watchdog.hear(Event(0, PHASE, 0, future, at_s)), told


def test_a_task_that_does_not_come_is_told_and_at_last_the_worker_s_end() -> None:
    # It had nothing to do for 500 s before.
    assert verdict(Phase(0.0, 540.0, STORE), 40.0) == (
        None,
        ["worker 0: waiting for the object store, 40 s so far"],
    )
    cause, _ = verdict(Phase(0.0, 601.0, STORE), 101.0)
    assert cause == "got no prompt in 101 s from the object store of its node (rollout.timeout_s)"


def test_one_whose_answer_is_on_its_way_is_left_alone() -> None:
    """Scorers took long, and the answer is being stored: it waits for no prompt of this run."""
    assert verdict(Phase(0.0, 0.2, STORE), 900.0) == (None, [])


def test_only_own_work_is_held_against_it() -> None:
    assert verdict(Phase(5.0, 895.0, "reward 'judge'"), 900.0) == (
        None,
        ["worker 0: waiting for reward 'judge', 895 s so far"],
    )
    cause, _ = verdict(Phase(LIMIT_S, 0.0, None), LIMIT_S)
    assert cause is not None
    assert "its own work takes 100 s so far, and may take 100" in cause
