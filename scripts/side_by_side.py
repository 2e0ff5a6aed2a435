"""Many processes of one thread side by side: on the CPU, or sharing cards under CUDA's MPS."""

import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    processes: int,
    *,
    cards: int = 0,
    fresh: bool = False,
    limit_s: float = 0.0,
) -> Iterator[Result]:
    """Results as they come.

    Args:
        work: a function of a module; runs in a process that sees one card at most.
        processes: in all; those of a card share it.
        cards: to use, the first of those that ``CUDA_VISIBLE_DEVICES`` names, or of the machine; 0
            is the CPU.
        fresh: a new process for every job.
        limit_s: seconds after which what is under way is dropped; 0 waits for all.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    deadline_s = time.monotonic() + (limit_s or float("inf"))
    context = multiprocessing.get_context("spawn")
    names = _names_of(cards)
    with (
        one_server(cards),
        context.Pool(processes, _see_one_card, (names,), 1 if fresh else None) as pool,
    ):
        results = pool.imap_unordered(work, jobs, chunksize=1)
        for _ in jobs:
            left_s = deadline_s - time.monotonic()
            try:
                yield results.next(None if left_s == float("inf") else max(left_s, 0.001))
            except multiprocessing.TimeoutError:
                return


def _names_of(cards: int) -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(card) for card in range(cards)] if given is None else given.split(",")
    if cards > len(names) or (cards and not names[0]):
        raise SystemExit(f"--cards {cards}: CUDA_VISIBLE_DEVICES={given} lets fewer be seen")
    return names[:cards]


def _see_one_card(names: Sequence[str]) -> None:
    # A pool counts its processes from 1, those that took another's place, too.
    number = multiprocessing.current_process()._identity[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number % len(names)] if names else ""


@contextmanager
def one_server(cards: int) -> Iterator[None]:
    """CUDA's MPS daemon, without which the processes of a card take turns."""
    if not cards or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ |= dict.fromkeys(names, folder)
        try:
            # It would count the cards that it is shown anew; its clients choose among all.
            shown = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, env=shown)
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
            for name in names:
                del os.environ[name]
