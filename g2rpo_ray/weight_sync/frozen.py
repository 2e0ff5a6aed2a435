"""Frozen weights once a card: a small actor holds them there, and the roles on the card map them.

``FrozenKeeper``, one a run, starts the holders: were they a role's own, they would end with it. A
role whose holder is gone ends itself; it is replaced as after any death, and gets a new holder.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from g2rpo_ray.cluster.postmortem import first_line
from g2rpo_ray.common.logs import log_as, logged
from g2rpo_ray.config import Config, ModelSection
from g2rpo_ray.models.batches import name_memory
from g2rpo_ray.models.loading import DTYPES, load_part
from g2rpo_ray.models.sharing import Lent, SharingError, lend

logger = logging.getLogger(__name__)

PROBE = "probe"
"""A number that is lent before anything is loaded, to see whether others can open it."""
HOLDER_LOST = 75
"""Exit code of a role whose holder is gone."""
SHOW_CARD = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""With 0, Ray leaves a process that it reserves no card for the one that it is given here."""


class FrozenHolder:
    """Loads the parts of a model once, each when it is first asked for, and lends them."""

    def __init__(self, model: ModelSection, card: str) -> None:
        """
        Args:
            card: as ``CUDA_VISIBLE_DEVICES`` names it; empty is the CPU.
        """
        log_as("frozen", card or "cpu")
        self._model, self._device = model, torch.device("cuda" if card else "cpu")
        self._parts: dict[str, Any] = {}
        self._lent: dict[str, Lent] = {}

    def lend(self, part: str) -> Lent:
        """A part of the model's folder, or ``PROBE``.

        Raises:
            ModelFolderError: as of ``load_part``.
            DeviceMemoryError: it does not fit on the card.
        """
        if part not in self._parts:
            with logged(f"loading {part}"), name_memory("the frozen weights of a card"):
                self._parts[part] = (
                    torch.ones(1, device=self._device)
                    if part == PROBE
                    else load_part(self._model, part, DTYPES[self._model.dtype], self._device)
                )
        # A handle of a card's memory is for one process.
        if part not in self._lent or self._device.type == "cuda":
            self._lent[part] = lend(self._parts[part], self._device)
        return self._lent[part]

    async def lives(self) -> None:
        """Never answers: who waits for it learns of this process's end."""
        await asyncio.Event().wait()


class FrozenKeeper:
    """Knows the holder of every card; starts one where there is none, or none any more."""

    def __init__(self, model: ModelSection) -> None:
        log_as("frozen", "keeper")
        self._model = model
        self._holders: dict[tuple[str, str], tuple[ActorHandle, ray.ObjectRef]] = {}
        self._started = Counter[tuple[str, str]]()

    def holder(self, node_id: str, card: str) -> tuple[ActorHandle, int]:
        """Of a card of a node, or of its CPU roles; and how many were lost there before."""
        place = node_id, card
        if place not in self._holders or ray.wait([self._holders[place][1]], timeout=0)[0]:
            shown = {"CUDA_VISIBLE_DEVICES": card, SHOW_CARD: "0"} if card else {}
            actor = ray.remote(FrozenHolder).options(
                num_cpus=0, runtime_env={"env_vars": shown}, scheduling_strategy=_on_node(node_id)
            )
            holder = actor.remote(self._model, card)
            self._holders[place] = holder, holder.lives.remote()
            self._started[place] += 1
        return self._holders[place][0], self._started[place] - 1


@contextmanager
def frozen_keeper(config: Config) -> Iterator[None]:
    """While inside, roles that start share frozen weights, if the run is to (``shares_frozen``)."""
    if not config.shares_frozen:
        yield
        return
    # Its holders end with it, and their users then: all come again.
    kind = ray.remote(FrozenKeeper).options(
        name=_keeper_name(),
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=_on_node(ray.get_runtime_context().get_node_id()),
    )
    keeper = kind.remote(config.model)
    try:
        yield
    finally:
        ray.kill(keeper)


class FrozenParts:
    """Loads parts of a model folder for one role: those that its card's holder has, by mapping."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: of the role, which is an actor of the run, or in no run.
        """
        self.description = ""
        """What to tell of it; empty in a run that does not share."""
        self._holder: ActorHandle | None = None
        if (found := _holder_of(device)) is None:
            return
        self._holder, lost = found
        try:
            _asked(self._holder, PROBE).open()
        except SharingError as error:
            self._holder = None
            self.description = f"own copy of the frozen weights, cannot map others' ({error})"
            logger.warning(self.description)
            return
        self.description = "frozen weights shared with its card's other roles"
        if lost:
            self.description += f" (holder {lost + 1}: the one before ended, and its roles with it)"
        threading.Thread(target=_end_with, args=(self._holder,), daemon=True).start()

    def __call__(
        self, model: ModelSection, part: str, dtype: torch.dtype, device: torch.device | str
    ) -> Any:
        """As ``load_part``."""
        if self._holder is None:
            return load_part(model, part, dtype, device)
        return _asked(self._holder, part).open()


def _keeper_name() -> str:
    """Known to all actors of a run: they belong to one job."""
    return f"frozen-{ray.get_runtime_context().get_job_id()}"


def _on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _holder_of(device: torch.device) -> tuple[ActorHandle, int] | None:
    if not ray.is_initialized():
        return None
    try:
        keeper = ray.get_actor(_keeper_name())
    except ValueError:
        return None
    # As Ray has set it; every role computes on the first that it sees.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    card = visible.split(",")[0] if device.type == "cuda" else ""
    found: tuple[ActorHandle, int] = ray.get(
        keeper.holder.remote(ray.get_runtime_context().get_node_id(), card)
    )
    return found


def _asked(holder: ActorHandle, part: str) -> Lent:
    try:
        lent: Lent = ray.get(holder.lend.remote(part))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    return lent


def _end_with(holder: ActorHandle) -> None:
    """On a thread of its own: on a card the memory is not there any more."""
    try:
        ray.get(holder.lives.remote())
    except ray.exceptions.RayActorError as error:
        logger.error(
            "the holder of this card's frozen weights is gone, and this role ends (%s)",
            first_line(error),
        )
        os._exit(HOLDER_LOST)
