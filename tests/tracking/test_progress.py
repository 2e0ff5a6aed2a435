"""What a person reads while a run goes on."""

import io
import re
import time
from pathlib import Path

from rich.console import Console

from g2rpo_ray.common.formatting import format_seconds
from g2rpo_ray.tracking.progress import Progress, print_table

VALUES = {"reward/hps/mean": 0.61234, "reward/clip/mean": 0.9, "time/iteration_s": 4.0}


def log_console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80, highlight=False), file


def test_a_log_gets_one_line_per_iteration() -> None:
    console, file = log_console()
    with Progress(40, console=console) as progress:
        progress.phase("rollout")
        progress.iteration(1, VALUES)
        progress.iteration(2, VALUES | {"time/iteration_s": 6.0})
    assert file.getvalue().splitlines() == [
        "iteration 1/40 · 4.0 s · hps 0.6123  clip 0.9 · 2 min 36 s left",
        "iteration 2/40 · 6.0 s · hps 0.6123  clip 0.9 · 3 min 10 s left",
    ]


def test_a_log_says_what_a_long_phase_waits_for() -> None:
    console, file = log_console()
    with Progress(40, done=7, console=console, patience_s=0.1) as progress:
        progress.phase("rollout")
        progress.waiting(3, 4, "prompts")
        give_up_s = time.monotonic() + 300
        while file.getvalue().count("\n") < 2 and time.monotonic() < give_up_s:
            time.sleep(0.01)
    first, second, *_ = file.getvalue().splitlines()
    for line in (first, second):
        assert re.fullmatch(r"iteration 7/40 · rollout: 3/4 prompts for \d+(\.\d)? s", line)


def test_a_short_phase_says_nothing() -> None:
    console, file = log_console()
    with Progress(40, console=console) as progress:
        progress.phase("rollout")
        progress.phase("learn")
    assert file.getvalue() == ""


def test_a_terminal_shows_phase_rewards_and_time_left() -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True)
    with Progress(40, console=console) as progress:
        progress.iteration(1, VALUES)
        progress.phase("rollout")
        progress.waiting(3, 4, "prompts")
        progress.note("checkpoint [written]")
    shown = file.getvalue()
    for text in ("iteration 1/40", "4.0 s/iteration", "2 min 36 s left", "hps 0.6123",
                 "rollout: 3/4 prompts", "checkpoint [written]"):  # fmt: skip
        assert text in shown


def test_the_end_table_marks_what_was_not_trained_on() -> None:
    console, file = log_console()
    summary = {
        "iterations": 40, "train_s": 163.2, "evaluations": 39840, "peak_rss_gib": 6.312,
        "heldout": {
            "hps": {"before": 0.579, "after": 0.688},
            "oracle": {"before": 0.545, "after": None},
        },
        "trained_rewards": ["hps"],
    }  # fmt: skip
    print_table(summary, Path("runs/quickstart/report.html"), console=console)
    shown = file.getvalue()
    hps = next(line for line in shown.splitlines() if "hps" in line)
    oracle = next(line for line in shown.splitlines() if "oracle" in line)
    assert "not trained on" not in hps
    assert all(number in hps for number in ("0.5790", "0.6880", "+0.1090"))
    assert "not trained on" in oracle
    assert "–" in oracle
    assert "40 iterations in 2 min 43 s · 39,840 evaluations · peak memory 6.31 GiB" in shown
    assert shown.rstrip().endswith("report: runs/quickstart/report.html")


def test_durations_read_well() -> None:
    assert [format_seconds(s) for s in (0, 9.94, 9.96, 59.4, 59.6, 3599.6, 7620)] == [
        "0.0 s", "9.9 s", "10 s", "59 s", "1 min 00 s", "1 h 00 min", "2 h 07 min",
    ]  # fmt: skip
