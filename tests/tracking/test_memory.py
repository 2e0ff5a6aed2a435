"""PeakMemory sees what the processes of a run really take."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from g2rpo_ray.tracking import memory
from g2rpo_ray.tracking.memory import PeakMemory

MIB = 2**20


@contextmanager
def process_holding(mebibytes: int, *arguments: str, orphan: bool = False) -> Iterator[None]:
    """A process with so much memory in use, until the block ends; as an orphan, no child of us."""
    hold = f"b = b'x' * ({mebibytes} << 20); print(len(b), flush=True); input()"
    command = [sys.executable, "-c", hold, *arguments]
    if orphan:
        # The shell goes at once, so that what it started belongs to init.
        command = ["sh", "-c", 'exec 3<&0; "$@" <&3 & exit', "sh", *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.write(b"\n")
            process.stdin.flush()


@pytest.fixture(autouse=True)
def only_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out this process and its children so far, such as other tests' Ray session.

    Their share of common pages moves whenever another process that uses the same libraries ends.
    """
    old = {os.getpid()} | {child.pid for child in psutil.Process().children(recursive=True)}
    find = PeakMemory._processes
    monkeypatch.setattr(
        PeakMemory, "_processes", lambda peak: (p for p in find(peak) if p.pid not in old)
    )
    monkeypatch.setattr(PeakMemory, "_ray_session", lambda _peak: "")


def test_a_child_is_counted_and_its_peak_is_kept() -> None:
    with PeakMemory(interval_s=0.05) as peak:
        before = peak.sample()
        with process_holding(200):
            seen = peak.sample()
    assert 0.19 < seen - before < 0.3
    assert peak.peak_rss_gib >= seen
    assert peak.pss_gib < before + 0.1, "the child is gone from the last sample"


def test_the_thread_samples_by_itself() -> None:
    with PeakMemory(interval_s=0.05) as peak:
        before = peak.sample()
        with process_holding(100):
            deadline = time.monotonic() + 300
            while peak.peak_rss_gib < before + 0.09 and time.monotonic() < deadline:
                time.sleep(0.02)
        assert peak.peak_rss_gib > before + 0.09


def test_processes_of_the_ray_session_count_wherever_they_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = f"session_of_test_{os.getpid()}"
    peak = PeakMemory()
    before = peak.sample()
    with process_holding(100, f"--session-dir=/somewhere/{session}/logs", orphan=True):
        assert peak.sample() - before < 0.05, "an orphan of no session is not ours"
        monkeypatch.setattr(peak, "_ray_session", lambda: session)
        assert peak.sample() - before > 0.09


def test_a_process_that_may_not_be_read_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    peak = PeakMemory()
    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    with process_holding(1):
        assert peak.sample() == 0
        peak.sample()
    assert len([r for r in caplog.records if r.name == memory.__name__]) == 1, "said once"


def test_a_process_that_vanishes_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def vanish(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    peak = PeakMemory()
    monkeypatch.setattr(psutil.Process, "memory_full_info", vanish)
    assert peak.sample() == 0
    assert not [r for r in caplog.records if r.name == memory.__name__]
