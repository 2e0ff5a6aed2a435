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
    monkeypatch.setattr(crew_module, "autoscaler_says", lambda: "")
    return clock


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def crew(tmp_path: Path, clock: Clock, told: list[str]) -> Crew:
    """One member, tended to for the first time; answers come from ``answer``."""
    return make_crew(tmp_path, clock, told)


def make_crew(tmp_path: Path, clock: Clock, told: list[str], *overrides: str) -> Crew:
    limit = f"cluster.start_timeout_s={LIMIT_S}"
    config = tiny_config(tmp_path, "rollout.workers=1", limit, *overrides)

    def hire(_avoided: object) -> Any:
        return SimpleNamespace(__ray_call__=MagicMock(), start=MagicMock())

    crew = Crew(config, MagicMock(), hire, told.append, "rollout worker")
    crew.tend(clock.now_s)
    return crew


def answer(crew: Crew, what: str, value: Any, at_s: float) -> None:
    """Of every member that has not been ready before."""
    future: Future = Future()
    future.set_result(value)
    for member in crew.members.values():
        if member.stage != "ready":
            crew.handle(Event(member.number, what, -1, future, at_s))


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


def test_who_waits_for_weights_is_not_timed(
    crew: Crew, clock: Clock, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "threading", SimpleNamespace(Thread=MagicMock()))
    crew._sync, crew._weight_version = MagicMock(), 5
    answer(crew, "placed", None, clock.now_s)
    answer(crew, "started", "", clock.now_s)
    (member,) = crew.members.values()
    assert member.stage == "getting weights"
    # The learner is in an update far longer than the limit, and the only member waits for it.
    tend_for(crew, clock, 20 * LIMIT_S)
    assert (crew.losses, told) == (0, [])


def test_a_shortage_counts_only_while_somebody_looks(crew: Crew, clock: Clock) -> None:
    clock.now_s += 10 * LIMIT_S
    crew.tend(clock.now_s)
    with pytest.raises(RolloutError, match="1 rollout workers are wanted"):
        tend_for(crew, clock, 2 * LIMIT_S + crew_module.LONGEST_PAUSE_S)


def test_calls_far_apart_end_a_wait_too(crew: Crew, clock: Clock) -> None:
    with pytest.raises(RolloutError):
        tend_for(crew, clock, 100 * LIMIT_S, every_s=10.0)


def test_members_without_work_end_and_come_again_with_it(
    tmp_path: Path, clock: Clock, told: list[str]
) -> None:
    crew = make_crew(tmp_path, clock, told, "rollout.max_workers=3", "rollout.idle_timeout_s=10")
    # Nobody has asked for more yet than the run starts with.
    assert len(crew.members) == 1
    crew.work = 5
    crew.tend(clock.now_s)
    answer(crew, "started", "", clock.now_s)
    assert len(crew.ready) == 3
    clock.now_s += 11
    assert crew.release(clock.now_s) == []
    crew.work = 2
    assert crew.release(clock.now_s) == []
    clock.now_s += 11
    # The newest has a task: the next one goes, and no more than there is no work for.
    assert [member.number for member in crew.release(clock.now_s, busy={2})] == [1]
    assert crew.release(clock.now_s) == []
    assert "no work for it in 10 s (rollout.idle_timeout_s)" in told[0]
    crew.praise(crew.members[2], "rollout")
    crew.work = 0
    clock.now_s += 5
    # Nobody was needed less than the others for long enough yet; and the last one stays.
    assert crew.release(clock.now_s) == []
    clock.now_s += 11
    assert len(crew.release(clock.now_s)) == 1
    assert crew.release(clock.now_s) == []
    crew.tend(clock.now_s)
    assert len(crew.members) == 1
    assert crew.losses == 0
    crew.work = 3
    crew.tend(clock.now_s)
    assert len(crew.members) == 3


def test_a_member_that_loads_is_not_ended_for_want_of_work(
    tmp_path: Path, clock: Clock, told: list[str]
) -> None:
    crew = make_crew(tmp_path, clock, told, "rollout.max_workers=3", "rollout.idle_timeout_s=10")
    crew.work = 3
    crew.tend(clock.now_s)
    assert crew.release(clock.now_s) == []
    first, second, third = crew.members.values()
    first.stage, second.stage = "ready", "loading"
    crew.work = 0
    clock.now_s += 11
    # What has no place yet is not asked for any more.
    assert [member.number for member in crew.release(clock.now_s, busy={0})] == [third.number]
    clock.now_s += 11
    assert crew.release(clock.now_s, busy={0}) == []
    second.stage = "ready"
    assert crew.release(clock.now_s, busy={0}) == [second]


def test_members_stay_where_no_idle_time_is_set(
    tmp_path: Path, clock: Clock, told: list[str]
) -> None:
    crew = make_crew(tmp_path, clock, told, "rollout.max_workers=3")
    crew.work = 0
    clock.now_s += 10_000
    assert crew.release(clock.now_s) == []
    assert len(crew.members) == 3


def test_that_more_find_no_place_is_told_once(
    tmp_path: Path, clock: Clock, told: list[str]
) -> None:
    crew = make_crew(tmp_path, clock, told, "rollout.max_workers=3")
    first, *_ = crew.members.values()
    first.stage = "ready"
    tend_for(crew, clock, 3 * LIMIT_S)
    (line,) = told
    assert "no place yet for 2 more; going on with 1" in line
    assert "2 placing" in line


def test_members_may_come_while_another_thread_asks_who_is_ready(crew: Crew) -> None:
    class Coming:
        """While it is looked at, one more is there."""

        @property
        def stage(self) -> str:
            crew.members[1 + len(crew.members)] = crew.members[0]
            return "ready"

    crew.members[1] = Coming()  # type: ignore[assignment]
    assert len(crew.ready) == 1
