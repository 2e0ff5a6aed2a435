"""Prompts on their way from the encoder: which have their embeddings, and which never will."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Self

import ray

from g2rpo_ray.cluster.postmortem import error_of, first_line
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.rollout.dispatch import Dispatch
from g2rpo_ray.rollout.waits import Waits

POLL_S = 0.5
ENCODER = "the prompt encoder"


class SupplyError(RunError):
    """A prompt has no embeddings: the encoder, or the store that they lay in, is at fault."""


class Supply:
    """Watches the prompts of one run of the pool; embeddings are not fetched to the driver.

    Args:
        prompts: references to Prompt, by task; one may be there several times.
        wake: called from another thread when more have come.
        limit_s: ``rollout.timeout_s``; so long workers may have nothing to do for want of one.
    """

    def __init__(
        self,
        prompts: Sequence[ray.ObjectRef],
        wake: Callable[[], None],
        limit_s: float,
        waits: Waits,
    ) -> None:
        self._prompts, self._wake, self._limit_s, self._waits = prompts, wake, limit_s, waits
        self._tasks: dict[ray.ObjectRef, list[int]] = {}
        for task, prompt in enumerate(prompts):
            self._tasks.setdefault(prompt, []).append(task)
        self._arrived: SimpleQueue[int] = SimpleQueue()
        self._over = threading.Event()
        self._since_s = time.monotonic()
        """When the last one came, or was not yet waited for."""

    def __enter__(self) -> Self:
        pending = self._take(list(self._tasks), 0.0)
        if pending:
            threading.Thread(target=self._watch, args=(pending,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def offer_to(self, dispatch: Dispatch, now_s: float) -> None:
        """Have handed out what embeddings have come for since the last call.

        Raises:
            SupplyError: none came for too long.
        """
        while not self._arrived.empty():
            dispatch.offer(self._arrived.get())
            self._since_s = now_s
        if not dispatch.starved:
            self._since_s = now_s
            return
        waited_s = now_s - self._since_s
        lacking = f"{dispatch.lacking} of {dispatch.tasks} prompts have no embeddings"
        self._waits.note(lacking, ENCODER, waited_s)
        if waited_s > self._limit_s:
            raise SupplyError(
                f"{lacking}, and the last came {waited_s:.0f} s ago: {ENCODER} is too slow or "
                f"hangs (rollout.timeout_s is {self._limit_s:g}). Embed the prompts before the run "
                "(g2rpo embed), or give the encoder a card (prompts.encoder_gpus)"
            )

    def check(self, task: int, error: BaseException | None) -> None:
        """After a task failed with ``error``: whether that was for want of its embeddings.

        Raises:
            SupplyError: it was; no worker could have done it.
        """
        if error is not None and (cause := error_of(self._prompts[task])) is not None:
            raise SupplyError(
                f"prompt {task} of the batch has no embeddings: the prompt encoder, or the object "
                f"store, failed with {type(cause).__name__}: {first_line(cause)}"
            ) from cause

    def _watch(self, pending: list[ray.ObjectRef]) -> None:
        while pending and not self._over.is_set():
            before = len(pending)
            pending = self._take(pending, POLL_S)
            if len(pending) < before:
                self._wake()

    def _take(self, pending: list[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
        """Waits for one, and takes all that are there; returns the others."""
        first, pending = ray.wait(pending, timeout=timeout_s, fetch_local=False)
        rest: list[ray.ObjectRef] = []
        if pending:
            rest, pending = ray.wait(
                pending, num_returns=len(pending), timeout=0, fetch_local=False
            )
        for prompt in [*first, *rest]:
            for task in self._tasks[prompt]:
                self._arrived.put(task)
        return pending
