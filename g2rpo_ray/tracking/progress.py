"""What a person sees while a run goes on, and the table at its end."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from g2rpo_ray.common.formatting import format_change, format_score, format_seconds

logger = logging.getLogger(__name__)

RECENT_ITERATIONS = 10
"""Seconds per iteration and the time left are means over so many iterations."""


class Progress:
    """A live bar on a terminal; plain lines anywhere else.

    Elsewhere (a log, CI) there is one line per iteration, and one whenever a phase has lasted
    ``patience_s``, twice that, four times that, ...: a silent run says what it waits for, and a
    long one does not fill the log.

    Args:
        done: iterations that an earlier life of the run has made.
        console: where to write; the process's standard output by default.
        patience_s: seconds after which a phase is worth a line.
    """

    def __init__(
        self,
        iterations: int,
        done: int = 0,
        *,
        console: Console | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self._iterations = iterations
        self._done = done
        self._console = console or Console()
        self._patience_s = patience_s
        self._seconds: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._rewards = ""
        self._phase = "starting"
        self._waiting = ""
        self._phase_start = time.monotonic()
        self._next_line_s = patience_s
        self._live: Live | None = None
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Twice a second is enough for a clock, and leaves the cores to the run.
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=2
            )
            self._live.start()
        else:
            self._watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._live:
            self._live.stop()
        if self._watcher:
            self._watcher.join()

    def phase(self, text: str) -> None:
        """Say what the run does now, such as ``rollout``; its clock starts at 0."""
        self._phase, self._waiting = text, ""
        self._phase_start = time.monotonic()
        self._next_line_s = self._patience_s

    def waiting(self, done: int, total: int, what: str) -> None:
        """Say how far the phase is: ``3/4 prompts``."""
        self._waiting = f"{done}/{total} {what}"

    def iteration(self, iteration: int, values: Mapping[str, float]) -> None:
        """An iteration (counted from 1) is done; ``values`` are what was recorded for it."""
        self._done = iteration
        seconds = values.get("time/iteration_s")
        if seconds is not None:
            self._seconds.append(seconds)
        self._rewards = "  ".join(
            f"{name.split('/')[1]} {value:.4g}"
            for name, value in values.items()
            if name.startswith("reward/") and name.endswith("/mean")
        )
        if not self._live:
            took = f"{seconds:.1f} s" if seconds is not None else ""
            self._print_line(took, self._rewards, self._time_left())

    def note(self, text: str) -> None:
        """Print a line that stays, above the bar; the driver's log has it, too."""
        logger.info(text)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _watch(self) -> None:
        while not self._closed.wait(self._patience_s / 10):
            seconds = time.monotonic() - self._phase_start
            if seconds >= self._next_line_s:
                self._next_line_s *= 2
                self._print_line(f"{self._status()} for {format_seconds(seconds)}")

    def _print_line(self, *parts: str) -> None:
        line = f"iteration {self._done}/{self._iterations}"
        self.note(" · ".join([line, *filter(None, parts)]))

    def _status(self) -> str:
        return f"{self._phase}: {self._waiting}" if self._waiting else self._phase

    def _time_left(self) -> str:
        if not self._seconds or self._done >= self._iterations:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        return f"{format_seconds(mean * (self._iterations - self._done))} left"

    def _render(self) -> Group:
        bar = Table.grid(padding=(0, 2))
        cells: list[Any] = [
            f"iteration {self._done}/{self._iterations}",
            ProgressBar(total=self._iterations, completed=self._done, width=30),
        ]
        if self._seconds:
            cells.append(f"{sum(self._seconds) / len(self._seconds):.1f} s/iteration")
        bar.add_row(*cells, self._time_left())
        seconds = time.monotonic() - self._phase_start
        status = Text(f"{self._status()}  {format_seconds(seconds)}", style="dim")
        return Group(bar, *([Text(self._rewards)] if self._rewards else []), status)


def print_table(
    summary: Mapping[str, Any], report: Path, *, console: Console | None = None
) -> None:
    """Print what a run has come to: its ``summary.json``, and where its report is."""
    console = console or Console()
    table = Table(title="Held-out prompts", title_justify="left")
    table.add_column("reward")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, scores in summary["heldout"].items():
        trained = name in summary["trained_rewards"]
        table.add_row(
            Text(name) + Text("" if trained else "  not trained on", style="dim"),
            format_score(scores["before"]),
            format_score(scores["after"]),
            format_change(scores["before"], scores["after"]),
        )
    console.print(table)
    facts = [
        f"{summary['iterations']} iterations in {format_seconds(summary['train_s'])}",
        f"{summary['evaluations']:,} evaluations",
        f"peak memory {summary['peak_rss_gib']:.2f} GiB",
    ]
    for line in (" · ".join(facts), f"report: {report}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
