"""The crew's clocks, with a clock of the test and members that are no actors."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from g2rpo_ray.rollout import crew as crew_module
from g2rpo_ray.rollout.crew import Crew, Event, RolloutError
from g2rpo_ray.rollout.pool import POLL_S
from tests.tiny import tiny_config

LIMIT_S = 30.0


class Clock:
    """Seconds that pass when the test says so."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(crew_module, "time", clock)
    monkeypatch.setattr(crew_module.ray, "kill", lambda _: None)
    monkeypatch.setattr(crew_module, "living_nodes", lambda: [])
    return clock


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def crew(tmp_path: Path, clock: Clock, told: list[str]) -> Crew:
    """One member, tended to for the first time; answers come from ``answer``."""
    config = tiny_config(tmp_path, "rollout.workers=1", f"cluster.start_timeout_s={LIMIT_S}")

    def hire(_avoided: object) -> Any:
        return SimpleNamespace(__ray_call__=MagicMock(), start=MagicMock())

    crew = Crew(config, MagicMock(), hire, told.append, "rollout worker")
    crew.tend(clock.now_s)
    return crew


def answer(crew: Crew, what: str, value: Any, at_s: float) -> None:
    future: Future = Future()
    future.set_result(value)
    (member,) = crew.members
    crew.handle(Event(member, what, -1, future, at_s))


def tend_for(crew: Crew, clock: Clock, seconds: float, every_s: float = POLL_S) -> None:
    """As a pool that waits does."""
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        clock.now_s += every_s
        crew.tend(clock.now_s)


def test_a_member_that_loads_while_nobody_looks_is_not_lost(
    crew: Crew, clock: Clock, told: list[str]
) -> None:
    answer(crew, "placed", None, clock.now_s)
    tend_for(crew, clock, LIMIT_S / 2)
    # A long update: it ended loading meanwhile, which is read after the next tend.
    clock.now_s += 10 * LIMIT_S
    crew.tend(clock.now_s)
    assert (crew.losses, told) == (0, [])
    answer(crew, "started", "", clock.now_s - 5 * LIMIT_S)
    assert len(crew.ready) == 1


def test_a_member_that_hangs_is_lost_after_the_time_in_which_it_was_looked_at(
    crew: Crew, clock: Clock, told: list[str]
) -> None:
    answer(crew, "placed", None, clock.now_s)
    clock.now_s += 10 * LIMIT_S
    tend_for(crew, clock, LIMIT_S / 2)
    assert crew.losses == 0
    tend_for(crew, clock, LIMIT_S)
    assert crew.losses == 1
    assert "was loading for 30 s (cluster.start_timeout_s)" in told[0]


def test_getting_weights_begins_when_they_are_sent(
    crew: Crew, clock: Clock, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "threading", SimpleNamespace(Thread=MagicMock()))
    crew._sync, crew._weight_version = MagicMock(), 5
    # Placed and started in the middle of a long update.
    answer(crew, "placed", None, clock.now_s)
    clock.now_s += 10 * LIMIT_S
    answer(crew, "started", "", clock.now_s - 5 * LIMIT_S)
    (member,) = crew.members.values()
    assert member.stage == "getting weights"
    tend_for(crew, clock, LIMIT_S / 2)
    assert crew.losses == 0
    tend_for(crew, clock, LIMIT_S)
    assert "was getting weights for 30 s" in told[0]


def test_a_shortage_counts_only_while_somebody_looks(crew: Crew, clock: Clock) -> None:
    clock.now_s += 10 * LIMIT_S
    crew.tend(clock.now_s)
    with pytest.raises(RolloutError, match="1 rollout workers are wanted"):
        tend_for(crew, clock, 2 * LIMIT_S + crew_module.LONGEST_PAUSE_S)


def test_calls_far_apart_end_a_wait_too(crew: Crew, clock: Clock) -> None:
    with pytest.raises(RolloutError):
        tend_for(crew, clock, 100 * LIMIT_S, every_s=10.0)
