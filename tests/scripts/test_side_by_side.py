"""Processes side by side: which card each of them sees."""

import os
from pathlib import Path

import pytest

from side_by_side import side_by_side

DAEMON = "nvidia-cuda-mps-control"


def seen_card(_: int) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def daemon_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for CUDA's daemon, which this machine may lack; what cards it was shown."""
    log = tmp_path / "log"
    program = tmp_path / DAEMON
    program.write_text(f'#!/bin/sh\necho "$1 ${{CUDA_VISIBLE_DEVICES-all}}" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return log


@pytest.mark.parametrize(
    ("given", "cards", "seen"),
    [(None, 2, {"0", "1"}), ("3,5,7", 2, {"3", "5"}), ("5", 1, {"5"}), ("5", 0, {""})],
)
def test_processes_share_the_cards_that_may_be_seen(
    daemon_log: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, cards: int, seen: set[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    found = side_by_side(seen_card, range(2), 1, cards=cards, fresh=True)
    assert set(found) == seen
    # The daemon would count what it is shown anew.
    assert not daemon_log.exists() or daemon_log.read_text().splitlines()[0] == "-d all"
    assert daemon_log.exists() == bool(cards)


@pytest.mark.parametrize(("given", "cards"), [("5", 2), ("", 1)])
def test_more_cards_than_may_be_seen_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: str, cards: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(SystemExit, match=f"--cards {cards}: CUDA_VISIBLE_DEVICES={given} lets"):
        list(side_by_side(seen_card, range(2), 1, cards=cards))
