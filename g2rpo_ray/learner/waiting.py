"""Waiting for the learner's ranks: what each answered, or which one was lost, in words."""

import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from g2rpo_ray.cluster.postmortem import error_of, first_line
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.learner.engine import LearnerError

HEARTBEAT_S = 30.0
"""A phase that goes on says so this often, and which ranks are waited for."""
GRACE_S = 15.0
"""When one rank fails, the others' answers are waited for so long: one of them may be dead."""


class RankLostError(LearnerError):
    """A rank died or hangs: its group cannot go on, but can be rebuilt."""


class GroupsLostError(LearnerError):
    """Rollout groups were lost with their node before the update; they can be drawn again."""


def answers_of(
    refs: list[ray.ObjectRef],
    phase: str,
    timeout_s: float,
    tell: Callable[[str], None],
    limit: str = "learner.timeout_s",
) -> list[Any]:
    """Every rank's answer to a call, in the order of ranks.

    A line every ``HEARTBEAT_S`` says that a long phase is no hang.

    Args:
        limit: what ``timeout_s`` comes from, as messages call it.

    Raises:
        RankLostError: a rank died, did not answer in time, or lost touch with another.
        GroupsLostError: an argument was lost with its node.
        LearnerError: a rank failed by itself while none died: it would fail again.
    """
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
                raise RankLostError(
                    f"learner: '{phase}' did not end within {timeout_s:g} s ({limit}); a rank may "
                    "hang in a collective, see the ranks' logs"
                ) from None
        except ray.exceptions.RayTaskError as error:
            raise (as_it_says(error.cause, phase) or _failure(refs, phase)) from error
        except ray.exceptions.RayActorError as error:
            raise RankLostError(
                f"learner: a rank died during '{phase}': {first_line(error)}"
            ) from error


def as_it_says(cause: Exception, phase: str) -> Exception | None:
    """What to raise for a cause that needs no word from the other ranks."""
    if isinstance(cause, ray.exceptions.ObjectLostError):
        return GroupsLostError(f"learner: '{phase}': {first_line(cause)}")
    return cause if isinstance(cause, InputError | RunError) else None


def _failure(refs: list[ray.ObjectRef], phase: str) -> Exception:
    """What it means that a rank failed, from what all of them say within ``GRACE_S``.

    A rank whose peer died fails in a collective, often before the death is known. A rank that fails
    by itself leaves its peers waiting in a collective: that they are silent says nothing of them.
    """
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
    causes, told = [], dict[str, list[str]]()
    for rank, ref in enumerate(refs):
        cause = error_of(ref) if ref in done else None
        if cause is not None:
            causes.append(cause)
        if cause is not None or ref not in done:
            told.setdefault(_in_words(cause), []).append(str(rank))
    for cause in causes:
        if (said := as_it_says(cause, phase)) is not None:
            return said
    message = f"learner: '{phase}': " + "; ".join(
        f"rank {', '.join(ranks)} {words}" for words, ranks in told.items()
    )
    died = any(isinstance(cause, ray.exceptions.RayActorError) for cause in causes)
    if died or all(_is_lost_touch(cause) for cause in causes):
        return RankLostError(message)
    return LearnerError(f"{message} (the traceback is in the rank's log)")


def _in_words(cause: Exception | None) -> str:
    if cause is None:
        return "does not answer"
    if isinstance(cause, ray.exceptions.RayActorError):
        return f"died: {first_line(cause)}"
    return f"failed with {type(cause).__name__}: {cause}"


def _is_lost_touch(cause: Exception) -> bool:
    """Whether a collective or its set-up failed: a peer, or the way to it, is at fault."""
    # Gloo raises plain RuntimeErrors; each begins with the path of its source file.
    return isinstance(cause, torch.distributed.DistError) or (
        isinstance(cause, RuntimeError) and "/gloo/" in str(cause)
    )
