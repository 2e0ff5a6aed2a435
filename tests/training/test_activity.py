"""Idle time of the roles: what they worked, by how many of them were there for how long."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from g2rpo_ray.training import activity as activity_module
from g2rpo_ray.training.activity import Activity


def test_idle_is_the_part_of_all_replicas_time_that_none_of_them_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(activity_module, "living_nodes", lambda: ["head", "another"])
    pool: Any = SimpleNamespace(
        workers=[1],
        busy_s=0.0,
        replacements=0,
        repeats=0,
        replica_busy_s=Counter({"a": 5.0}),
        encoder_wait_s=0.0,
        store_wait_s=0.0,
    )
    learner: Any = SimpleNamespace(busy_s=0.0, rebuilds=0, written_s=0.0)
    running = 2
    rewards: Any = SimpleNamespace(replicas=lambda: {"hps": running})
    roles: Any = SimpleNamespace(pool=pool, learner=learner, rewards=rewards)
    heldout: Any = SimpleNamespace(missed=0)
    activity = Activity(roles, heldout)

    now_s, pool.busy_s, learner.busy_s, learner.written_s = 110.0, 8.0, 3.0, 1.5
    # One replica worked 2 s more, another one is new.
    pool.replica_busy_s |= Counter({"a": 7.0, "b": 1.0})
    lap = activity.lap()
    assert lap["idle/rewards"] == pytest.approx(1 - 3.0 / (2 * 10.0))
    there = ("cluster/nodes", "rollout/workers", "reward/hps/replicas")
    assert [lap[name] for name in there] == [2, 1, 2]
    assert lap["idle/rollout"] == pytest.approx(0.2)
    assert lap["idle/learner"] == pytest.approx(0.7)
    assert lap["checkpoint/write_s"] == pytest.approx(1.5)

    # A replica was lost: what it worked before is not taken back.
    now_s, running = 120.0, 1
    pool.replica_busy_s |= Counter({"b": 6.0})
    assert activity.lap()["idle/rewards"] == pytest.approx(0.5)
