"""RolloutPool: rollout workers as one, prompts handed out one by one."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from g2rpo_ray.config import Config
from g2rpo_ray.errors import RunError
from g2rpo_ray.rollout.worker import (
    HeldoutDraw,
    HeldoutPictures,
    RolloutSummary,
    RolloutWorker,
    Scoring,
)

QUEUED_PER_WORKER = 2
"""One running and one waiting: a worker never idles between two prompts."""
POLL_S = 0.5

OnWait = Callable[[int, int], None]
"""Called with (done, total) while the pool waits; may raise to give up."""


class RolloutError(RunError):
    """A rollout failed; the message names worker, prompt and cause."""


class RolloutPool:
    """Starts the workers and spreads work over them; results come back in the order asked for."""

    def __init__(self, config: Config, placement: PlacementGroup, scoring: Scoring) -> None:
        """
        Args:
            placement: worker w runs in bundle w.
            scoring: handed to every worker.
        """
        settings = config.rollout
        self._timeout_s = settings.timeout_s
        self.workers: list[ActorHandle] = [
            ray.remote(RolloutWorker)
            .options(
                num_cpus=settings.cpus_per_worker,
                num_gpus=settings.gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, worker),
            )
            .remote(config, scoring, worker)
            for worker in range(settings.workers)
        ]

    def generate(
        self, prompts: Sequence[ray.ObjectRef], iteration: int, on_wait: OnWait
    ) -> tuple[list[RolloutSummary], list[ray.ObjectRef]]:
        """Draw one group for each prompt.

        Args:
            prompts: references to Prompt, by slot.
            iteration: counted from 0; it makes the group ids.

        Returns:
            Summaries, and references to the RolloutGroups, both by slot.
        """
        first_id = iteration * len(prompts)
        calls = [
            lambda worker, slot=slot, prompt=prompt: worker.rollout.options(num_returns=2).remote(
                prompt, first_id + slot, iteration
            )
            for slot, prompt in enumerate(prompts)
        ]
        refs = self._run(calls, on_wait)
        return ray.get([summary for summary, _ in refs]), [group for _, group in refs]

    def evaluate(
        self,
        prompts: Sequence[ray.ObjectRef],
        on_wait: OnWait,
        draw: HeldoutDraw | None = None,
        latents: Sequence[ray.ObjectRef | None] | None = None,
    ) -> list[HeldoutPictures]:
        """Draw and score held-out prompts, in their order; see ``RolloutWorker.evaluate``."""
        calls = [
            lambda worker, prompt=prompt, start=start: [worker.evaluate.remote(prompt, draw, start)]
            for prompt, start in zip(prompts, latents or [None] * len(prompts), strict=True)
        ]
        return ray.get([ref for (ref,) in self._run(calls, on_wait)])

    def walk(
        self, prompts: Sequence[ray.ObjectRef], on_wait: OnWait, draw: HeldoutDraw
    ) -> list[ray.ObjectRef]:
        """References to the latents of held-out prompts at ``draw.last``, in their order."""
        calls = [
            lambda worker, prompt=prompt: [worker.walk.remote(prompt, draw)] for prompt in prompts
        ]
        return [ref for (ref,) in self._run(calls, on_wait)]

    def _run(
        self, calls: Sequence[Callable[[Any], list[ray.ObjectRef]]], on_wait: OnWait
    ) -> list[list[ray.ObjectRef]]:
        """Make every call on some worker; the first reference of a call says that it is done."""
        waiting = deque(range(len(calls)))
        results: dict[int, list[ray.ObjectRef]] = {}
        running: dict[ray.ObjectRef, int] = {}
        load = [0] * len(self.workers)
        idle_s = 0.0
        while waiting or running:
            while waiting and min(load) < QUEUED_PER_WORKER:
                worker, number = load.index(min(load)), waiting.popleft()
                results[number] = calls[number](self.workers[worker])
                running[results[number][0]] = worker
                load[worker] += 1
            done, _ = ray.wait(list(running), timeout=POLL_S)
            for ref in done:
                worker = running.pop(ref)
                load[worker] -= 1
                self._raise_if_failed(ref, worker)
            on_wait(len(calls) - len(waiting) - len(running), len(calls))
            idle_s = 0.0 if done else idle_s + POLL_S
            if idle_s > self._timeout_s:
                raise RolloutError(
                    f"no rollout worker finished a prompt for {idle_s:.0f} s "
                    "(rollout.timeout_s); see the workers' logs in the Ray dashboard"
                )
        return [results[number] for number in range(len(calls))]

    @staticmethod
    def _raise_if_failed(ref: ray.ObjectRef, worker: int) -> None:
        try:
            ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise RolloutError(f"rollout worker {worker} failed: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise RolloutError(f"rollout worker {worker} died: {error}") from error
