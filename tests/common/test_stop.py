"""Signals: remembered until a safe point, and heard while the roles are still starting."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from g2rpo_ray.cluster import connect, placement
from g2rpo_ray.common import stop as stop_module
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.stop import StopRequested, StopSignal
from g2rpo_ray.config import Config
from g2rpo_ray.rewards import server
from g2rpo_ray.rollout.pool import RolloutPool
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


def wait_for_a_node(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "living_nodes", list)
    placement.wait_for_nodes(config, lambda _: None)


def wait_for_a_head(_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect.socket, "create_connection", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(connect, "HEAD_TRIES", 2)
    connect._check_head("10.0.0.1:6379")


def wait_for_a_reward(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = SimpleNamespace(status="DEPLOYING", message="", deployments={})
    applications = {f"g2rpo-{name}": loading for name in config.rewards}
    monkeypatch.setattr(server.serve, "status", lambda: SimpleNamespace(applications=applications))
    server.wait_for_servers("g2rpo", config.rewards, config.cluster.start_timeout_s)


def wait_for_a_worker(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(__ray_call__=mock.Mock(), start=mock.Mock())
    pool = RolloutPool(config, mock.Mock(), lambda _: None, lambda _: worker)
    monkeypatch.setattr(pool._crew, "shortage", lambda _: "none has come up")
    pool.wait_until_ready()


@pytest.mark.parametrize(
    "wait", [wait_for_a_node, wait_for_a_head, wait_for_a_reward, wait_for_a_worker]
)
def test_a_signal_is_heard_by_whatever_waits_for_roles_to_start(
    wait: Callable[[Config, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(tmp_path / "run", "cluster.start_timeout_s=2")
    with StopSignal("all stays"):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequested):
            wait(config, monkeypatch)
    # A command that hears no signals is asked for none.
    with pytest.raises(InputError):
        wait(config, monkeypatch)


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
