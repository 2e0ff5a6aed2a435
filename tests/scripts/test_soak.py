"""scripts/soaking/faults.py: what counts against a run. Whole soaks are in tests/chaos."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from soaking import cluster, faults


class FakeDriver:
    """Makes an iteration whenever somebody looks, and ends by itself where it is told to."""

    def __init__(self, dies_in: tuple[int, ...] = ()) -> None:
        self.done, self.dies_in, self.lives, self.killed = 0, dies_in, 1, 0
        self.process = SimpleNamespace(poll=self.poll, pid=0)

    def poll(self) -> int | None:
        return 1 if self.done in self.dies_in and self.lives == 1 + self.killed else None

    def start(self) -> None:
        self.lives += 1

    def kill(self) -> None:
        self.killed += 1

    def iterations(self) -> int:
        self.done += 1
        return self.done


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(faults, "wait_for", lambda condition, *_: wait_for(condition))
    return faults


def wait_for(condition: Any) -> None:
    for _ in range(10):
        if condition():
            return
    raise AssertionError("never")


def disturbed(soak: ModuleType, kinds: list[str], driver: FakeDriver, limit_s: float = 60.0) -> Any:
    nodes = SimpleNamespace(kill_second=lambda: None, add_second=lambda: None)
    run = soak.Soak(nodes, 0)
    run.disturb(kinds, limit_s, driver)
    return run


def test_two_faults_are_made_whatever_the_limit(soak: ModuleType) -> None:
    run = disturbed(soak, ["raylet_kill"] * 4, FakeDriver(), limit_s=-1.0)
    assert len(run.faults) == 2


def test_only_what_is_frozen_gets_short_deadlines(tmp_path: Path) -> None:
    killed, frozen = (
        faults.soak_config(tmp_path / "run", "here:1", ["rank_kill", other])
        for other in ("worker_kill", "worker_freeze")
    )
    assert (frozen.rollout.timeout_s, frozen.learner.min_deadline_s) == (30, 8)
    assert killed.rollout.timeout_s > 300 < killed.learner.timeout_s
    assert killed.rewards["clip"].health_timeout_s > frozen.rewards["clip"].health_timeout_s


def test_a_driver_that_is_killed_on_purpose_has_not_died(soak: ModuleType) -> None:
    driver = FakeDriver()
    assert disturbed(soak, ["driver_kill"] * 3, driver).driver_deaths == []
    assert (driver.lives, driver.killed) == (4, 3)


@pytest.mark.parametrize(
    ("kinds", "cause"),
    [
        (["driver_kill", "driver_kill"], "driver_kill"),
        # What a lost node takes with it may be missed one fault later.
        (["raylet_kill", "driver_kill"], "raylet_kill"),
    ],
)
def test_a_driver_that_ends_by_itself_is_counted(
    soak: ModuleType, kinds: list[str], cause: str
) -> None:
    driver = FakeDriver(dies_in=(5,))
    assert disturbed(soak, kinds, driver).driver_deaths == [cause]


def test_what_leaves_late_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"actors": ["late"]}, {"actors": []}])
    monkeypatch.setattr(cluster, "left_behind", lambda *_: next(found))
    monkeypatch.setattr(
        cluster, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    )
    assert cluster.left_at_last(cast(cluster.Nodes, None), "") == {"actors": []}
