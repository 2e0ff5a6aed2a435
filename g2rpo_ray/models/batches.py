"""Batches that fit into a device's memory, and what is said where they do not."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from g2rpo_ray.common.errors import RunError

Warn = Callable[[str], None]


class DeviceMemoryError(RunError):
    """The device's memory does not suffice; says for what, and which setting to change."""


class BatchSize:
    """Most rows in one pass of a network; halved once, with a warning, where memory ends."""

    def __init__(self, rows: int, setting: str, warn: Warn = lambda _: None) -> None:
        """``rows`` to begin with, by a ``setting``; ``warn`` is told another number."""
        self.rows = rows
        self._setting, self._warn, self._halved = setting, warn, False

    def run(self, total: int, one_pass: Callable[[slice], Tensor]) -> Tensor:
        """Results of ``one_pass`` on consecutive rows, at most ``rows`` at a time, concatenated.

        Raises:
            DeviceMemoryError: memory ended, also with half the batch.
        """
        parts: list[Tensor] = []
        done = 0
        while done < total:
            part = slice(done, min(done + self.rows, total))
            try:
                parts.append(one_pass(part))
            except torch.OutOfMemoryError as error:
                self._halve(error)
            else:
                done = part.stop
        return torch.cat(parts)

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        wanted = f"{self._setting}={self.rows} ran out of device memory ({_cause(error)})"
        if self._halved or self.rows == 1:
            raise DeviceMemoryError(
                f"{wanted}; lower {self._setting}, or give this role more of the card "
                "(gpus_per_worker, gpus_per_replica, gpus_per_rank)"
            ) from error
        self._halved = True
        self.rows //= 2
        torch.cuda.empty_cache()
        self._warn(
            f"{wanted}; going on with {self.rows}: write that number into the configuration, since "
            "results round differently in another batch"
        )


FEWER = "take a card with more memory, or fewer roles on one card"


@contextmanager
def name_memory(what: str, change: str = FEWER) -> Iterator[None]:
    """Say what did not fit where memory ends inside, and no batch is there to be halved.

    Args:
        change: what to do.

    Raises:
        DeviceMemoryError: memory ended.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{what}: no room beside what is on the device ({_cause(error)}); {change}"
        ) from error


def largest_batch(candidates: tuple[int, ...], run: Callable[[int], object], setting: str) -> int:
    """The first of ``candidates`` (descending) that ``run`` can do in the memory that is free.

    Raises:
        DeviceMemoryError: none of them fits.
    """
    for rows in candidates:
        try:
            run(rows)
            return rows
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            cause = _cause(error)
    raise DeviceMemoryError(
        f"{setting}=auto: not even a batch of {candidates[-1]} fits beside what is on the device "
        f"({cause}); take a card with more memory, smaller pictures (sampling.height and width), "
        "or fewer roles on one card"
    )


def _cause(error: torch.OutOfMemoryError) -> str:
    # PyTorch names what was asked for, what is free and which process holds how much; the rest of
    # its message is advice on its allocator.
    words = " ".join(str(error).split("If reserved but")[0].split())
    return re.sub(r"Process (\d+)(?= has)", _role, words)


def _role(process: re.Match[str]) -> str:
    """As Ray names it, such as ``ray::Learner.update``; a container may not show it."""
    with suppress(OSError):
        title = Path(f"/proc/{process[1]}/cmdline").read_text().replace("\0", " ").strip()
        if title.startswith("ray::"):
            return f"{title} (process {process[1]})"
    return process[0]
