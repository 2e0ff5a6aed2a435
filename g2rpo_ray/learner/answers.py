"""Waiting for the learner's ranks: what each answered, or which one was lost, in words."""

import time
from collections.abc import Callable
from typing import Any

import ray

from g2rpo_ray.errors import InputError, RunError
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.postmortem import first_line

HEARTBEAT_S = 30.0
"""A phase that goes on says so this often, and which ranks are waited for."""
GRACE_S = 15.0
"""When one rank fails, the others' answers are waited for so long: one of them may be dead."""


class RankLostError(LearnerError):
    """A rank died or hangs: its group cannot go on, but can be rebuilt."""


class GroupsLostError(LearnerError):
    """Rollout groups were lost with their node before the update; they can be drawn again."""


def answers_of(
    refs: list[ray.ObjectRef], phase: str, timeout_s: float, tell: Callable[[str], None]
) -> list[Any]:
    """Every rank's answer to a call, in the order of ranks.

    Raises:
        RankLostError: a rank died, or did not answer in time.
        GroupsLostError: an argument was lost with its node.
        LearnerError: a rank failed while all of them live: it would fail again.
    """
    try:
        return _wait(refs, phase, timeout_s, tell)
    except ray.exceptions.GetTimeoutError:
        raise RankLostError(
            f"learner: '{phase}' did not end within {timeout_s:g} s (learner.timeout_s); a "
            "rank may hang in a collective, see the ranks' logs"
        ) from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ray.exceptions.ObjectLostError):
            raise GroupsLostError(f"learner: '{phase}': {first_line(cause)}") from error
        if isinstance(cause, InputError | RunError):
            raise cause from error
        # A rank whose peer died fails in a collective, often before the death is known.
        _raise_if_lost(refs, phase)
        raise LearnerError(
            f"learner: '{phase}' failed with {type(cause).__name__}: {cause} (the traceback is "
            "in the rank's log)"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise RankLostError(
            f"learner: a rank died during '{phase}': {first_line(error)}"
        ) from error


def _wait(
    refs: list[ray.ObjectRef], phase: str, timeout_s: float, tell: Callable[[str], None]
) -> list[Any]:
    """As ``ray.get``, with a line every ``HEARTBEAT_S``: a long phase is no hang."""
    started_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - started_s
        left_s = max(0.0, timeout_s - waited_s)
        if waited_s >= HEARTBEAT_S:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
            silent = [rank for rank, ref in enumerate(refs) if ref not in done]
            tell(
                f"learner: '{phase}' for {waited_s:.0f} s, of {timeout_s:.0f} s at most; "
                f"waiting for rank {', '.join(map(str, silent))}"
            )
        try:
            return ray.get(refs, timeout=min(HEARTBEAT_S, left_s))
        except ray.exceptions.GetTimeoutError:
            if left_s <= HEARTBEAT_S:
                raise


def _raise_if_lost(refs: list[ray.ObjectRef], phase: str) -> None:
    done, silent = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
    if silent:
        raise RankLostError(
            f"learner: rank {refs.index(silent[0])} does not answer in '{phase}', and another "
            "failed"
        )
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise RankLostError(
                f"learner: rank {refs.index(ref)} died during '{phase}': {first_line(error)}"
            ) from error
        except ray.exceptions.RayError:
            continue
