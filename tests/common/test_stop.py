"""Signals: remembered until a safe point, and heard while the roles are still starting."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from g2rpo_ray.common import stop as stop_module
from g2rpo_ray.common.stop import StopRequested, StopSignal
from g2rpo_ray.config import Config
from g2rpo_ray.training import train as train_module
from g2rpo_ray.training.roles import Roles
from tests.tiny import tiny_config

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_raised_at_the_next_check_with_its_number(number: signal.Signals) -> None:
    with StopSignal("all stays") as stop:
        stop.check()
        signal.raise_signal(number)
        with pytest.raises(StopRequested, match=number.name) as caught:
            stop.check()
    assert caught.value.signal_number == number


def test_a_second_signal_interrupts_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with StopSignal("all stays"):
        signal.raise_signal(signal.SIGINT)
        told = "stopping: all stays; once more stops at once"
        assert told in capsys.readouterr().out
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_one_stop_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ``timeout``, which signals its child and then the group that both are in."""
    with StopSignal("all stays") as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequested):
            stop.check()
        monkeypatch.setattr(stop_module, "SAME_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_nothing_stops_while_a_stop_is_held() -> None:
    with StopSignal("all stays") as stop:
        with stop.held():
            signal.raise_signal(signal.SIGTERM)
            stop.check()
        with pytest.raises(StopRequested):
            stop.check()


def test_the_handlers_of_before_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal("all stays"):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_during_the_start_does_not_wait_for_the_other_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, ended = [], []

    @contextmanager
    def launch(
        _config: Config, _checkpoint: Path | None, note: Callable[[str], None]
    ) -> Iterator[Roles]:
        try:
            for role in ("workers", "ranks"):
                note(f"starting {role}")
                started.append(role)
                signal.raise_signal(signal.SIGINT)
            pytest.fail("all roles were started")
            yield
        finally:
            ended.append("all")

    monkeypatch.setattr(train_module, "launch", launch)
    with pytest.raises(StopRequested):
        train_module.train(tiny_config(tmp_path / "run"))
    assert (started, ended) == (["workers"], ["all"])
    told = capsys.readouterr().out
    assert "the roles that have started are ended first" in told
    assert "checkpoint" not in told, "there is none yet"
