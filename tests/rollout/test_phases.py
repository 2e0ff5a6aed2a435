"""A worker's own work, told apart from what it waits for, as a thread that asks sees it."""

import pytest

from g2rpo_ray.rollout import phases
from g2rpo_ray.rollout.phases import STORE, OwnTime, Phase


class Clock:
    """Seconds that pass when the test says so."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    return clock


def test_only_own_work_counts(clock: Clock) -> None:
    own = OwnTime()
    clock.now_s += 50
    assert own.now() == Phase(0.0, 50.0, STORE)
    names = ["reward 'clip'", "reward 'judge'"]
    with own.task():
        clock.now_s += 3
        assert own.now() == Phase(3.0, 0.0, None)
        with own.waiting(lambda: names[0]):
            clock.now_s += 200
            assert own.now() == Phase(3.0, 200.0, "reward 'clip'")
            names.pop(0)
            assert own.now().waiting_for == "reward 'judge'"
        clock.now_s += 1
        with own.task():
            # A part of the task that uses what is a task elsewhere.
            clock.now_s += 1
        assert own.now() == Phase(5.0, 200.0, None)
    assert own.now() == Phase(0.0, 0.0, STORE)


def test_a_wait_that_fails_is_over(clock: Clock) -> None:
    own = OwnTime()

    def ask() -> None:
        clock.now_s += 5
        raise TimeoutError

    with own.task():
        with pytest.raises(TimeoutError), own.waiting(lambda: "a scorer"):
            ask()
        assert own.now() == Phase(0.0, 5.0, None)
    with pytest.raises(ZeroDivisionError), own.task():
        raise ZeroDivisionError
    assert own.now().waiting_for == STORE
