"""Dispatch: whatever happens to workers, every task is accepted exactly once."""

import random

import pytest

from g2rpo_ray.cluster.deadlines import FACTOR, LearnedDeadline
from g2rpo_ray.rollout.dispatch import Dispatch


def deadline() -> LearnedDeadline:
    return LearnedDeadline(limit_s=100.0, floor_s=2.0)


def dispatch_of(tasks: int, history: LearnedDeadline | None = None) -> Dispatch:
    dispatch = Dispatch(tasks, history or deadline())
    for task in range(tasks):
        dispatch.offer(task)
    return dispatch


def test_a_worker_has_one_task_and_gets_the_next_when_it_is_done() -> None:
    dispatch = dispatch_of(3)
    dispatch.join(7, seasoned=True)
    assert list(dispatch.assign(0.0)) == [(7, 0)]
    assert list(dispatch.assign(0.0)) == []
    assert dispatch.accept(7, 0, 1.0)
    assert list(dispatch.assign(1.0)) == [(7, 1)]


def test_the_task_of_a_worker_that_left_is_next() -> None:
    dispatch = dispatch_of(3)
    dispatch.join(0, seasoned=True)
    dispatch.join(1, seasoned=True)
    assert list(dispatch.assign(0.0)) == [(0, 0), (1, 1)]
    assert dispatch.leave(0) == 0
    assert dispatch.accept(1, 1, 1.0)
    assert list(dispatch.assign(1.0)) == [(1, 0)]
    assert dispatch.attempts(0) == 2
    assert dispatch.attempts(1) == 1


def test_a_late_answer_does_not_count() -> None:
    dispatch = dispatch_of(1)
    dispatch.join(0, seasoned=True)
    list(dispatch.assign(0.0))
    dispatch.leave(0)
    assert not dispatch.accept(0, 0, 1.0)
    dispatch.join(1, seasoned=True)
    assert list(dispatch.assign(1.0)) == [(1, 0)]
    assert not dispatch.accept(0, 0, 1.5)
    assert dispatch.accept(1, 0, 2.0)
    assert not dispatch.accept(1, 0, 2.0)
    assert dispatch.is_done


def test_overdue_by_the_pools_history_but_a_workers_first_task_may_take_the_limit() -> None:
    history = deadline()
    for _ in range(5):
        history.record(1.0)
    dispatch = dispatch_of(2, history)
    dispatch.join(0, seasoned=True)
    dispatch.join(1, seasoned=False)
    list(dispatch.assign(0.0))
    assert dispatch.overdue(FACTOR - 0.1) == []
    assert dispatch.overdue(FACTOR + 0.1) == [0]
    assert dispatch.overdue(99.0) == []
    assert dispatch.overdue(100.1) == [1]


def test_a_task_is_handed_out_once_it_is_offered() -> None:
    dispatch = Dispatch(2, deadline())
    dispatch.join(0, seasoned=True)
    assert list(dispatch.assign(0.0)) == []
    assert (dispatch.lacking, dispatch.starved) == (2, 1)
    dispatch.offer(1)
    assert list(dispatch.assign(50.0)) == [(0, 1)]
    assert (dispatch.lacking, dispatch.starved) == (1, 0)
    # Its clock began when it was handed out.
    assert dispatch.held_s(0, 1, 51.0) == 1.0
    assert dispatch.overdue(149.0) == []
    dispatch.prolong(0, 300.0)
    assert dispatch.overdue(150.0) == [0]
    assert dispatch.overdue(299.0) == []
    assert dispatch.overdue(300.0) == [0]


def test_a_deadline_is_kept_between_its_bounds() -> None:
    history = deadline()
    assert history.deadline_s == 100.0
    history.record(0.01)
    assert history.deadline_s == 2.0
    for _ in range(5):
        history.record(50.0)
    assert history.deadline_s == 100.0


@pytest.mark.parametrize("seed", range(20))
def test_any_comings_and_goings_lose_and_double_nothing(seed: int) -> None:
    chance = random.Random(seed)
    dispatch = dispatch_of(200)
    living: set[int] = set()
    running: dict[int, int] = {}
    accepted: list[int] = []
    number = 0
    now_s = 0.0
    while not dispatch.is_done:
        now_s += 1.0
        if len(living) < 5:
            dispatch.join(number, seasoned=chance.random() < 0.5)
            living.add(number)
            number += 1
        for worker, task in dispatch.assign(now_s):
            assert worker in living
            running[worker] = task
        if not running:
            continue
        worker = chance.choice(sorted(running))
        if chance.random() < 0.3:
            dispatch.leave(worker)
            living.discard(worker)
        elif dispatch.accept(worker, running[worker], 1.0):
            assert worker in living
            accepted.append(running[worker])
        if chance.random() < 0.7:
            # Else it may answer once more, although it is gone or done.
            del running[worker]
        for late in dispatch.overdue(now_s):
            dispatch.leave(late)
            living.remove(late)
    assert sorted(accepted) == list(range(200))
